"""Where the seconds of a run go: the phases add up whatever runs beside what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.scheduler.telemetry.report import Phases

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
