"""Counts of work survive the process that counted them; shares are right however heartbeats and
updates fall."""

from pathlib import Path

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from coppice.common import shards
from coppice.common.frontier import Frontier
from coppice.scheduler.dispatch.dispatcher import Worker
from coppice.scheduler.telemetry.metrics import Metrics
from coppice.wire.messages import Register


def test_counts_go_on_from_the_newest_record_of_the_run_before(tmp_path: Path) -> None:
    first = Metrics(tmp_path)
    assert first.last(["environment_steps"]) == {"environment_steps": 0}
    first.record(1, {"count/environment_steps": 10.0, "count/generated_tokens": 30.0})
    first.record(2, {"count/environment_steps": 25.0})
    first.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"version": 3, "count/environment_st')  # cut off by a crash
    again = Metrics(tmp_path)
    counts = again.last(["environment_steps", "generated_tokens", "other"])
    assert counts == {"environment_steps": 25, "generated_tokens": 30, "other": 0}
    again.close()


def test_after_a_crash_each_update_that_is_not_lost_has_exactly_one_record(tmp_path: Path) -> None:
    first = Metrics(tmp_path)
    first.record(0, {"heldout/em": 0.1})
    # an earlier release recorded version 2 twice, and version 3 was never recorded
    for version in (1, 2, 2, 4, 5):
        first.record(version, {"learner/groups": 3.0, "learner/loss": float(version)})
    first.record(4, {"heldout/em": 0.4})
    first.record(5, {"heldout/em": 0.5})
    first.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"version": 6, "learner/gro')  # cut off by a crash
    records = {version: {"learner/groups": 3.0, "learner/loss": -1.0} for version in (2, 3, 4)}
    again = Metrics(tmp_path)
    assert again.resume(Frontier(4, [], records), 4) == {1, 2, 3, 4}
    again.record(5, {"learner/groups": 3.0, "learner/loss": 50.0})
    again.close()
    written = (tmp_path / "metrics.jsonl").read_bytes()
    lines = [msgspec.json.decode(line) for line in written.splitlines()]
    assert [line["version"] for line in lines] == [0, 1, 2, 3, 4, 4, 5]
    assert [line.get("learner/loss") for line in lines] == [None, 1.0, 2.0, -1.0, 4.0, None, 50.0]
    # the restored record has the time of the one before
    assert lines[3]["time/run"] == lines[2]["time/run"]
    assert all(line["learner/groups"] == 3.0 for line in lines if "heldout/em" not in line)


def drawn(run: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard draws of a metric: its steps and values."""
    board = EventAccumulator(str(run / "tensorboard")).Reload()
    return [(point.step, point.value) for point in board.Scalars(name)]


def test_the_first_of_two_schedulers_shows_an_update_when_both_have_recorded_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TensorBoard orders the files of one second by this number as text, where 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    home = shards.folder(tmp_path, 1)
    home.mkdir(parents=True)
    first, second = Metrics(tmp_path, whole=True), Metrics(home)
    first.record(0, {"heldout/em": 0.5})
    first.record(1, {"learner/groups": 4.0, "count/calls": 10.0})
    assert not first.look()
    assert first.newest["version"] == 0
    second.record(1, {"learner/groups": 4.0, "count/calls": 5.0})
    assert first.look()
    names = ("count/calls", "learner/groups", "heldout/em")
    assert [first.newest[name] for name in names] == [15, 4, 0.5]
    second.record(2, {"learner/groups": 4.0, "count/calls": 7.0})
    first.record(2, {"learner/groups": 4.0, "count/calls": 20.0})
    for metrics in (first, second):
        metrics.close()
    assert drawn(tmp_path, "count/calls") == [(1, 15.0), (2, 27.0)]
    assert drawn(tmp_path, "heldout/em") == [(0, 0.5)]
    assert drawn(home, "count/calls") == [(1, 5.0), (2, 7.0)]


def worker(name: str, *services: str) -> Worker:
    return Worker(name.encode(), Register(name, list(services), 4, 1, "here"), 0.0, name)


def beat(worker: Worker, at: float, **counters: float) -> None:
    worker.beat_at, worker.stats = at, counters


def test_busy_shares_are_of_the_time_between_heartbeats(tmp_path: Path) -> None:
    actor, learner = worker("actor-0", "generate"), worker("learner-0", "train")
    metrics, workers = Metrics(tmp_path), [actor, learner]
    names = ("busy/engine", "rate/decoded_tokens", "cache/tokens_saved")
    assert "busy/engine" not in metrics.counters(workers)  # no heartbeat yet
    beat(actor, 1.0, busy_s=10.0, decoded_tokens=0.0, cached_tokens=100.0)
    beat(learner, 1.0, busy_s=0.0)
    # what it did before is not of this run's time
    assert "busy/engine" not in metrics.counters(workers)
    beat(actor, 3.0, busy_s=11.5, decoded_tokens=200.0, cached_tokens=160.0)
    found = metrics.counters(workers)
    assert [found[name] for name in names] == [0.75, 100, 60]
    assert "busy/learner" not in found
    for _ in range(3):  # updates that are shorter than a heartbeat
        again = metrics.counters(workers)
        assert [again[name] for name in names] == [0.75, 100, 0]
    beat(actor, 7.0, busy_s=12.5, decoded_tokens=600.0, cached_tokens=160.0)
    beat(learner, 5.0, busy_s=1.0)
    found = metrics.counters(workers)
    assert (found["busy/engine"], found["busy/learner"]) == (0.25, 0.25)
    idle = worker("actor-1", "generate")
    for at in (7.0, 8.0):
        beat(idle, at, busy_s=0.0, spare=1.0)
        found = metrics.counters([*workers, idle])
    assert (found["busy/engine"], found["busy/engines"]) == (0.25, 1.0)
    metrics.close()
