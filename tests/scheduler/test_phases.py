"""Where the seconds of a run go: the phases add up whatever runs beside what, and the table says
what it covers."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.scheduler.telemetry.metrics import Metrics
from coppice.scheduler.telemetry.phases import Phases, Training, learner_seconds, table
from tests.scheduler.test_metrics import beat, worker

NAMES = st.sampled_from(["starting processes", "updates", "stopping"])
EVENTS = st.one_of(NAMES, st.sampled_from(["open", "close"]))
MOVES = st.lists(st.tuples(st.floats(0.0, 100.0), EVENTS), max_size=30)


@given(MOVES)
def test_overlapping_phases_add_up_to_the_time(moves: list[tuple[float, str]]) -> None:
    clock = [50.0]
    phases, blocks = Phases("set-up", 20.0, lambda: clock[0]), []
    for seconds, move in moves:
        clock[0] += seconds
        if move == "open":
            blocks.append(phases.over(f"evaluation {len(blocks)}"))
            blocks[-1].__enter__()
        elif move == "close" and blocks:
            blocks.pop(0).__exit__(None, None, None)  # the first that began may end first
        elif move != "close":
            phases.enter(move)
    assert sum(phases.seconds().values()) == pytest.approx(clock[0] - 20.0)


def trained(first: int, last: int) -> Training:
    sums = Counter({"learner/seconds": 30.0, "time/publish": 2.0, "time/checkpoint": 4.0})
    busy = {"actors": 0.75, "judges": 0.01}
    return Training(first, last, first > 0, 60.0, learner_seconds(sums, 60.0), busy, 12.0, 1.5)


PHASES = {"set-up": 10.0, "first evaluation": 20.0, "updates": 50.0, "stopping": 20.0}


def test_the_table_has_every_phase_with_its_share_and_fits_a_terminal() -> None:
    lines = table(PHASES, trained(0, 10))
    assert lines[0] == "  where the 100.0 s of this start went"
    for line, seconds in zip(lines[1:5], PHASES.values(), strict=True):
        assert line.split()[-3:] == [f"{seconds:.1f}", "s", f"{seconds:.1f}%"]
    assert lines[5] == "  10 updates in 60.0 s, 6.0 s each; meanwhile, per process"
    assert [line.split("  ")[2] for line in lines[6:]] == [
        "learner: updates",
        "learner: publishing weights",
        "learner: checkpoints",
        "learner: waiting for trees",
        "actors: busy",
        "judges: busy",
        "actors: no tree may grow",
        "actors: new weights on their way",
    ]
    assert lines[10].split()[-3:] == ["45.0", "s", "75.0%"]
    assert max(map(len, lines)) < 80


def test_busy_shares_are_of_all_the_time_that_heartbeats_cover(tmp_path: Path) -> None:
    metrics, actor = Metrics(tmp_path), worker("actor-0", "generate", "load")
    workers = [actor, worker("judges", "judge.a", "judge.b"), worker("learner-0", "train")]
    for each in workers:
        beat(each, 0.0, busy_s=100.0)
    beat(workers[1], 0.0, **{"judge.a.busy_s": 1.0, "judge.b.busy_s": 1.0})
    metrics.counters(workers)
    beat(actor, 2.0, busy_s=101.0)
    beat(workers[1], 4.0, **{"judge.a.busy_s": 1.5, "judge.b.busy_s": 2.5})
    metrics.counters(workers)
    metrics.counters(workers)  # no heartbeat came: nothing is counted twice
    beat(actor, 10.0, busy_s=121.0)  # requests side by side are no more than all the time
    metrics.counters(workers)
    assert metrics.busy() == {"actors": 0.9, "judges": 0.5}
    metrics.close()
