"""Runs that are struck, each with a part of the faults, from its start to its end and the check of
its invariants."""

import contextlib
import shutil
import time
from collections import Counter
from pathlib import Path

import psutil

from tests.chaos import invariants, strikes, world
from tests.chaos.plan import KINDS, Fault, plan
from tests.chaos.run import Struck
from tests.forks import Server
from tests.runs import Lost
from tests.world import search

CHAPTER = 100
"""Faults of one run."""
WIDTH = 80


def chaos(
    seed: int,
    count: int,
    kinds: list[str],
    folder: Path,
    server: Server,
    mounts: bool = False,
    schedulers: int = 1,
) -> bool:
    """Strike runs in ``folder`` with ``count`` faults. Return whether an invariant was broken.
    server: whose forks the runs are. mounts: whether disks may be mounted. schedulers: how many
    each run has."""
    disk = folder / "disk"
    disk.mkdir()
    own = mounts and strikes.mount(disk, f"size={strikes.DISK_MIB}m", first=True)
    kinds = [kind for kind in kinds if own or kind not in ("full", "read-only")]
    if not own:
        print("no disk can be mounted here: no fault of the kinds full and read-only strikes")
    if not kinds:
        return False
    faults = plan(seed, count, kinds, schedulers)
    world_folder = folder / "world"
    world_folder.mkdir()
    config = search(world_folder)
    struck: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    try:
        for first in range(0, len(faults), CHAPTER):
            run = Struck(config, disk / "run", server, schedulers)
            try:
                broken = _chapter(run, faults[first : first + CHAPTER], struck, survived)
            finally:
                run.close()
            if broken:
                _keep(run, folder)
                print("\n".join(broken))
                print(f"the seed was {seed}; the run is kept in {folder / 'run'}")
                return True
            shutil.rmtree(run.folder)
    finally:
        _table(struck, survived)
        if own:
            strikes.unmount(disk)
    shutil.rmtree(world_folder)
    shutil.rmtree(disk)
    print("every invariant holds")
    return False


def _chapter(
    run: Struck, faults: list[Fault], struck: Counter[str], survived: Counter[str]
) -> list[str]:
    start = time.monotonic()
    run.launch(world.settings(len(run.homes)))
    try:
        run.settle(3)
        for fault in faults:
            began = time.monotonic()
            struck[fault.kind] += 1
            what = strikes.strike(run, fault)
            run.settle(3 if KINDS[fault.kind].starts else 2)
            survived[fault.kind] += 1
            seconds = time.monotonic() - began
            where = f"{fault.number:>4} {fault.kind:<10} {fault.place:<11} {seconds:>5.1f} s"
            print(f"{where}  {' '.join(what.split())}"[:WIDTH], flush=True)
        if (status := run.stop_and_end()) != 0:
            return [f"the run's end: exit status {status}, expected 0:\n{run.said()[-1500:]}"]
    except (Lost, OSError, psutil.Error) as lost:
        return [f"after {sum(survived.values())} faults: {lost}"]
    broken = invariants.left_behind(run)
    broken += invariants.of_the_files(run.folder, world.QUESTIONS * len(run.homes))
    count = invariants.account(run.folder)
    print(
        f"{count.drawn} drawn = {count.trained} trained + {count.quarantined} quarantined;"
        f" {count.updates} updates, {run.launches} launches, {time.monotonic() - start:.0f} s"
    )
    return broken


def _keep(run: Struck, folder: Path) -> None:
    shutil.copytree(run.folder, folder / "run", ignore_dangling_symlinks=True)
    with contextlib.suppress(OSError):
        shutil.copyfile(run.out, folder / "run" / "launcher.out")


def _table(struck: Counter[str], survived: Counter[str]) -> None:
    rows = [(kind, struck[kind], survived[kind]) for kind in KINDS if struck[kind]]
    for row in (("kind", "struck", "survived"), *rows, ("all", struck.total(), survived.total())):
        print("{:<12}{:>8}{:>10}".format(*row), flush=True)
