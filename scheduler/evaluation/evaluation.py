"""The results of held-out evaluations by whole trajectories, with 95% intervals, and trivial
baselines that need no model."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from coppice.actors.environments.base import Environment, Task
from coppice.scheduler.concurrency import gather
from coppice.scheduler.growth.services import Services
from coppice.scheduler.growth.tree import Tree


class Estimate(msgspec.Struct, frozen=True):
    """A mean with the half width of its 95% interval."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __str__(self) -> str:
        return f"{self.mean:.3f} ±{self.half:.3f}"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean and 1.96 standard errors; of values in {0, 1} those of a proportion, never 0."""
    n = len(values)
    if not n:
        return Estimate(math.nan, math.nan)
    mean = math.fsum(values) / n
    variance = math.fsum((v - mean) ** 2 for v in values) / max(1, n - 1)
    if set(values) <= {0.0, 1.0}:
        # Agresti-Coull: an observed share of 0 or 1 is not certain
        smoothed = (math.fsum(values) + 2) / (n + 4)
        variance = max(variance, smoothed * (1 - smoothed))
    return Estimate(mean, 1.96 * math.sqrt(variance / n))


class HeldOut(msgspec.Struct, frozen=True):
    """The result of one evaluation. headline: the most important measure."""

    version: int
    questions: int
    headline: str
    measures: dict[str, Estimate]


def measured(environment: Environment, task: Task, tree: Tree) -> dict[str, list[float]]:
    """Return the environment's measures of a finished tree that has one trajectory."""
    turns = [{**action.scores, "forced": float(action.forced)} for action in tree.actions()]
    return environment.measures(task, turns)


def summarise(
    version: int, environment: Environment, trees: Sequence[tuple[Task, Tree]]
) -> HeldOut:
    """Evaluate finished trees of one trajectory each. Measures without values are left out."""
    values: dict[str, list[float]] = {}
    for task, tree in trees:
        for name, several in measured(environment, task, tree).items():
            values.setdefault(name, []).extend(several)
    measures = {name: estimate(several) for name, several in sorted(values.items()) if several}
    return HeldOut(version, len(trees), environment.headline, measures)


def trivial_baselines(heldout: Sequence[Task], train: Sequence[Task]) -> dict[str, float]:
    """Exact match of random and of the best constant training answers; empty without golds."""
    if not all(task.golds for task in (*heldout, *train)):
        return {}
    rng, answers = random.Random(0), [task.golds[0].lower() for task in train]
    golds = [[gold.lower() for gold in set(task.golds)] for task in heldout]
    hits = [rng.choice(answers) in each for each in golds]
    ((_, most),) = Counter(gold for each in golds for gold in each).most_common(1)
    return {
        "random_answer": sum(hits) / len(golds),
        "best_constant_answer": most / len(golds),
    }


BASELINES: dict[str, Callable[[list[str], random.Random], str]] = {
    "random_legal_move": lambda replies, rng: rng.choice(replies),
    "first_legal_move": lambda replies, rng: replies[0],
}
"""Players that need no model and choose among the replies that an environment lists."""


def lists_replies(environment: Environment) -> bool:
    """Whether the environment, or the one that it stands for, lists replies to choose from."""
    return getattr(environment.replies, "__func__", None) is not Environment.replies


async def play_baselines(
    environment: Environment, tasks: Sequence[Task], services: Callable[[Task, int], Services]
) -> dict[str, float]:
    """The mean headline of each player; empty without listed replies or if a judge is needed."""
    if environment.outcome_judge or not lists_replies(environment):
        return {}
    means = {}
    for name in BASELINES:
        values = await gather(
            _episode(environment, name, task, services(task, place))
            for place, task in enumerate(tasks)
        )
        means[name] = estimate(values).mean
    return means


async def _episode(environment: Environment, player: str, task: Task, tools: Services) -> float:
    rng = random.Random(f"{player}/{task.id}")
    state: Any = await environment.open(environment.initial(task), tools)
    while True:
        # many episodes whose steps wait for nothing must not hold up the event loop
        await asyncio.sleep(0)
        reply = BASELINES[player](environment.replies(state), rng)
        transition = await environment.step(state, environment.read(state, reply), tools)
        if transition.done:
            outcome = transition.outcome if transition.outcome is not None else 0.0
            turns = [{"outcome": outcome, **transition.measures}]
            (value,) = environment.measures(task, turns)[environment.headline]
            return value
        state = transition.state
