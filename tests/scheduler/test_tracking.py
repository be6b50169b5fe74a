"""Trackers get every record, and nothing of theirs reaches the run. Both real packages are run,
offline."""

import asyncio
import json
import os
import signal
import sqlite3
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

from coppice.scheduler.telemetry.tracking import Trackers

Point = tuple[int, float | None]
"""Step and loss of a record; None for an evaluation."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run without updates, on a machine whose trackers stay offline."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    folder = tmp_path / "run-1"
    (folder / "logs").mkdir(parents=True)
    (folder / "config.json").write_text('{"name": "planted"}')
    (folder / "metrics.jsonl").touch()
    return folder


def written(step: int, loss: float | None) -> dict[str, float]:
    if loss is None:
        return {"version": float(step), "heldout/em": 0.5}
    return {"version": float(step), "learner/groups": 1.0, "learner/surrogate": loss}


def write(run: Path, *points: Point) -> None:
    lines = [msgspec.json.encode(written(*point)) + b"\n" for point in points]
    (run / "metrics.jsonl").write_bytes(b"".join(lines))


def in_trackio(run: Path) -> list[Point]:
    store = sqlite3.connect(run.parent / "trackio" / "coppice.db")
    rows = store.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert len({name for name, _, _ in rows}) == 1, "one run"
    return [(step, json.loads(values).get("learner/surrogate")) for _, step, values in rows]


def in_wandb(run: Path) -> list[Point]:
    """The points of the newest start: offline, W&B knows no earlier one."""
    points: list[Point] = []
    files = sorted((run / "tracking" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1, "one run"
    newest = max(files, key=lambda file: file.stat().st_mtime_ns)
    for stored in _stored(newest):
        record = Record()
        record.ParseFromString(stored)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            values = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
            points.append((record.history.step.num, values.get("learner/surrogate")))
    return points


def _stored(path: Path) -> Iterator[bytes]:
    """The records of a file of W&B: LevelDB's log format after a header of seven bytes."""
    content, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


async def lived(run: Path, name: str, *new: Point) -> None:
    """One start of the run, with ``new`` records."""
    told: list[str] = []
    trackers = Trackers(run, [name], told.append)
    await trackers.start()
    for point in new:
        trackers.log(written(*point))
    await trackers.close(240.0)
    assert told == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "read"), [("wandb", in_wandb), ("trackio", in_trackio)])
async def test_a_resumed_run_goes_on_in_the_same_run_after_the_last_step_that_is_known(
    name: str, read, run: Path
) -> None:
    write(run, (0, None), (1, 0.1))
    await lived(run, name, (2, 0.2), (3, 0.3))
    before = [(0, None), (1, 0.1), (2, 0.2)]
    assert read(run) == [*before, (3, 0.3)]
    # The crash took version 3 back, and it was made again with another loss.
    write(run, *before, (3, 0.33))
    await lived(run, name, (4, 0.4))
    # offline, W&B cannot say what it knows
    assert read(run) == [*before, (3, 0.33 if name == "wandb" else 0.3), (4, 0.4)]


@pytest.mark.second
async def test_a_failing_tracker_is_told_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(run.parent))  # no key is there
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    told: list[str] = []
    trackers = Trackers(run, ["wandb"], told.append)
    await trackers.start()
    async with asyncio.timeout(120):
        while not told:
            trackers.log(written(1, 0.1))
            await asyncio.sleep(0.05)
    trackers.log(written(2, 0.2))
    await trackers.close()
    (line,) = told
    assert line.startswith("tracker wandb has failed: ") and "API key" in line
    assert f"-m coppice.scheduler.telemetry.tracking wandb {run} < {run}/metrics.jsonl" in line


async def test_a_tracker_that_hangs_holds_nobody_up_and_does_not_stay(run: Path) -> None:
    told: list[str] = []
    trackers = Trackers(run, ["trackio"], told.append)
    await trackers.start()
    (process,) = [one for one in psutil.Process().children() if "trackio" in one.cmdline()]
    process.send_signal(signal.SIGSTOP)
    for step in range(10_000):  # more than a pipe holds
        trackers.log(written(step, 0.1))
    assert told == []
    await trackers.close(0.1)
    assert not process.is_running()
    (line,) = told
    assert line.startswith("tracker trackio did not finish within 0 s:")


@pytest.mark.second
def test_no_tracker_outlives_a_killed_scheduler(run: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:

        async def living() -> None:
            await Trackers(run, ["trackio"]).start()
            os.write(writer, str(psutil.Process().children()[0].pid).encode())
            time.sleep(600)  # noqa: ASYNC251

        asyncio.run(living())
    tracker = psutil.Process(int(os.read(reader, 32)))
    tracker.send_signal(signal.SIGSTOP)  # it cannot see that its stdin ended
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    psutil.wait_procs([tracker], timeout=30)
    assert not tracker.is_running() or tracker.status() == psutil.STATUS_ZOMBIE
