"""Dynamic sampling: a question without spread is replaced, its groups are trained exactly once, and
an update has the questions that it names.
"""

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coppice.actors.environments.base import SPLIT, Action, Environment, Task, Tools, Transition
from coppice.learner.update.batches import Inbox
from coppice.learner.update.trainer import Batch
from coppice.scheduler.config import EvaluationConfig, SchedulerConfig
from coppice.scheduler.dispatch.dispatcher import DispatchConfig
from coppice.scheduler.growth.dynamic_sampling import differs
from coppice.wire import messages as wire
from coppice.wire.service import Call
from tests.scheduler.test_begin import House, journal_of, publish
from tests.scheduler.test_strategies import sample

QUESTIONS, UPDATES, BUDGET = 2, 4, 2


class Coin(Environment):
    """One action ends the episode, and the letter B earns 1. Two of three tasks are flat: there the
    engine always says A."""

    name = "coin"

    def task(self, seed: int) -> Task:
        return Task(f"{'flat' if seed % 3 else 'mixed'}-{seed}", seed=seed)

    def initial(self, task: Task) -> Task:
        return task

    def prompt(self, task: Task, state: Task) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{task.id}{SPLIT}?"}]

    def read(self, state: Task, text: str) -> Action:
        return Action("move", text, move=(0,))

    async def step(self, state: Task, action: Action, tools: Tools) -> Transition:
        return Transition(state, "", True, float(action.text == "B"))


class Learning(House):
    """A run whose learner takes batches as rank 0 does."""

    def __init__(self, folder: Path, model: Path):
        sizes: Any = {"updates": UPDATES, "questions_per_update": QUESTIONS, "max_action_tokens": 4}
        settings = SchedulerConfig(
            strategy="full",
            strategy_options={"k": 2},
            judge="none",
            dynamic_sampling_budget=BUDGET,
            evaluation=EvaluationConfig(questions=0),
            # all share one thread, which a busy machine may hold up
            dispatch=DispatchConfig(dead_after_s=300.0),
            **sizes,
        )
        world = {"environment": f"{__name__}:Coin", "options": {}, "reward": "outcome"}
        super().__init__(folder, model, scheduler=settings, **world)
        self.inbox = Inbox(QUESTIONS, {})
        self.answers: dict[int, asyncio.Future[wire.Trained]] = {}
        self.batches: list[Batch] = []
        self.asked: defaultdict[str, int] = defaultdict(int)

    async def generate(self, request: wire.GenerateRequest, call: Call) -> wire.GenerateResult:
        """The trajectories of a mixed task alternate between A and B; those of a flat task all say
        A."""
        text, samples = self.run.runtime.text, []
        for _ in range(request.n):
            prompt = text.decode(request.tokens)
            said = "B" if "mixed" in prompt and self.asked[prompt] % 2 else "A"
            self.asked[prompt] += 1
            samples.append(sample(text, said, self.in_force))
        return wire.GenerateResult(samples, len(request.tokens), 0)

    async def train(self, group: wire.TrainGroup, call: Call) -> wire.Trained:
        self.inbox.add(group)
        self.answers[group.id] = asyncio.get_running_loop().create_future()
        self.update()
        return await self.answers[group.id]

    async def close(self, closed: wire.TreeClosed, call: Call) -> wire.Closed:
        self.inbox.close(closed)
        self.update()
        return wire.Closed()

    def update(self) -> None:
        while (trees := self.inbox.ready()) is not None:
            self.batches.append(self.inbox.take(trees, self.trained))
            self.trained += 1
            weights = publish(self.folder, self.trained)
            trained = wire.Trained(weights.version, weights.path, weights.digest, {}, [])
            for group in in_update(self.batches[-1]):
                self.answers[group].set_result(trained)


def in_update(batch: Batch) -> list[int]:
    """The groups of an update, also those of replaced trees."""
    return [*(group.id for group in batch.groups), *batch.replaced]


def check(folder: Path, batches: list[Batch]) -> None:
    """Every draw is made once, every group is in one update, and every update has its questions and
    at most its budget of replaced ones."""
    journal = journal_of(folder)
    rows = journal.trees("split='train'")
    assert [row.position for row in rows] == list(range(len(rows)))
    taken = [(group, batch.version + 1) for batch in batches for group in in_update(batch)]
    assert sorted(taken) == [group for row in rows for group in journal.groups(row.id)]
    assert [batch.questions for batch in batches] == [QUESTIONS] * UPDATES
    by_group = {group: row for row in rows for group, _ in journal.groups(row.id)}
    for batch in batches:
        assert len(batch.groups) == QUESTIONS and len(batch.replaced) <= BUDGET
        replaced = [by_group[group] for group in batch.replaced]
        assert all(row.status == "replaced" and row.task.startswith("flat") for row in replaced)
        assert {by_group[group.id].status for group in batch.groups} == {"closed"}


def turns(*trajectories: list[float | None]) -> list[wire.Turn]:
    """A group whose trajectories have these rewards turn by turn, None for no score."""
    return [
        wire.Turn(0, number, step, {} if reward is None else {"reward": reward})
        for number, rewards in enumerate(trajectories)
        for step, reward in enumerate(rewards, 1)
    ]


SPREADS = [
    (turns([0.0, 1.0], [1.0]), False, True),
    (turns([None, 1.0], [1.0]), False, False),
    (turns([1.0], [0.0]), True, True),
    (turns([1.0], [None]), False, False),  # an unknown reward is no spread
    (turns([0.1, 0.2], [0.2, 0.1]), False, True),
    ([], False, False),
]


@pytest.mark.parametrize(("group", "returns", "by_turn"), SPREADS)
def test_returns_or_for_some_schemes_turns_that_differ_are_a_spread(
    group: list[wire.Turn], returns: bool, by_turn: bool
) -> None:
    assert differs([group], "reward", "returns") == returns
    assert differs([turns([1.0], [1.0]), group], "reward", "turns") == by_turn


async def test_questions_without_spread_are_replaced(tmp_path: Path, llama: Path) -> None:
    house = Learning(tmp_path, llama)
    await house.live()
    check(tmp_path, house.batches)
    replaced = sum(len(batch.replaced) for batch in house.batches)
    assert replaced > 0
    summary = msgspec.json.decode((tmp_path / "summary.json").read_bytes())
    assert summary["counts"]["replaced"] == replaced
