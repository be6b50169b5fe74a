"""Trackers get every record that no crash takes back, once, and nothing of theirs reaches the run.
Both real packages are run, offline."""

import json
import os
import signal
import sqlite3
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

from coppice.common import shards
from coppice.scheduler.telemetry import tracking
from coppice.scheduler.telemetry.tracking import Trackers, follow

Point = tuple[int, float | None]
"""Step and loss of a record; None for an evaluation."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run without updates, on a machine whose trackers stay offline."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    folder = tmp_path / "run-1"
    for name in ("logs", "checkpoints"):
        (folder / name).mkdir(parents=True)
    (folder / "config.json").write_text('{"name": "planted"}')
    (folder / "metrics.jsonl").touch()
    return folder


def write(run: Path, points: list[Point], checkpoint: int) -> None:
    """The records of ``points``, and the newest checkpoint."""
    (run / "checkpoints" / f"v{checkpoint:06d}").mkdir()
    lines = b""
    for step, loss in points:
        update = {"learner/groups": 1.0, "learner/surrogate": loss}
        values = {"heldout/em": 0.5} if loss is None else update
        lines += msgspec.json.encode({"version": float(step), **values}) + b"\n"
    (run / "metrics.jsonl").write_bytes(lines)


def in_trackio(run: Path) -> list[Point]:
    store = sqlite3.connect(run.parent / "trackio" / "coppice.db")
    rows = store.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert len({name for name, _, _ in rows}) == 1, "one run"
    return [(step, json.loads(values).get("learner/surrogate")) for _, step, values in rows]


def in_wandb(run: Path) -> list[Point]:
    points: list[Point] = []
    files = sorted((run / "tracking" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1, "one run"
    for file in files:
        for stored in _stored(file):
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


def lived(run: Path, name: str) -> list[str]:
    """One start of the run, and what was said meanwhile."""
    told: list[str] = []
    trackers = Trackers(run, [name], told.append)
    trackers.start()
    trackers.close(240.0)
    return told


@pytest.mark.slow
@pytest.mark.parametrize(("name", "read"), [("wandb", in_wandb), ("trackio", in_trackio)])
def test_a_resumed_run_goes_on_in_the_same_run_and_no_lost_update_appears(
    name: str, read, run: Path, monkeypatch
) -> None:
    write(run, [(0, None), (1, 0.1), (2, 0.2), (2, None), (3, 0.3)], checkpoint=2)
    assert lived(run, name) == []
    before = [(0, None), (1, 0.1), (2, 0.2), (2, None)][: 4 if name == "trackio" else 3]
    assert read(run) == before  # W&B joins the records of one version
    # The crash took version 3 back, and it was made again with another loss. So was version 4, of
    # which there is no checkpoint yet.
    write(run, [(0, None), (1, 0.1), (2, 0.2), (2, None), (3, 0.33), (4, 0.4)], checkpoint=3)
    assert lived(run, name) == []
    assert read(run) == [*before, (3, 0.33)]
    assert lived(run, name) == []
    assert read(run) == [*before, (3, 0.33)]


class Kept:
    """A tracker that keeps what it is given. fault: what it raises instead."""

    def __init__(self) -> None:
        self.given: list[dict[str, float]] = []
        self.points: list[Point] = []
        self.finished = False
        self.fault: Exception | None = None

    def log(self, values: dict[str, float], step: int) -> None:
        if self.fault is not None:
            raise self.fault
        self.given.append({"step": step, **values})
        self.points.append((step, values.get("learner/surrogate")))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    tracker: Any = Kept()
    monkeypatch.setattr(tracking, "TRACKERS", {"wandb": lambda *_: tracker})
    return tracker


def test_a_record_is_given_whole_and_once(run: Path, kept: Kept) -> None:
    write(run, [(1, 0.1), (2, 0.2)], checkpoint=9)
    whole = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(whole[:-3])
    looks = iter([False, False, True])

    def ended(_: float) -> bool:
        if len(kept.points) == 1:
            (run / "metrics.jsonl").write_bytes(whole)
        return next(looks)

    follow("wandb", run, ended)
    assert (kept.points, kept.finished) == ([(1, 0.1), (2, 0.2)], True)
    more = b'{"version":3.0,"learner/surrogate":null}\n{"version":4.0}\n'
    (run / "metrics.jsonl").write_bytes(whole + more)
    kept.fault = OSError("No space left on device")
    with pytest.raises(OSError, match="No space"):
        follow("wandb", run, lambda _: True)
    kept.fault = None
    follow("wandb", run, lambda _: True)
    # 3 was being given when the tracker failed
    assert [step for step, _ in kept.points] == [1, 2, 4]


def test_a_tracker_gets_schedulers_joined_records(run: Path, kept: Kept) -> None:
    write(run, [(0, None), (1, 0.1), (1, None), (2, 0.2)], checkpoint=9)
    other = shards.folder(run, 1)
    other.mkdir(parents=True)
    (other / "metrics.jsonl").write_text('{"version":1.0,"learner/groups":1.0,"count/calls":5.0}\n')
    follow("wandb", run, lambda _: True)
    evaluation = {"heldout/em": 0.5}
    first = {"learner/groups": 1.0, "learner/surrogate": 0.1, "count/calls": 5.0}
    assert kept.given == [
        {"step": 0, **evaluation},
        {"step": 1, **first},
        {"step": 1, **evaluation},
    ]
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"version":2.0,"learner/groups":1.0,"count/calls":8.0}\n')
    follow("wandb", run, lambda _: True)
    second = {"learner/groups": 1.0, "learner/surrogate": 0.2, "count/calls": 8.0}
    assert kept.given[3:] == [{"step": 2, **second}]


def test_a_tracker_that_fails_is_told_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(run.parent))  # no key is there
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    told: list[str] = []
    trackers = Trackers(run, ["wandb"], told.append)
    trackers.start()
    end = time.monotonic() + 120
    while not told and time.monotonic() < end:
        trackers.check()
        time.sleep(0.05)
    trackers.check()
    trackers.close()
    assert len(told) == 1
    assert told[0].startswith("tracker wandb has failed: ")
    assert "API key" in told[0]
    assert f"python -m coppice.scheduler.telemetry.tracking wandb {run} < /dev/null" in told[0]


def test_a_tracker_that_hangs_holds_nobody_up_and_does_not_stay(run: Path) -> None:
    told: list[str] = []
    trackers = Trackers(run, ["trackio"], told.append)
    trackers.start()
    process = psutil.Process(trackers._processes["trackio"].pid)
    process.send_signal(signal.SIGSTOP)
    trackers.check()
    assert told == []
    trackers.close(0.1)
    assert not process.is_running()
    (line,) = told
    assert line.startswith("tracker trackio did not finish within 0 s:")


def test_no_tracker_outlives_a_killed_scheduler(run: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        trackers = Trackers(run, ["trackio"])
        trackers.start()
        os.write(writer, str(trackers._processes["trackio"].pid).encode())
        time.sleep(600)
        os._exit(0)
    tracker = psutil.Process(int(os.read(reader, 32)))
    tracker.send_signal(signal.SIGSTOP)  # it cannot see that its stdin ended
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    psutil.wait_procs([tracker], timeout=30)
    assert not tracker.is_running() or tracker.status() == psutil.STATUS_ZOMBIE
