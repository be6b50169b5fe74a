"""The causes of the wall time: planted delays come out as they were planted, and the causes sum to the wall time."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.run_folder import make
from tools.inspecting import critical, runs
from tools.inspecting.critical import Call, Update, shares

UPDATES, PUBLISHING, CHECKPOINTS = critical.LEARNER.values()


def test_planted_delays_come_out_as_they_were_planted() -> None:
    """Trees 1 and 2 make update 1, tree 3 makes update 2, tree 4 none; 9 and 10 are held out."""
    calls = [
        Call("generate", 1.0, 3.0, 9),
        Call("generate", 1.0, 2.0, 1),
        Call("judge.rules", 2.0, 2.5, 1),
        Call("generate", 3.5, 5.0, 2),
        Call("judge.rules", 5.0, 7.0, 2),
        Call("retrieve", 5.0, 6.0, 2),
        Call("retrieve", 7.0, 8.0, 2),
        Call("generate", 9.0, 9.5, 3),
        Call("load", 10.5, 11.0),
        Call("generate", 10.75, 12.0, 4),
        Call("judge.rules", 12.0, 13.0, 3),
        Call("generate", 14.0, 15.0, 10),
    ]
    first = Update([(UPDATES, 8.5, 10.0), (PUBLISHING, 10.0, 10.25), (CHECKPOINTS, 10.25, 10.5)], {1, 2})
    second = Update([(UPDATES, 13.0, 14.0)], {3})
    assert shares(calls, [first, second], {9, 10}, 0.0, 15.0) == {
        "starting processes": 1.0,
        "held-out evaluation": 3.0,
        "scheduler": 1.0,
        "rollouts: generate": 1.5,
        "rollouts: judge": 3.0,
        "rollouts: retrieve": 1.0,
        UPDATES: 2.5,
        PUBLISHING: 0.25,
        CHECKPOINTS: 0.25,
        "new weights": 0.5,
        "other trees": 1.0,
    }


def test_of_several_calls_of_the_last_tree_the_one_that_ends_last_counts() -> None:
    calls = [Call("generate", 0.0, 1.0, 1), Call("judge.a", 0.5, 4.0, 1), Call("generate", 0.0, 3.0, 2)]
    update = Update([(UPDATES, 4.0, 5.0)], {1, 2})
    assert shares(calls, [update], set(), 0.0, 5.0) == {"rollouts: judge": 3.5, UPDATES: 1.0, "rollouts: generate": 0.5}


TIMES = st.integers(0, 40).map(lambda i: i / 4)
CALLS = st.builds(
    lambda service, times, tree: Call(service, min(times), max(times), tree),
    st.sampled_from(["generate", "judge.rules", "retrieve", "load"]), st.tuples(TIMES, TIMES), st.sampled_from([None, 0, 1, 2, 9]),
)  # fmt: skip


@given(st.lists(CALLS, max_size=12), st.lists(TIMES, max_size=6), st.tuples(TIMES, TIMES))
def test_the_causes_sum_to_the_wall_time_whatever_happens(
    calls: list[Call], cuts: list[float], window: tuple[float, float]
) -> None:
    cuts = sorted(cuts)
    updates = [Update([(UPDATES, a, b)], {i}) for i, (a, b) in enumerate(zip(cuts[::2], cuts[1::2], strict=False))]
    causes = shares(calls, updates, {9}, min(window), max(window))
    assert sum(causes.values()) == pytest.approx(max(window) - min(window))
    assert all(seconds > 0 for seconds in causes.values())


def test_a_run_is_divided_from_its_newest_start_on(tmp_path: Path) -> None:
    run = make(tmp_path / "run", rewards=[1.0, 2.0])
    trace = run / "trace.jsonl"
    lines = trace.read_text()
    assert '"for":"tree 1, attempt 1 of 5"' in lines
    trace.write_text(
        '{"name":"generate","ph":"X","ts":1.0,"dur":1e12,"args":{"for":"tree 0"}},\n' + lines + '{"name":"gen'
    )
    causes = critical.budget(run, runs.read(run).records)
    assert causes == {
        "rollouts: generate": pytest.approx(2.0, abs=1e-3), UPDATES: pytest.approx(0.4, abs=1e-3), PUBLISHING: pytest.approx(0.1, abs=1e-3),
    }  # fmt: skip
    assert sum(causes.values()) == pytest.approx(2.5, abs=1e-3)
