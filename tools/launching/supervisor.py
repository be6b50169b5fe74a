"""Runs the processes of a plan, with logs, restarts and an orderly end. No process outlives the launcher.

A worker that dies is started again. When a vital process (scheduler, learner rank) dies, all processes are stopped and started anew from
journal and checkpoint, as by ``--resume``. A process that dies too often, or of an error that would repeat (tools/launching/failures.py),
ends the run, and the launcher prints the cause.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from tools.bootstrap import ROOT
from tools.launching.failures import Cause, Rate, Resumes, cause_of, remedy
from tools.launching.processes import Process

GRACE_S = 30.0
LEFT_S = 2 * GRACE_S
"""Seconds after which an exit with status 0 counts as a death, if the scheduler still runs (it waits half as long for dismissed workers)."""
SETTLE_S = 3.0
"""Seconds to wait after a rank's death for the ranks that it takes along, so that the first rank's cause is reported and not theirs."""
INTERRUPTED = 130
_FULL_BYTES = 2**24
"""Bytes of free space below which the disk counts as full: the weights of one version, or minutes of logs, do not fit into less."""
_TAIL_BYTES = 2**18
"""Bytes at the end of a log that are searched for the last traceback."""
_PR_SET_PDEATHSIG = 1


def existing(path: Path) -> Path:
    """Return ``path`` if it exists, or its nearest parent that exists (which may be a file where a folder is needed)."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def no_space(run: Path) -> str:
    """Return the message for a full disk of the run, with the remedy."""
    again = f"tools/launch --resume {shown(run)}" if (run / "config.json").is_file() else "start again"
    return f"{shown(run)}'s disk has {_free_bytes(run) / 1e6:.1f} MB free: the processes cannot write; free some, then {again}"


def _free_bytes(run: Path) -> int:
    return shutil.disk_usage(existing(run)).free


