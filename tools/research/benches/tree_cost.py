"""The scheduler's processor time for a node of a SLATE tree, from budget 4 to budget 20, without a journal and with one.

Every call of a service is answered at once, in this process and without the dispatcher (``call_cost`` measures that). Trees grow eight at a time, so
that several share a transaction of the journal, as in a run. Each step has five candidates, all of them searches.
"""

import asyncio
import contextlib
import gc
import itertools
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from actors.environments.base import Task
from actors.environments.search_qa import SearchQA
from scheduler.config import SchedulerConfig
from scheduler.context import Context
from scheduler.journal import Journal
from scheduler.services import Shop
from scheduler.strategies import slate
from scheduler.text import Text
from scheduler.tree import Tree
from tools.planning.growth import Forgetting
from tools.research.benches.load import ACTION
from tools.research.benches.slate_shape import model_folder
from wire import loop
from wire.messages import (
    GenerateRequest,
    GenerateResult,
    Judgement,
    JudgeRequest,
    JudgeResult,
    Passage,
    RetrieveResult,
    Sample,
)
from wire.numbers import Count

BUDGETS = (4, 10, 20)
AT_ONCE = 8
PASSAGE = Passage("1", "Peru", "The capital of Peru is Lima, on the coast, where a third of its people live. " * 4, 1.0)
"""About 80 tokens; a search shows three."""


class Answers:
    """Stands for the dispatcher: answers every call at once."""

    def __init__(self, act: np.ndarray):
        self.sample = Sample(act, np.full(len(act), -1, np.float32), np.zeros(len(act), np.int32), "stop")

    async def call(self, service: str, request: Any, **_: Any) -> Any:
        """Answer as an actor, a retriever or a judge does."""
        if isinstance(request, GenerateRequest):
            return GenerateResult([self.sample] * request.n, len(request.tokens), 0)
        if isinstance(request, JudgeRequest):
            return JudgeResult([Judgement({"think": 1.0, "query": 0.0, "answer": 0.0}) for _ in request.turns])
        return RetrieveResult([[PASSAGE] * 3])


async def grow(shop: Shop, number: int) -> int:
    """Grow one tree to its end, and return its number of nodes."""
    tree, task = (
        Tree(number, f"t{number}"),
        Task(f"t{number}", f"What is the capital of country {number}?", golds=["Lima"]),
    )
    context = Context(shop, task, tree, random.Random(number))
    shop.journal.start_tree(tree, number, 0)
    await context.plant()
    await slate.grow(tree, context)
    shop.journal.close_tree(tree)
    shop.fleet.ended(number)
    return len(tree.nodes)


async def measure(
    text: Text, folder: Path, budget: int, journaled: bool, trees: int, meter: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Grow trees. Returns for a node what it costs by ``meter``, in millionths (microseconds of processor time), and its bytes in the journal, and
    the number of nodes of a tree."""
    settings = SchedulerConfig(budget=budget, judge="any")
    path = folder / f"{budget}-{journaled}-{time.monotonic_ns()}.sqlite"
    journal = (Journal if journaled else Forgetting)(path)
    answers: Any = Answers(text.encode(ACTION))
    groups = itertools.count()
    shop = Shop(
        answers,
        journal,
        text,
        SearchQA(),
        settings,
        Counter(),
        lambda t, turns: journal.save_group(t, next(groups), turns),
    )
    await grow(shop, -1)
    gc.collect()
    began, nodes = meter(), 0
    with contextlib.closing(journal):
        for first in range(0, trees, AT_ONCE):
            nodes += sum(await asyncio.gather(*(grow(shop, i) for i in range(first, first + AT_ONCE))))
        spent = meter() - began
    written = sum(file.stat().st_size for file in folder.glob(path.name + "*"))
    return {"us": 1e6 * spent / nodes, "bytes": written / nodes, "nodes": nodes / trees}


def run(trees: Count = 40, rounds: Count = 3) -> dict[str, Any]:
    """Return the largest ratio of a node's cost to that at the smallest budget, with and without journal, and the costs (medians of rounds)."""
    cases = [(budget, journaled) for budget in BUDGETS for journaled in (False, True)]
    found: dict[tuple[int, bool], list[dict[str, float]]] = {case: [] for case in cases}
    text = Text(str(model_folder()))
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for case in cases:
                found[case].append(loop.run(measure(text, Path(folder), *case, trees)))
    values = {case: {k: statistics.median(one[k] for one in ones) for k in ones[0]} for case, ones in found.items()}
    row = {"name": "processor time of a node, budget 20 / budget 4", "goal": 1.3, "better": "lower"}
    row |= {"ratio": max(v["us"] / values[BUDGETS[0], journaled]["us"] for (_, journaled), v in values.items())}
    named = {f"budget {b}{', journaled' if j else ''}": v for (b, j), v in values.items()}
    return row | {f"{name}: {key}": value for name, one in named.items() for key, value in one.items()}
