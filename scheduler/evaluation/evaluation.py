"""The results of held-out evaluations with 95% intervals, and players that need no model."""

import math
import random
from collections.abc import Callable, Sequence

import msgspec

from coppice.actors.environments.base import Environment, Task
from coppice.scheduler.growth.tree import Tree


class Estimate(msgspec.Struct, frozen=True):
    """A mean with the half width of its 95% interval."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ±{self.half:.3f}"


def estimate(values: Sequence[float], counts: bool = False) -> Estimate:
    """The mean and 1.96 standard errors; of values in {0, 1} those of a proportion, which are never
    0. counts: the values are counts, and no proportion even if each is 0 or 1."""
    if not (n := len(values)):
        return Estimate(math.nan, math.nan)
    mean = math.fsum(values) / n
    variance = math.fsum((v - mean) ** 2 for v in values) / max(1, n - 1)
    if not counts and set(values) <= {0.0, 1.0}:
        # Agresti-Coull: an observed share of 0 or 1 is not certain
        smoothed = (math.fsum(values) + 2) / (n + 4)
        variance = max(variance, smoothed * (1 - smoothed))
    return Estimate(mean, 1.96 * math.sqrt(variance / n))


class HeldOut(msgspec.Struct, frozen=True):
    """The result of one evaluation. headline: the most important measure. how: what must be alike
    in two that are compared."""

    version: int
    questions: int
    headline: str
    measures: dict[str, Estimate]
    how: str = ""


def measured(environment: Environment, task: Task, tree: Tree) -> dict[str, list[float]]:
    """Return the environment's measures of a finished tree that has one trajectory."""
    turns = [{**action.scores, "forced": float(action.forced)} for action in tree.actions()]
    return environment.measures(task, turns)


def pooled(environment: Environment, trees: Sequence[tuple[Task, Tree]]) -> dict[str, list[float]]:
    """Return the values of all ``trees`` by measure. Measures without values are left out."""
    values: dict[str, list[float]] = {}
    for task, tree in trees:
        for name, several in measured(environment, task, tree).items():
            values.setdefault(name, []).extend(several)
    return {name: several for name, several in sorted(values.items()) if several}


BASELINES: dict[str, Callable[[list[str], random.Random], str]] = {
    "random_legal_move": lambda replies, rng: rng.choice(replies),
    "first_legal_move": lambda replies, rng: replies[0],
}
"""Players that need no model and choose among the replies that an environment lists."""


def lists_replies(environment: Environment) -> bool:
    """Whether the environment, or the one that it stands for, lists replies to choose from."""
    return getattr(environment.replies, "__func__", None) is not Environment.replies
