"""Continuations of a position by the policy, outside the tree, for Monte Carlo values. Those of one
position are requested together, and those that reach one position go on as one request."""

import logging
from collections import Counter
from typing import Any

import msgspec
import numpy as np

from coppice.actors.environments.base import Dropped, Spent, Transition
from coppice.common.concurrency import gather
from coppice.scheduler.growth import answers
from coppice.scheduler.growth.context import Context, refuse_endless
from coppice.scheduler.growth.failures import plugged
from coppice.scheduler.growth.tree import Node
from coppice.wire.messages import Sample

log = logging.getLogger(__name__)


class Position(msgspec.Struct, frozen=True):
    """A point at which the policy acts. prefix: int32 token ids as bytes; step: actions before it;
    ends, replies: the prefixes that end with them, where what follows may go on, and their texts.
    """

    prefix: bytes
    state: Any
    step: int
    ends: tuple[bytes, ...] = ()
    replies: tuple[str, ...] = ()


def position_before(ctx: Context, action: Node) -> Position:
    """The position in which ``action`` was taken; fresh prompts are without thinking."""
    state, step = ctx.state(action), action.step - 1
    if ctx.environment.fresh:
        return _shown(ctx, state, step)
    parent = ctx.tree.parent(action)
    assert parent is not None, "an action has a prompt above it"
    prompted = ctx.environment.begins_with_prompt
    before = [] if prompted else ctx.tree.actions(action.trajectory)[:step]
    ends = tuple(ctx.tree.prefix(node).tobytes() for node in before)
    replies = tuple(node.text for node in before)
    return Position(ctx.tree.prefix(parent).tobytes(), state, step, ends, replies)


async def outcomes(ctx: Context, position: Position, n: int) -> list[float]:
    """The outcomes of ``n`` continuations of ``position``, without those that have none."""
    prefix = np.frombuffer(position.prefix, np.int32)
    async with ctx.runtime.continuations:
        samples, *_ = await ctx.services.sample_actions(prefix, n, position.state, background=True)
    reached = await gather(advance(ctx, position, sample) for sample in samples)
    ended = [place for place in reached if isinstance(place, float)]
    going = Counter(place for place in reached if isinstance(place, Position))
    siblings = sorted(going.items(), key=lambda item: item[0].prefix)
    later = await gather(outcomes(ctx, place, count) for place, count in siblings)
    return ended + [outcome for several in later for outcome in several]


async def advance(ctx: Context, position: Position, sample: Sample) -> Position | float | None:
    """The position after a sampled action, or the outcome if the episode is over, as when the
    context has no room: 0 if the budget is used up without an answer, None if it is unknown."""
    environment, step = ctx.environment, position.step + 1
    action = environment.read(position.state, ctx.runtime.text.decode(sample.tokens))
    spent = Spent(len(position.prefix) // 4, 0, len(sample.tokens), sample.finish)
    replies = (*position.replies, action.text)
    tools = ctx.services.during(spent, replies)
    try:
        async with ctx.runtime.continuations:
            with plugged():
                transition = await environment.step(position.state, action, tools)
    except Dropped as fault:
        log.warning("a continuation of tree %d is dropped: %s", ctx.tree.id, fault)
        ctx.runtime.counts[fault.count] += 1
        return None
    ctx.runtime.counts["continuation_steps"] += 1
    if transition.done and transition.outcome is not None:
        return answers.given(environment.name, {"outcome": transition.outcome})["outcome"]
    state = transition.state
    if not transition.done:
        refuse_endless(environment.name, step)
        if environment.forced_prefix and step >= ctx.settings.budget:
            return 0.0
        place = _onward(ctx, position, sample, transition, replies)
        room = ctx.runtime.longest - len(place.prefix) // 4
        if not ctx.runtime.longest or ctx.settings.max_action_tokens <= room:
            return place
    if not environment.outcome_judge:
        return None if transition.done else float(environment.outgrown(state).outcome or 0.0)
    turn = environment.concluded(ctx.task, position.state, action, state, step, ctx.settings.budget)
    (judgement,) = await ctx.services.judgements(environment.outcome_judge, [turn])
    return judgement.scores.get("outcome")


def _onward(
    ctx: Context, position: Position, sample: Sample, transition: Transition, replies: tuple
) -> Position:
    """The position after a transition that does not end the episode."""
    state, step = transition.state, position.step + 1
    if ctx.environment.fresh:
        return _shown(ctx, state, step)
    end = position.prefix + sample.tokens.astype(np.int32).tobytes()
    if ctx.environment.begins_with_prompt:
        seen = ctx.runtime.text.encode(transition.observation)
        return Position(end + seen.tobytes(), state, step)
    ends = (*position.ends, end)
    if transition.after is None or transition.messages is None:
        return Position(_shown(ctx, state, step).prefix, state, step, ends, replies)
    end = ends[transition.after]
    reply = np.frombuffer(end, np.int32)
    text = ctx.runtime.text.after(reply, transition.messages, thinking=False)
    seen = ctx.runtime.text.encode(text)
    return Position(end + seen.tobytes(), state, step, ends, replies)


def _shown(ctx: Context, state: Any, step: int) -> Position:
    head, tail = ctx.services.rendered(state, thinking=False)
    prefix = np.concatenate([ctx.services.encode(head), ctx.services.encode(tail)])
    return Position(prefix.tobytes(), state, step)
