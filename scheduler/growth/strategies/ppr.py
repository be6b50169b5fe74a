"""PPR: one trajectory per question; each turn but the last is judged together with its search
results (methods.md 2.1, 2.2).

A budget of B turns is B - 1 rounds of search and one final generation. The final generation is not
judged, even if it is no answer; the outcome decides. Turns are judged while the next turns are
generated.
"""

from coppice.common.concurrency import TaskGroup
from coppice.common.declared import StrategyGives
from coppice.scheduler.config import UNJUDGED
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.scoring import finish, mark, score
from coppice.scheduler.growth.tree import Node, Tree

EVALUATION = "ppr"
"""Held-out questions are answered in the same rounds; no answer is forced."""


def gives(**_: object) -> StrategyGives:
    """Declare one trajectory per question with the judge's columns, of which no reward is made."""
    columns = frozenset({"judge_valid"})
    return StrategyGives(group="task", columns=columns, rewarded=False, needs_outcome_judge=True)


async def grow(tree: Tree, ctx: Context) -> None:
    """Grow the trajectory to its end, then emit it."""
    if not tree.groups:  # a crash may have come between the group and the end of its tree
        ctx.emit([await episode(tree, ctx)])


async def episode(tree: Tree, ctx: Context) -> list[Node]:
    """Continue the trajectory to its end. Returns its actions in order: none if its outcome could
    not be judged."""
    async with TaskGroup() as group:
        place: Node | None = await ctx.tip()
        for action in tree.actions():  # there are some if the tree is half-grown
            if action is not place and "judge_valid" not in action.scores:
                group.start(_assess(ctx, action))
        while place is not None:
            if place.kind != "action":
                (place,) = await ctx.generate(place, 1)
                place.chosen = True
            # otherwise the action was marked before a crash or a fault
            if "valid" not in place.scores:
                mark(ctx, [place])
                ctx.save([place])
            if place.step >= ctx.settings.budget:
                break
            acted, place = place, await ctx.step(place)
            if place is not None:
                group.start(_assess(ctx, acted))
    return tree.actions() if await finish(ctx) else []


async def _assess(ctx: Context, node: Node) -> None:
    """Judge a turn with the environment's answer. judge_valid is 1 if all columns are valid."""
    if ctx.settings.judge != UNJUDGED:
        await score(ctx, [node])
        node.scores["judge_valid"] = float(not node.invalid)
