"""SLATE: truncated step-level sampling (Algorithm 1; methods.md 1.1).

At each step k candidates are sampled from one prefix and judged. All k go to training at once, and
one of them, drawn by its advantage, is continued. An answer ends the tree. A used-up budget forces
an answer, which is logged but not trained.
"""

from typing import Literal

import numpy as np

from coppice.common.declared import StrategyGives
from coppice.common.numbers import Count, Ddof, Positive
from coppice.common.statistics import among_siblings
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.rewards import choose, judge
from coppice.scheduler.growth.scoring import log_outcome
from coppice.scheduler.growth.tree import DROPPED, Tree

Selection = Literal["reward-weighted", "best-of-k"]
ETA = 0.7


def gives(k: int, eta: float, selection: Selection, **_: object) -> StrategyGives:
    """Declare ``k`` candidates per prefix, each trained by its own reward; the trained candidates
    have no outcome."""
    if selection == "best-of-k" and eta != ETA:
        setting = f"scheduler.strategy_options.eta = {eta}"
        raise ValueError(f"{setting} has no effect with selection = 'best-of-k': remove it")
    return StrategyGives(
        group="step",
        size=k,
        columns=frozenset({"advantage"}),
        reward_options=frozenset({"bonus"}),
        outcome=False,
        needs_judge=True,
        selects_as="slate",
    )


async def grow(
    tree: Tree,
    ctx: Context,
    k: Count = 5,
    eta: Positive = ETA,
    selection: Selection = "reward-weighted",
    bonus: float = 0.1,
    ddof: Ddof = 1,
    eps: Positive = 1e-6,
) -> None:
    """Grow one question's tree from its tip to its end.

    eta: temperature of the reward-weighted choice, without effect on "best-of-k". bonus: lambda of
    the early-answer bonus. ddof, eps: those of the advantage by which it chooses; a run whose
    scheme is "slate", too, sets them in learner.scheme_options.
    """
    node = await ctx.tip()
    while (place := await ctx.onward(node)) is not None:
        candidates = await ctx.generate(place, k)
        rewards = await judge(ctx, candidates, bonus)
        scores = among_siblings(np.array(rewards), ddof, eps).tolist()
        for candidate, score in zip(candidates, scores, strict=True):
            candidate.scores["advantage"] = score
        valid = [i for i, candidate in enumerate(candidates) if ctx.action(candidate).valid]
        everyone = list(range(len(candidates)))
        chosen = choose(scores, valid or everyone, selection, eta, ctx.rng)
        candidates[chosen].chosen = True
        ctx.emit([[candidate] for candidate in candidates])
        node = candidates[chosen]
    last = tree.actions()[-1]
    if ctx.environment.outcome_judge and DROPPED not in last.notes:
        await log_outcome(ctx, last)
