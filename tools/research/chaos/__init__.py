"""The command tools/chaos: it strikes a small run of the real processes with many faults, one after another, and checks that nothing is lost.

A fault strikes after the run has made updates since the fault before, never by the clock. After every ``CHAPTER`` faults the run is brought to
its end, its invariants are checked from outside, and another run begins. docs/reliability.md says what is struck and what was measured.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tools.research.chaos import invariants, strikes, world
from tools.research.chaos.plan import KINDS, Fault, plan
from tools.research.chaos.run import Lost, Run

CHAPTER = 100
"""Faults of one run."""
_OWN = "COPPICE_CHAOS_OWN_MOUNTS"
"""Set in the environment of the command once it has a name space of mounts of its own."""
WIDTH = 80


def arguments(options: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="tools/chaos", description="Strike a run with faults; nothing may be lost.")
    parser.add_argument("--faults", type=int, default=100, metavar="N", help="how many faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides all faults and their order (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="where a run is kept that broke an invariant (default: a new folder in /tmp)")
    parser.add_argument("--only", nargs="+", choices=sorted(KINDS), metavar="KIND", help="these kinds of faults alone")
    parser.add_argument("--list", action="store_true", help="print the kinds of faults and end")
    parsed = parser.parse_args(options)
    if parsed.faults < 1:
        parser.error(f"--faults {parsed.faults}: expected at least 1")
    if parsed.out is not None and parsed.out.exists() and any(parsed.out.iterdir()):
        parser.error(f"--out {parsed.out}: expected a folder that is empty or not there")
    return parsed


def main(options: list[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if an invariant is broken, 130 after Ctrl-C."""
    asked = arguments(options)
    if asked.list:
        print("\n".join(f"{name:<11} {kind.share:>3} of 100  {kind.text}; {', '.join(kind.places)}" for name, kind in KINDS.items()))
        return 0
    if _OWN not in os.environ and shutil.which("unshare"):
        _with_own_mounts()
    folder = asked.out or Path(tempfile.mkdtemp(prefix="coppice-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _chaos(asked, folder.resolve())
    except KeyboardInterrupt:
        print(f"\nstopped; every process is gone. {folder} holds what was written", file=sys.stderr)
        return 130


def _with_own_mounts() -> None:
    """Start this command again where it may mount a small disk that nobody else sees, if the system lets it."""
    command = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
        os.execvpe(command[0], [*command, sys.executable, *sys.argv], os.environ | {_OWN: "1"})


def _chaos(asked: argparse.Namespace, folder: Path) -> int:
    disk = folder / "disk"
    disk.mkdir()
    own = _OWN in os.environ and strikes.mount(disk, f"size={strikes.DISK_MIB}m", first=True)
    kinds = [kind for kind in asked.only or KINDS if own or kind not in ("full", "read-only")]
    if not own:
        print("no disk of its own can be mounted here: no fault of the kinds full and read-only")
    faults = plan(asked.seed, asked.faults, kinds)
    world_folder = folder / "world"
    world_folder.mkdir()
    config = world.make(world_folder)
    struck: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    accounts = []
    try:
        for first in range(0, len(faults), CHAPTER):
            run = Run(world_folder, disk / "run")
            try:
                broken = _chapter(run, config, faults[first : first + CHAPTER], struck, survived, accounts)
            finally:
                run.close()
            if broken:
                _keep(run, folder)
                print("\n".join(broken))
                print(f"the seed was {asked.seed}; the run is kept in {folder / 'run'}")
                return 1
            shutil.rmtree(run.folder)
    finally:
        _table(struck, survived)
        if own:
            strikes.unmount(disk)
    print("\n".join(accounts))
    print("every invariant holds")
    if asked.out is None:
        shutil.rmtree(folder)
    return 0


def _chapter(run: Run, config: Path, faults: list[Fault], struck: Counter[str], survived: Counter[str], accounts: list[str]) -> list[str]:
    """Strike one run with ``faults`` and bring it to its end. Return the invariants that it broke."""
    start = time.monotonic()
    run.launch("--config", str(config), "--run-folder", str(run.folder))
    try:
        run.settle(3)
        before = invariants.footprints(run)
        for fault in faults:
            began = time.monotonic()
            struck[fault.kind] += 1
            what = strikes.strike(run, fault)
            run.settle(3 if KINDS[fault.kind].starts else 2)
            survived[fault.kind] += 1
            seconds = time.monotonic() - began
            line = f"{fault.number:>4} {fault.kind:<10} {fault.place:<9} {seconds:>5.1f} s  {' '.join(what.split())}"
            print(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}...", flush=True)
        after = invariants.footprints(run)
        if (status := run.finish()) != 0:
            return [f"the run's end: exit status {status}, expected 0:\n{run.said()[-1500:]}"]
    except Lost as lost:
        return [f"after {sum(survived.values())} faults: {lost}"]
    broken = invariants.grown(before, after) + invariants.left_behind(run) + invariants.of_the_files(run.folder, world.QUESTIONS)
    count = invariants.account(run.folder)
    accounts.append(
        f"{count.drawn} drawn = {count.trained} trained + {count.quarantined} quarantined; {count.updates} updates, {run.launches} launches,"
        f" {time.monotonic() - start:.0f} s"
    )
    accounts += [
        f"  {name:<10} {first.mib:>5.0f} MiB {first.descriptors:>3} descriptors at first, {after[name].mib:>5.0f} MiB {after[name].descriptors:>3} at last"
        for name, first in before.items()
    ]
    return broken


def _keep(run: Run, folder: Path) -> None:
    """Copy a run that broke an invariant from its disk, which vanishes with this process."""
    shutil.copytree(run.folder, folder / "run", ignore_dangling_symlinks=True)
    with contextlib.suppress(OSError):
        shutil.copyfile(run.out, folder / "run" / "launcher.out")


def _table(struck: Counter[str], survived: Counter[str]) -> None:
    print(f"{'kind':<12}{'struck':>8}{'survived':>10}")
    print("\n".join(f"{kind:<12}{struck[kind]:>8}{survived[kind]:>10}" for kind in KINDS if struck[kind]))
    print(f"{'all':<12}{struck.total():>8}{survived.total():>10}", flush=True)
