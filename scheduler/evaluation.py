"""Held-out evaluation by whole trajectories, with 95% intervals, beside trivial baselines that need no model."""

import math
import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from actors.environments.base import Task
from scheduler.tree import Tree


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
    """Mean and 1.96 standard errors; for values in {0, 1} the standard error is that of a proportion, never below one in n."""
    n = len(values)
    if not n:
        return Estimate(math.nan, math.nan)
    mean = math.fsum(values) / n
    variance = math.fsum((v - mean) ** 2 for v in values) / max(1, n - 1)
    if set(values) <= {0.0, 1.0}:
        smoothed = (math.fsum(values) + 2) / (n + 4)  # Agresti-Coull: an observed 0 or 1 is no certainty
        variance = max(variance, smoothed * (1 - smoothed))
    return Estimate(mean, 1.96 * math.sqrt(variance / n))


class HeldOut(msgspec.Struct, frozen=True):
    """What an evaluation found. ``ret`` is the return: the sum of judged step rewards of a trajectory."""

    version: int
    questions: int
    em: Estimate
    f1: Estimate
    ret: Estimate
    valid: Estimate
    answered: Estimate
    searches: float
    em_by_hops: dict[str, float]


def summarise(version: int, trees: Sequence[tuple[Task, Tree]]) -> HeldOut:
    """The evaluation of finished trees with one trajectory each."""
    rows = []
    for task, tree in trees:
        actions = [n for n in tree.path(tree.tip()) if n.kind == "action"]
        own = [n for n in actions if not n.forced]
        rows.append(
            {
                "hops": task.hops,
                "em": actions[-1].scores.get("outcome", 0.0),
                "f1": actions[-1].scores.get("f1", 0.0),
                "ret": math.fsum(n.scores.get("reward", 0.0) for n in own),
                "valid": [n.scores.get("valid", 0.0) for n in own],
                "answered": float(not actions[-1].forced),
                "searches": sum("query" in n.scores for n in own),
            }
        )
    hops = sorted({row["hops"] for row in rows})
    return HeldOut(
        version=version,
        questions=len(rows),
        em=estimate([row["em"] for row in rows]),
        f1=estimate([row["f1"] for row in rows]),
        ret=estimate([row["ret"] for row in rows]),
        valid=estimate([value for row in rows for value in row["valid"]]),
        answered=estimate([row["answered"] for row in rows]),
        searches=sum(row["searches"] for row in rows) / max(1, len(rows)),
        em_by_hops={str(h): estimate([row["em"] for row in rows if row["hops"] == h]).mean for h in hops},
    )


def trivial_baselines(heldout: Sequence[Task], train: Sequence[Task]) -> dict[str, float]:
    """Exact match without a model: a random training answer, and the one constant answer that is best on the held-out set itself."""
    rng = random.Random(0)
    answers = [task.golds[0] for task in train]
    random_hits = [float(rng.choice(answers).lower() in {g.lower() for g in task.golds}) for task in heldout]
    best = Counter(gold.lower() for task in heldout for gold in set(task.golds)).most_common(1)
    return {
        "random_answer": sum(random_hits) / len(random_hits),
        "best_constant_answer": best[0][1] / len(heldout) if best else 0.0,
    }
