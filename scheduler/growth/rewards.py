"""Compute a step's reward from the judge's columns, and choose the candidate to continue by
advantage (methods.md 1.1, 1.3, 1.4)."""

import math
import random
from collections.abc import Sequence

from coppice.actors.environments.base import Environment
from coppice.scheduler.config import UNJUDGED
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.scoring import mark, score
from coppice.scheduler.growth.tree import Node

COMPONENTS = frozenset({"think", "query", "answer"})
"""The judge's columns from which ``composite`` makes a reward."""
INVALID_REWARD = -2.0
"""An action with neither search nor answer gets the worst composite score (methods.md 1.4)."""


def tries_out(e: Environment) -> bool:
    """Whether the environment's own rewards of candidates can stand for those of a judge."""
    return e.fresh and e.gives_step_rewards and not e.rewarded_by_judge


async def judge(ctx: Context, nodes: Sequence[Node], bonus: float) -> list[float]:
    """Have sibling actions judged, and return their rewards r_t: the judge's column "reward" if the
    environment is ``rewarded_by_judge``, else SLATE's ``composite``; NaN where no component is
    scored, as else the early-answer bonus would be all that candidates differ by. Without a judge,
    the environment's own rewards."""
    by_judge = ctx.environment.rewarded_by_judge
    await score(ctx, [node for node in nodes if by_judge or ctx.action(node).valid])
    mark(ctx, nodes)
    if not by_judge and ctx.settings.judge != UNJUDGED:
        for node in nodes:
            action = ctx.action(node)
            if not action.valid:
                node.scores["reward"] = INVALID_REWARD
            elif COMPONENTS & node.scores.keys():
                when = action.kind == "answer", node.step, ctx.settings.budget
                node.scores["reward"] = composite(node.scores, *when, bonus)
    elif len(nodes) > 1 and tries_out(ctx.environment):
        await ctx.try_out(nodes)
        for node in (node for node in nodes if "step_reward" in node.scores):
            own = node.scores["step_reward"] if ctx.action(node).valid else INVALID_REWARD
            node.scores["reward"] = own
    return [node.scores.get("reward", math.nan) for node in nodes]


def composite(
    scores: dict[str, float], answered: bool, step: int, budget: int, bonus: float
) -> float:
    """r_t: think + query for a search; think + answer + bonus (B - t) / B for an answer at step t
    from 1, without the bonus after step B. An invalid component is 0."""
    think = scores.get("think", 0.0)
    if not answered:
        return think + scores.get("query", 0.0)
    return think + scores.get("answer", 0.0) + bonus * max(0, budget - step) / budget


def selection(scores: Sequence[float], eta: float) -> list[float]:
    """softmax(A / eta): the probability that each candidate is continued."""
    top = max(scores)
    weights = [math.exp((score - top) / eta) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def choose(
    scores: Sequence[float], allowed: Sequence[int], rule: str, eta: float, rng: random.Random
) -> int:
    """The index of the candidate to continue: drawn by ``selection``, or the first of the best."""
    if rule == "best-of-k":
        return max(allowed, key=lambda index: scores[index])
    return rng.choices(allowed, selection([scores[index] for index in allowed], eta))[0]
