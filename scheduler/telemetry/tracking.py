"""Trackers follow RUN/metrics.jsonl, each in a process of its own: ``python -m coppice.scheduler.telemetry.tracking
NAME RUN`` follows it until its stdin ends.

The run never waits for a tracker: the file is the source of truth, and a tracker that hangs or dies
takes only its own process along. Invariant: each record is given to a tracker at most once, and
only when a checkpoint holds its update, because a crash takes later updates back. Of several
schedulers an update's record is that of all of them, and given when all have recorded it.
"""

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
from typing import Any

import msgspec

from coppice.common.atomic import write_whole
from coppice.common.process import die_with
from coppice.scheduler.ledger.records import UPDATE, Reader, Record
from coppice.scheduler.telemetry import terminal

PROJECT = "coppice"
LOOK_S = 1.0
"""Seconds between two looks for new records."""
FINISH_S, STOP_S = 25.0, 10.0
"""The longest that a finished and a stopped run wait for trackers, in seconds; less than the
launcher waits for a scheduler that it asked to stop."""


Tracked = Any
"""A run of W&B or Trackio: ``log(values, step=version)``, then ``finish()``."""


def _wandb(run: Path, identity: str, config: dict[str, Any]) -> Tracked:
    import wandb

    project = os.environ.get("WANDB_PROJECT", PROJECT)
    settings = wandb.Settings(console="off")
    return wandb.init(
        project=project,
        id=identity,
        name=run.name,
        dir=run / "tracking",
        config=config,
        resume="allow",
        settings=settings,
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
            raise ValueError(
                f"scheduler.trackers names {name!r}, which is not installed: {sys.executable} -m pip install {name}"
            )


class Place(msgspec.Struct, frozen=True):
    """How far a tracker has come: its run's identity, and the number of records of metrics.jsonl
    that it was given."""

    identity: str
    records: int = 0


def durable(run: Path) -> int:
    """The version of the newest checkpoint; 0 without one."""
    return max((int(path.name[1:]) for path in (run / "checkpoints").glob("v??????")), default=0)


def follow(name: str, run: Path, ended: Callable[[float], bool]) -> None:
    """Give the records to the tracker ``name`` until ``ended``, which is asked with the seconds
    that it may wait. Raises what the tracker raises."""
    state = run / "tracking" / f"{name}.json"
    state.parent.mkdir(exist_ok=True)
    with state.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of an earlier start may still be finishing
        place = (
            msgspec.json.decode(state.read_bytes(), type=Place)
            if state.exists()
            else Place(secrets.token_hex(4))
        )
        write_whole(state, msgspec.json.encode(place))
        tracked = TRACKERS[name](
            run, place.identity, msgspec.json.decode((run / "config.json").read_bytes())
        )
        reader = Reader(run)
        with (run / "metrics.jsonl").open("rb") as file:
            for _ in range(place.records):
                file.readline()
            last = False
            while not last:
                last = ended(LOOK_S)
                newest, wholes = (
                    durable(run),
                    {int(record["version"]): record for record in reader.read()},
                )
                place = _pass_on(file, place, tracked, newest, wholes, state)
        tracked.finish()


def _pass_on(
    file: Any,
    place: Place,
    tracked: Tracked,
    newest: int,
    wholes: Mapping[int, Record],
    state: Path,
) -> Place:
    """Give the records of versions up to ``newest`` to the tracker, and return its new place. The
    file then stands at the next record. wholes: the updates' records, by version."""
    while True:
        start, line = file.tell(), file.readline()
        record = (
            msgspec.json.decode(line, type=dict[str, float | None]) if line.endswith(b"\n") else {}
        )
        version = record.get("version")
        whole = wholes.get(int(version or 0)) if UPDATE in record else record
        if version is None or version > newest or whole is None:
            file.seek(start)
            return place
        place = Place(place.identity, place.records + 1)
        # before it is given, so that no crash lets it be given twice
        write_whole(state, msgspec.json.encode(place))
        values = {
            key: value for key, value in whole.items() if value is not None and key != "version"
        }
        tracked.log(values, step=int(version))


class Trackers:
    """The processes of a run's trackers, from ``start`` to ``close``. ``check`` tells once of each
    that died."""

    def __init__(self, run: Path, names: list[str], say: Callable[[str], None] = terminal.say):
        self.run, self.names, self._say = run, names, say
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start them. Must be called when no earlier record of metrics.jsonl changes any more."""
        for name in self.names:
            command = [
                sys.executable,
                "-m",
                "coppice.scheduler.telemetry.tracking",
                name,
                str(self.run),
            ]
            with (self.run / "logs" / f"{name}.log").open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    preexec_fn=partial(die_with, os.getpid()),
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
                failed = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                self._tell(name, f"did not finish within {patience:.0f} s")
            else:
                if failed:
                    self._tell(name, "has failed")
        self._processes.clear()

    def _tell(self, name: str, fault: str) -> None:
        lines = (self.run / "logs" / f"{name}.log").read_text(errors="replace").split("\n")
        cause = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        self._say(
            f"tracker {name} {fault}: {cause[:300]} (logs/{name}.log); the run goes on without it. To send the rest later:"
            f" python -m coppice.scheduler.telemetry.tracking {name} {self.run} < /dev/null"
        )


def _stdin_ended(seconds: float) -> bool:
    """Wait at most ``seconds`` for the end of stdin."""
    return bool(select.select([sys.stdin], [], [], seconds)[0]) and not os.read(
        sys.stdin.fileno(), 4096
    )


if __name__ == "__main__":
    follow(sys.argv[1], Path(sys.argv[2]), _stdin_ended)
