"""What each kind of fault does to a run, from outside; tests/chaos/inside.py has the others."""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil

from coppice.tools.launching.supervisor import INTERRUPTED
from tests.chaos.plan import Fault
from tests.chaos.run import Struck
from tests.runs import Lost

DISK_MIB = 1024
PAUSE_S, UNWRITABLE_S, DYING_S = 1.0, 5.0, 60.0


def strike(run: Struck, fault: Fault) -> str:
    """Strike, wait until it is over, resume the run if it has ended, and return what happened."""
    rng = random.Random(fault.variant)
    match fault.kind:
        case "kill" | "exit" if fault.place == "launcher":
            return _end_launcher(run, signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
        case "kill" | "stop":
            number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
            run.signal(fault.place, number)
            return number.name
        case "pause":
            run.signal(fault.place, signal.SIGSTOP)
            time.sleep(PAUSE_S)
            run.signal(fault.place, signal.SIGCONT)
            return f"stopped for {PAUSE_S:.0f} s"
        case "unwritable":
            return _unwritable(run, fault.place)
        case "full":
            return _full(run)
        case "read-only":
            return _read_only(run)
        case "journal":
            return _journal(run, rng)
        case "checkpoint":
            return _checkpoint(run, rng)
        case _:
            return run.order(fault.place, fault.kind, fault.variant)


def _end_launcher(run: Struck, number: signal.Signals) -> str:
    run.launcher.send_signal(number)
    run.finish(-number if number == signal.SIGKILL else INTERRUPTED)
    run.resume()
    return f"{number.name}, then resumed"


def _refused(run: Struck, word: str, status: int) -> str:
    """Return the last line that names the cause. Raises Lost if none does, or if all seems well."""
    lines = [line for line in run.said().splitlines() if word in line]
    if not status or status == INTERRUPTED or not lines:
        raise Lost(f"status {status}, and {word!r} was not said:\n{run.said()[-1500:]}")
    return lines[-1]


def mount(place: Path, options: str, first: bool = False) -> bool:
    """Mount a small disk in memory at ``place``, or change it. Return whether that was allowed."""
    kind = ["-t", "tmpfs", "tmpfs"] if first else []
    command = ["mount", *kind, "-o", options if first else f"remount,{options}", str(place)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def unmount(place: Path) -> None:
    subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)


def _full(run: Struck) -> str:
    """Leave no room on the disk until the run has ended, then give some and resume."""
    disk = run.folder.parent
    while not mount(disk, f"size={_used(disk)}"):  # it is written meanwhile
        time.sleep(0.01)
    line = _refused(run, "free some", run.ended())
    mount(disk, f"size={DISK_MIB}m")
    run.resume()
    return line


def _used(disk: Path) -> int:
    sizes = os.statvfs(disk)
    return (sizes.f_blocks - sizes.f_bfree) * sizes.f_frsize


def _read_only(run: Struck) -> str:
    run.kill_all()
    disk = run.folder.parent
    end = time.monotonic() + DYING_S
    while not mount(disk, "ro"):  # a process that was killed while it started still holds its log
        if time.monotonic() > end:
            raise Lost(f"{disk} could not be made read-only in {DYING_S:.0f} s: who writes there?")
        time.sleep(0.05)
    run.resume()
    line = _refused(run, "Read-only", run.ended())
    mount(disk, "rw")
    run.resume()
    return line


def _unwritable(run: Struck, place: str) -> str:
    process = psutil.Process(run.pids()[place])
    _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (0, hard))
    try:
        process.wait(UNWRITABLE_S)
    except psutil.TimeoutExpired:
        process.rlimit(psutil.RLIMIT_FSIZE, (hard, hard))
        return f"no file could grow for {UNWRITABLE_S:.0f} s"
    return "no file could grow, so that it ended"


def _journal(run: Struck, rng: random.Random) -> str:
    """Cut a file of the journal short. The run must refuse it, which a copy mends, or lose nothing
    by it."""
    run.kill_all()
    every = [path for home in run.homes for path in home.glob("journal.sqlite*")]
    files = [path for path in every if path.suffix != ".sqlite-shm" and path.stat().st_size]
    copies = {path: path.with_name(f"copy-of-{path.name}") for path in every}
    for path, copy in copies.items():
        shutil.copyfile(path, copy)
    path = rng.choice(sorted(files))
    before, left = path.stat().st_size, rng.randrange(path.stat().st_size)
    os.truncate(path, left)
    text = f"{path.relative_to(run.folder)} cut from {before} to {left} bytes"
    run.resume()
    ended = run.moves_or_ends()
    if ended is not None:
        text += f": {_refused(run, 'journal', ended)}"
        for path in [path for home in run.homes for path in home.glob("journal.sqlite*")]:
            path.unlink()
        for path, copy in copies.items():
            copy.rename(path)
        run.resume()
    return text


def _checkpoint(run: Struck, rng: random.Random) -> str:
    run.kill_all()
    newest = max((run.folder / "checkpoints").glob("v??????"))
    path = rng.choice(sorted(newest.iterdir()))
    content = bytearray(path.read_bytes())
    damage = rng.choice(["a flipped bit", "cut short", "removed"])
    if damage == "removed":
        path.unlink()
    elif damage == "cut short":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[rng.randrange(len(content))] ^= 1
        path.write_bytes(content)
    run.resume()
    return f"{newest.name}/{path.name}: {damage}"
