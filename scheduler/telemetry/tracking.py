"""Trackers follow RUN/metrics.jsonl, each in a process of its own, which may hang or die:
``python -m coppice.scheduler.telemetry.tracking NAME RUN``. Invariant: each record is given at most
once, and only when a checkpoint holds its update, because a crash takes later ones back."""

import contextlib
import fcntl
import importlib.util
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from coppice.common.atomic import write_whole
from coppice.common.process import die_with
from coppice.scheduler.ledger.records import UPDATE, Reader, Record
from coppice.scheduler.telemetry import terminal

PROJECT, MODULE = "coppice", "coppice.scheduler.telemetry.tracking"
LOOK_S = 1.0
"""Seconds between two looks for new records."""
FINISH_S, STOP_S = 25.0, 10.0
"""The longest that a finished and a stopped run wait for trackers, in seconds; less than the
launcher waits for a scheduler that it asked to stop."""
Tracked = Any
"""A run of W&B or Trackio: ``log(values, step=version)``, then ``finish()``."""


def _wandb(run: Path, identity: str, config: dict[str, Any]) -> Tracked:
    import wandb

    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        id=identity,
        name=run.name,
        dir=run / "tracking",
        config=config,
        resume="allow",
        settings=wandb.Settings(console="off"),
    )


def _trackio(run: Path, identity: str, config: dict[str, Any]) -> Tracked:
    import trackio

    # Trackio resumes by name
    project, name = os.environ.get("TRACKIO_PROJECT", PROJECT), f"{run.name}-{identity}"
    return trackio.init(
        project, name, config=config, resume="allow", auto_log_gpu=False, auto_log_cpu=False
    )


TRACKERS: Mapping[str, Callable[[Path, str, dict[str, Any]], Tracked]] = {
    "wandb": _wandb,
    "trackio": _trackio,
}
KEYS = frozenset({"WANDB_API_KEY", "TRACKIO_WRITE_TOKEN"})
"""Environment variables with the trackers' keys, which no other process of a run sees."""


def check_installed(names: list[str]) -> None:
    """Raise ValueError with the remedy if the package of a tracker is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            install = f"{sys.executable} -m pip install {name}"
            raise ValueError(
                f"scheduler.trackers names {name!r}, which is not installed: {install}"
            )


class Delivered(msgspec.Struct, frozen=True):
    """How far a tracker has come: its run's identity, and the records that it was given."""

    identity: str
    records: int = 0


def follow(name: str, run: Path, ended: Callable[[float], bool]) -> None:
    """Give records to a tracker until ``ended``, asked with the seconds that it may wait."""
    state = run / "tracking" / f"{name}.json"
    state.parent.mkdir(exist_ok=True)
    with contextlib.ExitStack() as opened:
        lock = opened.enter_context(state.with_suffix(".lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of an earlier start may still be finishing
        # a start that waits for the lock may find another file than was there before
        file = opened.enter_context((run / "metrics.jsonl").open("rb"))
        delivered = Delivered(secrets.token_hex(4))
        if state.exists():
            delivered = msgspec.json.decode(state.read_bytes(), type=Delivered)
        write_whole(state, msgspec.json.encode(delivered))
        config = msgspec.json.decode((run / "config.json").read_bytes())
        tracked, reader = TRACKERS[name](run, delivered.identity, config), Reader(run)
        for _ in range(delivered.records):
            file.readline()
        last = False
        while not last:
            last = ended(LOOK_S)
            checkpoints = (run / "checkpoints").glob("v??????")
            durable = max((int(path.name[1:]) for path in checkpoints), default=0)
            updates = {int(record["version"]): record for record in reader.read()}
            while record := _next(file, durable, updates):
                delivered = Delivered(delivered.identity, delivered.records + 1)
                # before it is given, so that no crash lets it be given twice
                write_whole(state, msgspec.json.encode(delivered))
                tracked.log(record, step=int(record.pop("version")))
        tracked.finish()


def _next(file: BinaryIO, newest: int, updates: Mapping[int, Record]) -> Record | None:
    """The next record up to version ``newest``, an update's from ``updates``, or None."""
    start, line = file.tell(), file.readline()
    own = msgspec.json.decode(line, type=dict[str, float | None]) if line.endswith(b"\n") else {}
    version = own.get("version")
    if version is not None and version <= newest:
        record = updates.get(int(version)) if UPDATE in own else own
        if record is not None:
            return {key: value for key, value in record.items() if value is not None}
    file.seek(start)
    return None


class Trackers:
    """The processes of a run's trackers, from ``start`` to ``close``."""

    def __init__(self, run: Path, names: list[str], say: Callable[[str], None] = terminal.say):
        self.run, self.names, self._say = run, names, say
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start them. Must be called when no earlier record of metrics.jsonl changes any more."""
        for name in self.names:
            command = [sys.executable, "-m", MODULE, name, str(self.run)]
            dying = partial(die_with, os.getpid())
            with (self.run / "logs" / f"{name}.log").open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, preexec_fn=dying
                )

    def check(self) -> None:
        """Tell of the trackers that died since the last call. The run goes on without them."""
        for name, process in list(self._processes.items()):
            if process.poll() is not None:
                del self._processes[name]
                self._tell(name, "has failed")

    def close(self, patience: float = FINISH_S) -> None:
        """Let them send what is left, and kill those that take longer than ``patience`` seconds."""
        self.check()
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        end = time.monotonic() + patience
        for name, process in self._processes.items():
            try:
                if process.wait(max(0.0, end - time.monotonic())):
                    self._tell(name, "has failed")
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self._tell(name, f"did not finish within {patience:.0f} s")
        self._processes.clear()

    def _tell(self, name: str, fault: str) -> None:
        lines = (self.run / "logs" / f"{name}.log").read_text(errors="replace").split("\n")
        cause = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        later = f"python -m {MODULE} {name} {self.run} < /dev/null"
        self._say(
            f"tracker {name} {fault}: {cause[:300]} (logs/{name}.log); the run goes on without it."
            f" To send the rest later: {later}"
        )


def _stdin_ended(seconds: float) -> bool:
    """Wait at most ``seconds`` for the end of stdin."""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and not os.read(sys.stdin.fileno(), 4096)


if __name__ == "__main__":
    follow(sys.argv[1], Path(sys.argv[2]), _stdin_ended)
