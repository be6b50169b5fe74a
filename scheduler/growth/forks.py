"""Trees of whole trajectories that fork from each other (docs/methods-table.md). A path is sampled
to its end first and forked afterwards, which gives the same distribution as growing level by level.
Trajectory numbers are the strategy's. After a crash a tree may draw other forks than it would have
drawn."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from coppice.common.concurrency import gather
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.strategies.chain import episode
from coppice.scheduler.growth.tree import Fork, Node, Tree

Leaves = dict[int, list[Node]]
"""The trained actions of each trajectory by its number; none if its outcome is unknown."""


async def grown(tree: Tree, ctx: Context, forks: Mapping[int, Fork | None]) -> Leaves:
    """Continue trajectories to their ends, all at once. None: it begins at the first prompt."""
    work = (
        episode(tree, ctx.derive(f"trajectory {number}"), trajectory=number, fork=fork)
        for number, fork in forks.items()
    )
    return dict(zip(forks, await gather(work), strict=True))


def distinct(trajectories: Iterable[Sequence[Node]]) -> list[Node]:
    """The actions of some trajectories, each once."""
    return list({action.id: action for actions in trajectories for action in actions}.values())


def surprisal(action: Node) -> np.ndarray:
    """-log p of each token of an action under the policy that sampled it, float32 [tokens]."""
    assert action.logprobs is not None, "a trained action was sampled"
    return -action.logprobs


def cut(actions: Sequence[Node], tokens: int) -> Fork | None:
    """The fork after the first ``tokens`` sampled tokens, None if no token follows."""
    for action in actions:
        if tokens < len(action.tokens):
            return Fork(action, tokens)
        tokens -= len(action.tokens)
    return None


def onward(leaves: Leaves, tokens: int) -> dict[int, Fork]:
    """The fork after ``tokens`` sampled tokens of each trajectory that goes on after them."""
    forks = {number: cut(actions, tokens) for number, actions in leaves.items()}
    return {number: fork for number, fork in forks.items() if fork is not None}


def emit(tree: Tree, ctx: Context, groups: Iterable[Iterable[Sequence[Node]]]) -> None:
    """Emit groups of trajectories with actions, except those that were emitted before a crash."""
    whole = [kept for group in groups if (kept := [actions for actions in group if actions])]
    for group in whole[len(tree.groups) :]:
        ctx.emit(group)
