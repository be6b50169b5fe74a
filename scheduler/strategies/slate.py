"""SLATE: truncated step-level sampling (Algorithm 1; methods.md 1.1).

At each step k candidates are sampled from one prefix and judged; all k leave for training at once; one of them, drawn by
its advantage, is continued. An answer ends the tree; a used-up budget forces one (logged, not trained).
"""

import numpy as np

from scheduler.context import Context
from scheduler.rewards import choose
from scheduler.tree import Tree
from wire.statistics import among_siblings


async def grow(tree: Tree, ctx: Context) -> None:
    """Grow one question's tree from its tip."""
    settings = ctx.settings
    node = await ctx.tip()
    while (place := await ctx.onward(node)) is not None:
        candidates = await ctx.generate(place, settings.k)
        rewards = await ctx.judge(candidates)
        scores = among_siblings(np.array(rewards)).tolist()
        for candidate, score in zip(candidates, scores, strict=True):
            candidate.scores["advantage"] = score
        valid = [i for i, candidate in enumerate(candidates) if ctx.action(candidate).valid]
        everyone = list(range(len(candidates)))
        chosen = choose(scores, valid or everyone, settings.selection, settings.eta, ctx.rng)
        candidates[chosen].chosen = True
        ctx.emit([[candidate] for candidate in candidates])
        node = candidates[chosen]
    if ctx.environment.outcome_judge:
        await ctx.log_outcome(tree.tip())
