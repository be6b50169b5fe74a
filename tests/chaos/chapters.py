"""Runs that are struck, each with a part of the faults, and the check of their invariants."""

import shutil
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import psutil

from tests.chaos import invariants, strikes, world
from tests.chaos.plan import KINDS, Fault
from tests.chaos.run import Struck
from tests.forks import Server
from tests.runs import Lost
from tests.world import search

CHAPTER, WIDTH = 100, 80
"""Faults of one run, and characters of a printed line."""


def chaos(
    faults: list[Fault], folder: Path, server: Server, mounts: bool = False, schedulers: int = 1
) -> bool:
    """Strike runs in ``folder``. Return whether an invariant was broken. mounts: whether disks may
    be mounted."""
    disk, place = folder / "disk", folder / "world"
    disk.mkdir()
    place.mkdir()
    own = mounts and strikes.mount(disk, f"size={strikes.DISK_MIB}m", first=True)
    if not own:
        print("no disk can be mounted here: no fault of the kinds full and read-only strikes")
        faults = [fault for fault in faults if fault.kind not in ("full", "read-only")]
    config, struck, survived = search(place), Counter[str](), Counter[str]()
    try:
        for first in range(0, len(faults), CHAPTER):
            with closing(Struck(config, disk / "run", server, schedulers)) as run:
                broken = _chapter(run, faults[first : first + CHAPTER], struck, survived)
            if broken:
                shutil.copytree(run.folder, folder / "run", ignore_dangling_symlinks=True)
                print("\n".join(broken))
                print(f"the run is kept in {folder / 'run'}, what it said in {run.out}")
                return True
            shutil.rmtree(run.folder)
    finally:
        rows = [(kind, struck[kind], survived[kind]) for kind in KINDS if struck[kind]]
        total = ("all", struck.total(), survived.total())
        for row in (("kind", "struck", "survived"), *rows, total):
            print("{:<12}{:>8}{:>10}".format(*row), flush=True)
        if own:
            strikes.unmount(disk)
    shutil.rmtree(place)
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
        return [f"after {survived.total()} faults: {lost}"]
    broken = invariants.left_behind(run)
    broken += invariants.of_the_files(run.folder, world.QUESTIONS * len(run.homes))
    count = invariants.account(run.folder)
    print(
        f"{count.drawn} drawn = {count.trained} trained + {count.quarantined} quarantined;"
        f" {count.updates} updates, {run.launches} launches, {time.monotonic() - start:.0f} s"
    )
    return broken
