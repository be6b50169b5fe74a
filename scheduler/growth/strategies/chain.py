"""Chains: one trajectory from each of many initial states, with every turn scored; a batch of
chains is one group (methods.md 3.5).

This is VPR's and PPR's sampling. Turns are scored while the next turns are played, so the engine
never waits for an oracle.
"""

from collections.abc import Callable

from coppice.common.concurrency import TaskGroup
from coppice.common.declared import StrategyGives
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.rewards import judge
from coppice.scheduler.growth.scoring import finish
from coppice.scheduler.growth.tree import Fork, Node, Tree


def gives(**_: object) -> StrategyGives:
    """Declare one trajectory per task."""
    return StrategyGives(group="task", reward_options=frozenset({"bonus"}))


async def grow(tree: Tree, ctx: Context, bonus: float = 0.1) -> None:
    """Grow the trajectory to its end, then emit it. bonus: see ``scheduler.rewards.composite``."""
    if not tree.groups:  # a crash may have come between the group and the end of its tree
        ctx.emit([await episode(tree, ctx, bonus)])


async def episode(
    tree: Tree, ctx: Context, bonus: float = 0.1, trajectory: int = 0,
    acting: Callable[[Node], object] = lambda action: None, fork: Fork | None = None,
) -> list[Node]:  # fmt: skip
    """Continue one trajectory to its end. Returns its trained actions in order: none if its outcome
    could not be judged. ``acting`` is called with each action once it is sampled. fork: where the
    trajectory begins, if it leaves another one; its actions then include those that both share."""
    async with TaskGroup() as group:

        def sampled(action: Node) -> Node:
            action.chosen = True
            ctx.save([action])
            group.start(judge(ctx, [action], bonus))
            acting(action)
            return action

        sampled_before = tree.actions(trajectory)  # there are some if the tree is half-grown
        for action in sampled_before:
            if "valid" not in action.scores and not action.forced:
                group.start(judge(ctx, [action], bonus))
            acting(action)
        if fork is None or sampled_before:
            node = await ctx.tip(trajectory)
        else:
            node = sampled(await ctx.branch(fork, trajectory))
        while (place := await ctx.onward(node)) is not None:
            (action,) = await ctx.generate(place, 1, trajectory)
            node = sampled(action)
    judged = await finish(ctx, trajectory)
    return [action for action in tree.actions(trajectory) if judged and not action.forced]
