"""The scheduler's cost for a call and for a node, in executed bytecode instructions."""

import asyncio
import contextlib
import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from coppice.actors.environments.base import Task
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.common.concurrency import gather
from coppice.research.benches import call_cost
from coppice.research.benches.load import ACTION
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.growth.strategies import slate
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.wire.messages import (
    GenerateRequest,
    GenerateResult,
    Judgement,
    JudgeRequest,
    JudgeResult,
    Passage,
    RetrieveResult,
    Sample,
)

pytestmark = pytest.mark.slow

TREES = 8
TEXT = "The capital of Peru is Lima, on the coast, where a third of its people live. " * 4
PASSAGE = Passage("1", "Peru", TEXT, 1.0)


class Instructions:
    def __init__(self) -> None:
        self.executed = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call" and "/scheduler/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.executed += event == "opcode"
        return self


@pytest.fixture
def instructions() -> Iterator[Instructions]:
    counting, before = Instructions(), sys.gettrace()
    sys.settrace(counting)
    yield counting
    sys.settrace(before)


@pytest.mark.parametrize("placed", [False, True])
def test_a_call_costs_the_same_in_a_large_fleet(instructions: Instructions, placed: bool) -> None:
    def cost(workers: int, capacity: int, callers: int) -> float:
        fleet = (workers, capacity, callers, placed)
        return asyncio.run(call_cost.measure(*fleet, 400, lambda: instructions.executed))

    one = cost(1, 64, 64)
    assert one > 100
    assert cost(128, 4, 256) < 1.5 * one
    assert cost(16, 4, 1000) < 1.5 * one


class Answers:
    """Stands for the dispatcher: answers every call at once."""

    def __init__(self, act: np.ndarray):
        zeros = np.zeros(len(act), np.int32)
        self.sample = Sample(act, np.full(len(act), -1, np.float32), zeros, "stop")

    async def call(self, service: str, request: Any, **_: Any) -> Any:
        if isinstance(request, GenerateRequest):
            return GenerateResult([self.sample] * request.n, len(request.tokens), 0)
        if isinstance(request, JudgeRequest):
            scores = {"think": 1.0, "query": 0.0, "answer": 0.0}
            return JudgeResult([Judgement(scores) for _ in request.turns])
        return RetrieveResult([[PASSAGE] * 3])


async def grow(runtime: Runtime, number: int) -> int:
    tree, question = Tree(number, f"t{number}"), f"What is the capital of country {number}?"
    task = Task(tree.task, question, golds=["Lima"])
    context = Context(runtime, task, tree, random.Random(number))
    runtime.journal.start_tree(tree, number, 0)
    await context.plant()
    await slate.grow(tree, context)
    runtime.journal.close_tree(tree)
    runtime.fleet.ended(number)
    return len(tree.nodes)


async def node_cost(
    text: Text, folder: Path, budget: int, instructions: Instructions
) -> dict[str, float]:
    """Grow SLATE trees whose calls are all answered at once. Returns instructions and bytes of the
    journal for a node, and the nodes of a tree."""
    path, groups = folder / f"{budget}.sqlite", itertools.count()
    answers: Any = Answers(text.encode(ACTION))
    with contextlib.closing(Journal(path)) as journal:
        settings = SchedulerConfig(budget=budget, judge="any")
        emit = lambda tree, turns: journal.save_group(tree, next(groups), turns)  # noqa: E731
        runtime = Runtime(answers, journal, text, SearchQA(), settings, Counter(), emit)
        await grow(runtime, -1)
        began = instructions.executed
        nodes = sum(await gather(grow(runtime, number) for number in range(TREES)))
        spent = instructions.executed - began
    written = sum(file.stat().st_size for file in folder.glob(path.name + "*"))
    return {"cost": spent / nodes, "bytes": written / nodes, "nodes": nodes / TREES}


def test_deep_nodes_cost_the_same(instructions: Instructions, tmp_path: Path, llama: Path) -> None:
    text, costs = Text(str(llama)), []
    for budget in (4, 20):
        costs.append(asyncio.run(node_cost(text, tmp_path, budget, instructions)))
    small, large = costs
    assert (small["nodes"], large["nodes"]) == (27, 123)
    assert large["cost"] < 1.3 * small["cost"]
    assert large["bytes"] < 2 * small["bytes"]
