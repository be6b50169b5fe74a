"""The scheduler's cost for a call and for a node, in executed bytecode instructions: the same numbers on every machine and under every load.

Work in C is not counted (sorting without a key, encoding, tokenizing); ``tools/bench call_cost tree_cost`` time it.
"""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from scheduler.text import Text
from tools.research.benches import call_cost, call_lag, call_sockets, fleet_limit, tree_cost

pytestmark = pytest.mark.slow


class Instructions:
    """Counts the instructions that this thread executes in the project's files."""

    def __init__(self) -> None:
        self.executed = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        """Count one event, and ask for each instruction of a new frame."""
        if event == "call" and "/scheduler/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.executed += event == "opcode"
        return self


@pytest.fixture
def instructions() -> Iterator[Instructions]:
    """The count, from now on."""
    counting, before = Instructions(), sys.gettrace()
    sys.settrace(counting)
    yield counting
    sys.settrace(before)


@pytest.mark.parametrize("placed", [False, True])
def test_a_call_costs_the_same_with_many_workers_and_many_open_calls(instructions: Instructions, placed: bool) -> None:
    def cost(workers: int, capacity: int, callers: int) -> float:
        work = call_cost.measure(workers, capacity, callers, placed, 400, lambda: instructions.executed)
        return asyncio.run(work)

    one = cost(1, 64, 64)
    assert one > 100
    assert cost(128, 4, 256) < 1.5 * one
    assert cost(16, 4, 1000) < 1.5 * one


def test_a_node_costs_the_same_in_a_deep_tree(instructions: Instructions, tmp_path: Path, llama: Path) -> None:
    def cost(budget: int) -> dict[str, float]:
        work = tree_cost.measure(text, tmp_path, budget, True, 8, lambda: instructions.executed)
        return asyncio.run(work)

    text = Text(str(llama))
    small, large = cost(4), cost(20)
    assert (small["nodes"], large["nodes"]) == (27, 123)
    assert large["us"] < 1.3 * small["us"]
    assert large["bytes"] < 2 * small["bytes"]


def test_a_simulated_fleet_grows_trees_to_their_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, llama: Path
) -> None:
    monkeypatch.setattr(
        fleet_limit, "SECONDS", {name: (0.02, sigma) for name, (_, sigma) in fleet_limit.SECONDS.items()}
    )
    monkeypatch.setattr(fleet_limit, "BEGIN_S", 0.1)

    async def grown() -> dict[str, int]:
        async with fleet_limit.Fleet(tmp_path, Text(str(llama)), actors=20, judges=100, heartbeat_s=0.5) as fleet:
            fleet.more(30)
            async with asyncio.timeout(300):
                while fleet.grown < 60:
                    await asyncio.sleep(0.05)
            assert fleet.nodes == 27 * fleet.grown
            assert sum(fleet.dispatcher.waiting().values()) <= 30  # a tree has one call open at a time
            return fleet.journal.tally()

    tally = asyncio.run(grown())
    recorded = fleet_limit.Texts(Text(str(llama)), str(tmp_path))
    assert {len(sample.tokens) for sample in recorded.samples} == {len(Text(str(llama)).encode(fleet_limit.ACTION))}
    assert sum("Lima" in passages[0].text for passages in recorded.found) > len(recorded.found) / 2, recorded.found[:3]
    assert tally["closed"] >= 60
    assert tally["growing"] <= 30


def test_the_lag_is_measured_at_the_rate_that_was_asked_with_and_without_a_journal() -> None:
    row = call_lag.run(rates=(100,), workers=(16,), seconds=1)
    assert [*row["rows"]] == ["16/100/False", "16/100/True"]
    for measured in row["rows"].values():
        assert 0 < measured["calls_s"] <= 110
        assert 0 <= measured["lag_p50"] <= measured["lag_p99"] <= measured["lag_max"]
        assert measured["us"] > 0


def test_a_call_over_sockets_is_measured_with_a_place_without_one_and_with_a_journal() -> None:
    row = call_sockets.run(seconds=0.3, rounds=1, sizes=("16/64",))
    assert [*row["rows"]] == ["16/64", "16/64 place", "16/64 journal"]
    assert row["ratio"] == 1.0
    for measured in row["rows"].values():
        assert measured["calls_s"] > 0
        assert 0 <= measured["lag_p50"] <= measured["lag_p99"]
        assert 0 <= measured["heartbeats"] < 1
    with pytest.raises(ValueError, match="'3/3'"):
        call_sockets.run(sizes=("3/3",))
