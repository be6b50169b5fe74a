"""Runs the processes of a plan: logs, restarts, an orderly end. No process outlives the launcher.

A vital process (scheduler, learner rank) that dies ends the run with the end of its log; any other is started again with backoff.
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
from pathlib import Path
from typing import IO

from tools.bootstrap import ROOT
from tools.plan import Process

MOST_RESTARTS = 5
GRACE_S = 30.0
_FULL_BYTES = 2**24
"""Of free space: a version's weights, or a few minutes of logs and journal, find no room in less."""
_FULL_SAID = ("No space left on device", "disk is full")
"""How Python and SQLite say so, whatever is free afterwards: what did not fit was removed again."""
_PR_SET_PDEATHSIG = 1
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "2"}
"""glibc's settings: a tensor of a megabyte or more goes back to the system when it is freed. glibc before 2.38 hardly uses a freed aligned
block again, so that a rank's heap grows to twice what it holds (docs/performance.md)."""


def existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that is there (or a file in the place of one)."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def no_space(run: Path) -> str:
    """What to tell, and do, when the run's disk is full."""
    again = f"tools/launch --resume {run}" if (run / "config.json").is_file() else "start again"
    return f"{run}'s disk has {_free_bytes(run) / 1e6:.1f} MB free: the processes cannot write; free some, then {again}"


def _free_bytes(run: Path) -> int:
    return shutil.disk_usage(existing(run)).free


def _die_with_parent() -> None:
    """In the child: a session of its own, so Ctrl-C reaches the launcher only, and SIGKILL when the launcher is gone."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A process and its history."""

    def __init__(self, spec: Process, run: Path):
        self.spec, self.run = spec, run
        self.log = run / "logs" / f"{spec.name}.log"
        self.restarts = 0
        self.again_at = 0.0
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = ALLOCATOR | os.environ | self.spec.environment
        threads = str(self.spec.threads)
        environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        paths = [path for path in (self.spec.environment.get("PYTHONPATH"), str(ROOT)) if path]
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        command = [
            self.spec.python or sys.executable,
            "-m",
            self.spec.module,
            str(self.run / "processes" / f"{self.spec.file}.json"),
        ]
        with self.log.open("ab") as log:
            show = subprocess.PIPE if self.spec.name == "scheduler" else log
            return subprocess.Popen(command, stdout=show, stderr=log, env=environment, preexec_fn=_die_with_parent)

    def restart_if_due(self, now: float) -> None:
        """Start a dead process again once its backoff is over."""
        if self.process.poll() is not None and now >= self.again_at:
            self.process = self._start()

    def tail(self, lines: int = 25) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""


class Supervisor:
    """Owns the children of one run."""

    def __init__(self, run: Path, plan: list[Process]):
        self.run, self.plan = run, plan
        self.children: dict[str, Child] = {}
        self.interrupted = threading.Event()

    def start(self) -> None:
        """Start the scheduler, wait for its endpoint, start the rest. Raises OSError."""
        (self.run / "endpoint").unlink(missing_ok=True)
        (self.run / "logs").mkdir(exist_ok=True)
        copy = (self.run / "logs" / "scheduler.out").open("ab", buffering=0)
        self.children["scheduler"] = scheduler = Child(self.plan[0], self.run)
        threading.Thread(target=_relay, args=(scheduler.process.stdout, copy), daemon=True).start()
        while (
            not (self.run / "endpoint").exists() and scheduler.process.poll() is None and not self.interrupted.is_set()
        ):
            time.sleep(0.05)
        for spec in self.plan[1:]:
            if scheduler.process.poll() is None and not self.interrupted.is_set():
                self.children[spec.name] = Child(spec, self.run)

    def watch(self) -> int:
        """Until the scheduler ends; returns the run's exit status. Raises OSError for a folder that cannot be written, with all stopped."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.interrupted.set())
        try:
            return self._watch()
        except OSError:
            self.stop()
            raise

    def _watch(self) -> int:
        self.start()
        scheduler = self.children["scheduler"].process
        while scheduler.poll() is None:
            if self.interrupted.wait(0.2):
                print("\nstopping (press Ctrl-C again to kill) ...", flush=True)
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_DFL)
                self._signal(["scheduler"], signal.SIGINT)
                self._wait(["scheduler"], GRACE_S)
                break
            dead = self._tend()
            if dead is not None:
                return self._fail(dead)
        status = scheduler.poll()
        self.stop()
        if status not in (0, 130):
            return self._fail(self.children["scheduler"])
        return status

    def _tend(self) -> Child | None:
        """Restart what may be restarted; the child whose death ends the run, if any."""
        now = time.monotonic()
        for child in self.children.values():
            status = child.process.poll()
            if status is None or child.spec.name == "scheduler":
                continue
            if status == 0:
                continue  # it drained: the scheduler is ending, or sent it away
            if child.spec.vital or child.restarts >= MOST_RESTARTS:
                return child
            if child.again_at <= now - 3600 or child.again_at == 0.0:
                child.restarts += 1
                child.again_at = now + 0.5 * 2**child.restarts
                print(f"{child.spec.name} ended with status {status}; starting it again ({child.log})", flush=True)
            elif now >= child.again_at:
                child.restart_if_due(now)
                child.again_at = 0.0
        return None

    def _fail(self, child: Child) -> int:
        time.sleep(0.5)  # let the relay show the scheduler's last lines
        self.stop()
        tail = child.tail()
        print(f"\n{child.spec.name} ended with status {child.process.poll()}; the end of {child.log}:\n{tail}")
        full = _free_bytes(self.run) < _FULL_BYTES or any(words in tail for words in _FULL_SAID)
        print(no_space(self.run) if full else f"go on with: tools/launch --resume {self.run}", flush=True)
        return 1

    def stop(self) -> None:
        """End everything: the workers drain on SIGTERM, what stays is killed."""
        for name in ("scheduler", "learner-0"):
            if name in self.children:
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
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(
            self.children[n].process.poll() is None for n in names if n in self.children
        ):
            time.sleep(0.05)


def _relay(source: IO[bytes] | None, copy: IO[bytes]) -> None:
    """The scheduler's lines to the terminal and to a file; neither a reader that went away (``| head``) nor a full disk blocks it."""
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
