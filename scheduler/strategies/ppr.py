"""PPR: one trajectory a question; each turn but the last is judged together with what its search found (methods.md 2.1, 2.2).

A budget of B turns is B - 1 rounds of search and one final generation, which is left to the outcome even if it is no answer. Turns
are judged while the next ones are generated.
"""

from scheduler.context import Context
from scheduler.together import Beside
from scheduler.tree import Node, Tree

EVALUATION = "ppr"
"""Held-out questions are answered in the same rounds; no answer is forced."""


async def grow(tree: Tree, ctx: Context) -> None:
    """Grow the trajectory to its end, then emit it."""
    if not tree.groups:  # a crash may have come between the group and the end of its tree
        ctx.emit([await episode(tree, ctx)])


async def episode(tree: Tree, ctx: Context) -> list[Node]:
    """The trajectory from where it stands; its actions in order."""
    async with Beside() as beside:
        node = await ctx.tip()
        for action in tree.actions():  # of a tree that was grown halfway
            if action is not node and not ctx.assessed(action):
                beside.start(ctx.assess(action))
        while node is not None:
            if node.kind != "action":
                (node,) = await ctx.generate(node, 1)
                node.chosen = True
                ctx.note_validity(node)
            if ctx.action(node).kind == "answer" or node.step >= ctx.settings.budget:
                break
            acted, node = node, await ctx.step(node)
            beside.start(ctx.assess(acted))
    await ctx.finish()
    return tree.actions()
