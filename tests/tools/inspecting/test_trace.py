"""Traces and the causes of the wall time, of planted delays and of any."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.scheduler.dispatch.calls import Event
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.telemetry.metrics import Metrics
from coppice.tools.inspecting import runs
from coppice.tools.inspecting.trace import (
    CHECKPOINT,
    FILE,
    PUBLISH,
    TracedCall,
    TracedStart,
    TracedUpdate,
    recorded,
    shares,
)
from tests.run_folder import make

UPDATES = "learner: updates"


def test_planted_delays_come_out_as_they_were_planted() -> None:
    """Trees 1 and 2 make update 1, tree 3 makes update 2, tree 4 none; 9 and 10 are held out."""
    calls = [
        TracedCall("generate", 1.0, 3.0, 9),
        TracedCall("generate", 1.0, 2.0, 1),
        TracedCall("judge.rules", 2.0, 2.5, 1),
        TracedCall("generate", 3.5, 5.0, 2),
        TracedCall("judge.rules", 5.0, 7.0, 2),
        TracedCall("retrieve", 5.0, 6.0, 2),
        TracedCall("retrieve", 7.0, 8.0, 2),
        TracedCall("generate", 9.0, 9.5, 3),
        TracedCall("load", 10.5, 11.0),
        TracedCall("generate", 10.75, 12.0, 4),
        TracedCall("judge.rules", 12.0, 13.0, 3),
        TracedCall("generate", 14.0, 15.0, 10),
    ]
    parts = [(UPDATES, 8.5, 10.0), (PUBLISH, 10.0, 10.25), (CHECKPOINT, 10.25, 10.5)]
    first = TracedUpdate(1, parts, {1, 2})
    second = TracedUpdate(2, [(UPDATES, 13.0, 14.0)], {3})
    assert shares(TracedStart(0.0, 15.0, calls, [first, second], {9, 10})) == {
        "starting processes": 1.0, "held-out evaluation": 3.0, "scheduler": 1.0,
        "rollouts: generate": 1.5, "rollouts: judge": 3.0, "rollouts: retrieve": 1.0,
        UPDATES: 2.5, PUBLISH: 0.25, CHECKPOINT: 0.25, "new weights": 0.5, "other trees": 1.0,
    }  # fmt: skip


TIMES = st.integers(0, 40).map(lambda i: i / 4)
SERVICES = st.sampled_from(["generate", "judge.rules", "retrieve", "load"])
CALLS = st.builds(
    lambda service, times, tree: TracedCall(service, min(times), max(times), tree),
    SERVICES,
    st.tuples(TIMES, TIMES),
    st.sampled_from([None, 0, 1, 2, 9]),
)


@given(st.lists(CALLS, max_size=12), st.lists(TIMES, max_size=6), st.tuples(TIMES, TIMES))
def test_the_causes_sum_to_the_wall_time_whatever_happens(
    calls: list[TracedCall], cuts: list[float], window: tuple[float, float]
) -> None:
    cuts = sorted(cuts)
    pairs = enumerate(zip(cuts[::2], cuts[1::2], strict=False))
    updates = [TracedUpdate(i, [(UPDATES, *pair)], {i}) for i, pair in pairs]
    causes = shares(TracedStart(min(window), max(window), calls, updates, {9}))
    assert sum(causes.values()) == pytest.approx(max(window) - min(window))
    assert all(seconds > 0 for seconds in causes.values())


def test_a_run_is_divided_from_its_newest_start_on(tmp_path: Path) -> None:
    run = make(tmp_path / "run", rewards=[1.0, 2.0])
    trace = run / "trace.jsonl"
    lines = trace.read_text()
    assert '"for":"tree 1, attempt 1 of 5"' in lines
    began, *rest = lines.splitlines(keepends=True)
    at = json.loads(began.removesuffix(",\n"))["ts"]
    before = '{"name":"generate","ph":"X","ts":1.0,"dur":1e12,"args":{"for":"tree 0"}},\n'
    # an update of the start before, whose answer was lost
    told = {"ph": "X", "pid": "x", "ts": at, "dur": 0, "args": {"outcome": "ok", "version": 0}}
    again = "".join(json.dumps({"name": name} | told) + ",\n" for name in ("load", "train"))
    trace.write_text(before + began + again + "".join(rest) + '{"name":"gen')
    causes = shares(recorded(run, runs.read(run).records))
    expected = {"rollouts: generate (decode)": 1.52, "rollouts: generate (prefill)": 0.48}
    expected |= {"learner: updates, other work": 0.22, "learner: forward": 0.2, PUBLISH: 0.08}
    assert causes == pytest.approx(expected, abs=1e-3)


def test_retention_bounds_the_trace_and_the_causes_are_of_what_is_left(tmp_path: Path) -> None:
    """Of six versions of one call each, two files of two versions are left, without the start."""
    metrics = Metrics(tmp_path)
    for version in range(1, 7):
        if version in (5, 6):  # killed and resumed, it comes by version 4 again
            metrics.rotate(4, 2)
        metrics.event(Event("load", "actor-0", version, version + 0.5, "ok", version=version))
        metrics.rotate(version, 2)
    metrics.event(Event("load", "actor-0", 7.0, 8.0, "ok", version=7))
    metrics.close()
    assert sorted(path.name for path in tmp_path.glob("trace*")) == ["trace-000006.jsonl", FILE]
    Journal(tmp_path / "journal.sqlite").close()
    start = recorded(tmp_path, [])
    assert (start.began, start.until, start.cut) == (5.0, 8.0, True)
    assert shares(start) == {"new weights": 2.0, "scheduler": 1.0}
