"""Trackers get every record of a run, each in a process of its own, which may hang or die. A
resumed run goes on in the same run of a tracker, after the last step that the tracker knows."""

import asyncio
import importlib.util
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from coppice.common.process import die_with
from coppice.scheduler.ledger.records import UPDATE, Reader, Record, parsed
from coppice.scheduler.telemetry import alerts

PROJECT, MODULE = "coppice", "coppice.scheduler.telemetry.tracking"
FINISH_S, STOP_S = 25.0, 10.0
"""The longest that a finished and a stopped run wait for trackers, in seconds; less than the
launcher waits for a scheduler that it asked to stop."""


def _wandb(run: Path, identity: str, config: dict[str, Any]) -> tuple[Any, int]:
    import wandb

    folder, project = run / "tracking", os.environ.get("WANDB_PROJECT", PROJECT)
    how = {"resume": "allow", "settings": wandb.Settings(console="off")}
    tracked = wandb.init(
        project=project, id=identity, name=run.name, dir=folder, config=config, **how
    )
    return tracked, tracked.starting_step


def _trackio(run: Path, identity: str, config: dict[str, Any]) -> tuple[Any, int]:
    import trackio

    project, name = os.environ.get("TRACKIO_PROJECT", PROJECT), f"{run.name}-{identity}"
    how = {"config": config, "resume": "allow", "auto_log_gpu": False, "auto_log_cpu": False}
    tracked = trackio.init(project, name, **how)  # it resumes by name
    return tracked, tracked._next_step


TRACKERS: Mapping[str, Callable[[Path, str, dict[str, Any]], tuple[Any, int]]] = {
    "wandb": _wandb,
    "trackio": _trackio,
}
"""Each begins or resumes its run, and says the first step that this run lacks."""
KEYS = frozenset({"WANDB_API_KEY", "TRACKIO_WRITE_TOKEN"})
"""Environment variables with the trackers' keys, which no other process of a run sees."""


def check_installed(names: list[str]) -> None:
    """Raise ValueError with the remedy if the package of a tracker is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            told = f"scheduler.trackers names {name!r}, which is not installed"
            raise ValueError(f"{told}: {sys.executable} -m pip install {name}")


def recorded(run: Path) -> list[Record]:
    """The records of a run so far: its updates, joined over the schedulers, and evaluations."""
    lines: Any = [record for _, record in parsed((run / "metrics.jsonl").read_bytes())]
    evaluations = [record for record in lines if UPDATE not in record]
    return sorted([*Reader(run).read(), *evaluations], key=lambda record: record["version"])


def follow(name: str, run: Path, records: Iterable[Record]) -> None:
    """Give a tracker the records of the steps that it lacks."""
    folder = run / "tracking"
    folder.mkdir(exist_ok=True)
    if not (named := folder / f"{name}.id").exists():
        named.write_text(secrets.token_hex(4))
    config = msgspec.json.decode((run / "config.json").read_bytes())
    tracked, first = TRACKERS[name](run, named.read_text(), config)
    for record in records:
        values = {key: value for key, value in record.items() if value is not None}
        step = int(values.pop("version"))
        # an evaluation that a stop cut off is made at the resume, under the last version
        if step >= first or (step == first - 1 and UPDATE not in values):
            tracked.log(values, step=step)
    tracked.finish()


class Trackers:
    """The processes of a run's trackers, from ``start`` to ``close``."""

    def __init__(self, run: Path, names: list[str], say: Callable[[str], None] = alerts.say):
        self.run, self.names, self._say = run, names, say
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self) -> None:
        """Start them. Must be called when no earlier record of metrics.jsonl changes any more."""
        processes = {}
        for name in self.names:
            with (self.run / "logs" / f"{name}.log").open("ab") as log:
                processes[name] = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", MODULE, name, str(self.run)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    preexec_fn=partial(die_with, os.getpid()),
                )
        self._processes = processes
        for record in recorded(self.run) if processes else ():
            self.log(record)

    def log(self, record: Record) -> None:
        """Give every tracker a record. Report those that have died, and go on without them."""
        for name, process in list(self._processes.items()):
            if process.returncode is not None:
                del self._processes[name]
                self._tell(name, "has failed")
            elif process.stdin is not None:
                process.stdin.write(msgspec.json.encode(record) + b"\n")  # waits in memory

    async def close(self, patience: float = FINISH_S) -> None:
        """Let them send what is left, and kill those that take longer than ``patience`` seconds."""
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        end = asyncio.get_running_loop().time() + patience
        for name, process in self._processes.items():
            try:
                async with asyncio.timeout_at(end):
                    if await process.wait():
                        self._tell(name, "has failed")
            except TimeoutError:
                process.kill()
                await process.wait()
                self._tell(name, f"did not finish within {patience:.0f} s")
        self._processes.clear()

    def _tell(self, name: str, fault: str) -> None:
        lines = (self.run / "logs" / f"{name}.log").read_text(errors="replace").split("\n")
        cause = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        run = shlex.quote(str(self.run))
        later = f"python -m {MODULE} {name} {run} < {run}/metrics.jsonl"
        self._say(
            f"tracker {name} {fault}: {cause[:300]} (logs/{name}.log); the run goes on without it."
            f" To send the rest later: {later}"
        )


if __name__ == "__main__":
    follow(sys.argv[1], Path(sys.argv[2]), map(msgspec.json.decode, sys.stdin.buffer))