def _die_with_parent() -> None:
    """Give the child, in which this runs, its own session, so that Ctrl-C reaches only the launcher; have it killed with the launcher."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A process of the plan with its log and its restarts. The process starts with the object; ``start`` starts it again after a death."""

    def __init__(self, spec: Process, run: Path):
        self.spec, self.run = spec, run
        self.log = run / "logs" / f"{spec.name}.log"
        self.rate = Rate()
        self.again_at: float | None = None
        self.left_at = 0.0
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process, for the first time or again."""
        inherited = {name: value for name, value in os.environ.items() if name not in self.spec.withheld}
        environment = inherited | self.spec.environment
        threads = str(self.spec.threads)
        environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        paths = [path for path in (self.spec.environment.get("PYTHONPATH"), str(ROOT)) if path]
        environment |= {"PYTHONPATH": os.pathsep.join(paths)}
        environment |= {"PYTHONUNBUFFERED": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        process_file = str(self.run / "processes" / f"{self.spec.file}.json")
        command = [self.spec.python or sys.executable, "-m", self.spec.module, process_file]
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            show = subprocess.PIPE if self.spec.name == "scheduler" else log
            return subprocess.Popen(command, stdout=show, stderr=log, env=environment, preexec_fn=_die_with_parent)

    def dead(self, now: float) -> bool:
        """True if the process failed, or exited with status 0 more than ``LEFT_S`` seconds ago. now: seconds."""
        status = self.process.poll()
        if status == 0:
            self.left_at = self.left_at or now
            return now - self.left_at > LEFT_S
        return status is not None

    def cause(self) -> Cause:
        """Return why the process ended. Must be called after its end."""
        with self.log.open("rb") as log:
            log.seek(max(self._log_start, self.log.stat().st_size - _TAIL_BYTES))
            return cause_of(self.process.wait(), log.read().decode(errors="replace"))


class Supervisor:
    """Owns the child processes of one start of a run; a resumed run gets a new Supervisor. interrupted: set by Ctrl-C or SIGTERM.

    Life cycle, all inside ``watch``: start every process, restart workers that die, stop every process. For example
    ``Supervisor(run, plan, threading.Event()).watch()`` returns 0 after a finished run.
    """

    def __init__(self, run: Path, plan: list[Process], interrupted: threading.Event):
        self.run, self.plan, self.interrupted = run, plan, interrupted
        self.children: dict[str, Child] = {}
        self._relay = threading.Thread()

    def start(self) -> None:
        """Start the scheduler, wait for its endpoint, then start the other processes. Raises OSError."""
        endpoint = self.run / "endpoint"
        endpoint.unlink(missing_ok=True)
        (self.run / "logs").mkdir(exist_ok=True)
        copy = (self.run / "logs" / "scheduler.out").open("ab", buffering=0)
        self.children["scheduler"] = scheduler = Child(self.plan[0], self.run)
        self._relay = threading.Thread(target=_relay, args=(scheduler.process.stdout, copy), daemon=True)
        self._relay.start()
        while not endpoint.exists() and scheduler.process.poll() is None and not self.interrupted.is_set():
            time.sleep(0.05)
        for spec in self.plan[1:]:
            if scheduler.process.poll() is None and not self.interrupted.is_set():
                self.children[spec.name] = Child(spec, self.run)

    def watch(self) -> Child | int:
        """Run until the end, then stop every process. Return the exit status, or the process whose death ended the run. Raises OSError."""
        try:
            self.start()
            dead = self._watch()
        finally:
            self.stop()
            if self._relay.is_alive():
                self._relay.join(1.0)  # the relay prints the scheduler's last lines
        return dead or (0 if self.children["scheduler"].process.wait() == 0 else INTERRUPTED)

    def _watch(self) -> Child | None:
        scheduler = self.children["scheduler"].process
        while scheduler.poll() is None:
            if self.interrupted.wait(0.2):
                print("\nstopping (press Ctrl-C again to kill) ...", flush=True)
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                self._signal(["scheduler"], signal.SIGINT)
                self._wait(["scheduler"], GRACE_S)
                return None
            dead = self._tend(time.monotonic())
            if dead is not None:
                return dead
        return None if scheduler.poll() in (0, INTERRUPTED) else self.children["scheduler"]

    def _tend(self, now: float) -> Child | None:
        """Start dead workers again. Return the child whose death ends this start of the run, if there is one."""
        for child in self.children.values():
            if child.again_at is not None:
                if now >= child.again_at:
                    child.process, child.again_at, child.left_at = child.start(), None, 0.0
            elif child.spec.name != "scheduler" and child.dead(now):
                pause = None if child.spec.vital else child.rate.pause(now)
                if pause is None:
                    return self._first(child) if child.spec.vital else child
                child.again_at, death = now + pause, f"{child.spec.name}: {child.cause().text}"
                print(f"{death}; starting it again in {pause:.0f} s (log: {shown(child.log)})", flush=True)
        return None

    def _first(self, child: Child) -> Child:
        """Return the rank whose death took ``child`` along, or ``child`` itself."""
        group = [other for other in self.children.values() if other.spec.module == child.spec.module]
        self._wait([other.spec.name for other in group], SETTLE_S)
        dead = [other for other in group if other.process.poll() not in (None, 0)]
        return next((other for other in dead if not other.cause().second_hand), child)

    def stop(self) -> None:
        """End every process: workers drain on SIGTERM, and processes that stay are killed."""
        for name in ("scheduler", "learner-0"):
            self._signal([name], signal.SIGTERM)
        self._wait(["scheduler", "learner-0"], GRACE_S)
        rest = list(self.children)
        self._signal(rest, signal.SIGTERM)
        self._wait(rest, 10.0)
        self._signal(rest, signal.SIGKILL)
        self._wait(rest, 5.0)

    def _signal(self, names: list[str], number: signal.Signals) -> None:
        for name in names:
            if name in self.children and self.children[name].process.poll() is None:
                self.children[name].process.send_signal(number)

    def _wait(self, names: list[str], seconds: float) -> None:
        end, awaited = (
            time.monotonic() + seconds,
            [self.children[name].process for name in names if name in self.children],
        )
        while time.monotonic() < end and any(process.poll() is None for process in awaited):
            time.sleep(0.05)


def supervise(run: Path, make: Callable[[], list[Process]]) -> int:
    """Run the plan that ``make`` returns to its end, resuming the run where that helps. Return the exit status. Raises OSError."""
    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    resumes, again = Resumes(_checkpoint(run)), f"tools/launch --resume {shown(run)}"
    while not interrupted.is_set():
        ended = Supervisor(run, make(), interrupted).watch()
        if ended == 0:
            return 0
        if isinstance(ended, int):
            break
        cause, full = ended.cause(), _free_bytes(run) < _FULL_BYTES
        pause = resumes.pause(time.monotonic(), cause, _checkpoint(run)) if ended.spec.vital and not full else None
        log = f"log: {shown(ended.log)}"
        if pause is None:
            advice = no_space(run) if full or cause.full_disk else remedy(cause, again)
            print(f"\n{ended.spec.name} failed: {cause.text}\nremedy: {advice}\n{log}", flush=True)
            return 1
        print(f"{ended.spec.name}: {cause.text}; resuming the run in {pause:.0f} s ({log})", flush=True)
        interrupted.wait(pause)
        os.environ["COPPICE_STARTED"] = f"{os.getpid()} {time.monotonic()}"  # the summary counts from this start
    print(f"stopped; go on with: {again}", flush=True)
    return INTERRUPTED


def _checkpoint(run: Path) -> str:
    """Return the name of the newest checkpoint, or "" if there is none."""
    return max((path.parent.name for path in (run / "checkpoints").glob("v*/state.json")), default="")


def shown(path: Path) -> Path:
    """Return ``path`` relative to the current folder where possible."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _relay(source: IO[bytes] | None, copy: IO[bytes]) -> None:
    """Copy the scheduler's lines to the terminal and to a file. Neither a closed terminal (``| head``) nor a full disk stops the copy."""
    assert source is not None
    read = True
    with copy:
        for line in source:
            if read:
                try:
                    sys.stdout.buffer.write(line)
                    sys.stdout.flush()
                except OSError:
                    read = False
            with contextlib.suppress(OSError):
                copy.write(line)
