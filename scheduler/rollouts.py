"""Continuations of a position by the policy, outside the tree, for Monte Carlo values.

All continuations of one position are requested together, so that their prefix is prefilled once. Continuations that reach the same
position again continue as one request.
"""

from collections import Counter
from typing import Any

import msgspec
import numpy as np

from scheduler.context import Context
from scheduler.together import together
from scheduler.tree import Node
from wire.messages import Sample


class Position(msgspec.Struct, frozen=True):
    """A point at which the policy acts. prefix: int32 token ids as bytes; step: the number of actions before it."""

    prefix: bytes
    state: Any
    step: int


def position_before(ctx: Context, action: Node) -> Position:
    """The position in which ``action`` was taken, with the prompt in non-thinking mode if each turn has its own prompt."""
    state = ctx.state(action)
    if ctx.environment.fresh:
        return _shown(ctx, state, action.step - 1)
    parent = ctx.tree.parent(action)
    assert parent is not None, "an action has a prompt above it"
    return Position(ctx.tree.prefix(parent).tobytes(), state, action.step - 1)


async def outcomes(ctx: Context, position: Position, n: int) -> list[float]:
    """The outcomes of ``n`` continuations of ``position``."""
    prefix = np.frombuffer(position.prefix, np.int32)
    async with ctx.shop.aside:
        samples, _ = await ctx.sample(
            prefix, n, ctx.environment.stop, beside=True, limit=ctx.environment.most(position.state)
        )
    reached = await together(advance(ctx, position, sample) for sample in samples)
    ended = [place for place in reached if isinstance(place, float)]
    going = Counter(place for place in reached if isinstance(place, Position))
    siblings = sorted(going.items(), key=lambda item: item[0].prefix)
    later = await together(outcomes(ctx, place, count) for place, count in siblings)
    return ended + [outcome for several in later for outcome in several]


async def advance(ctx: Context, position: Position, sample: Sample) -> Position | float:
    """The position after a sampled action, or the outcome if the episode is over: 0 if the budget is used up without an answer."""
    environment, step = ctx.environment, position.step + 1
    action = environment.read(position.state, ctx.shop.text.decode(sample.tokens))
    async with ctx.shop.aside:
        transition = await environment.step(position.state, action, ctx)
    ctx.shop.counts["continuation_steps"] += 1
    if transition.done and transition.outcome is not None:
        return transition.outcome
    if transition.done:
        return await ctx.outcome_of(position.state, action, step, transition.state)
    if environment.forced_prefix and step >= ctx.settings.budget:
        return 0.0
    if environment.fresh:
        return _shown(ctx, transition.state, step)
    seen = ctx.shop.text.encode(transition.observation)
    prefix = position.prefix + sample.tokens.astype(np.int32).tobytes() + seen.tobytes()
    return Position(prefix, transition.state, step)


def _shown(ctx: Context, state: Any, step: int) -> Position:
    head, tail = ctx.rendered(state, thinking=False)
    root = ctx.tree.nodes[0]
    shared = root.tokens if head.text == root.text and not head.pictures else ctx.encode(head)
    prefix = np.concatenate([shared, ctx.encode(tail)])
    return Position(prefix.tobytes(), state, step)
