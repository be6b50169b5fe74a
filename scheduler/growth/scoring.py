"""Have a tree's actions scored: by the run's judge, and at the end by the judge of outcomes."""

from collections.abc import Sequence

import msgspec
import numpy as np

from coppice.common.terminal import visible
from coppice.scheduler.config import UNJUDGED
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.tree import DROPPED, Node, turns_of
from coppice.wire.messages import JudgedTurn


async def score(ctx: Context, nodes: Sequence[Node]) -> None:
    """Have actions judged, and write the judge's columns to them, if the run has a judge."""
    if not nodes or ctx.settings.judge == UNJUDGED:
        return
    turns = [judged_turn(ctx, node) for node in nodes]
    judgements = await ctx.services.judgements(ctx.settings.judge, turns)
    scores, invalid = ctx.runtime.judged.note(judgements)
    ctx.runtime.counts["judged_scores"] += scores
    ctx.runtime.counts["invalid_judgements"] += invalid
    for node, judgement in zip(nodes, judgements, strict=True):
        node.scores.update(judgement.scores)
        node.invalid = judgement.invalid
        if judgement.explanation:
            node.notes[ctx.settings.judge] = visible(judgement.explanation)
    ctx.changed(nodes)


def mark(ctx: Context, nodes: Sequence[Node]) -> None:
    """Write the column "valid" to actions that lack it, and count them."""
    new = [node for node in nodes if "valid" not in node.scores]
    for node in new:
        valid = ctx.action(node).valid
        node.scores["valid"] = float(valid)
        ctx.runtime.counts["invalid_actions"] += not valid
    ctx.runtime.counts["actions"] += len(new)
    ctx.changed(nodes)


async def finish(ctx: Context, trajectory: int = 0) -> bool:
    """Write the outcome of a finished trajectory to its last own action, if a judge gives it; 0
    without an answer within the budget, as a forced one is only logged. Returns False if the judge
    could not: an unknown outcome is not 0, and such a trajectory is not trained."""
    actions = ctx.tree.actions(trajectory)
    own = [node for node in actions if not node.forced]
    if DROPPED in own[-1].notes or "outcome" in own[-1].invalid:
        return False
    if not ctx.environment.outcome_judge or "outcome" in own[-1].scores:
        return True
    columns = await log_outcome(ctx, actions[-1])
    extent = {} if ctx.environment.fresh else _extent(ctx, own)
    own[-1].scores = dict.fromkeys(columns, 0.0) | own[-1].scores | extent
    ctx.changed([own[-1]])
    return "outcome" not in actions[-1].invalid


async def log_outcome(ctx: Context, node: Node) -> list[str]:
    """Write the outcome judge's columns to the last action. Returns their names."""
    name = ctx.environment.outcome_judge
    (judgement,) = await ctx.services.judgements(name, [_concluded(ctx, node)])
    node.scores.update(judgement.scores)
    node.invalid = sorted({*node.invalid, *judgement.invalid})
    if judgement.explanation:
        node.notes[name] = visible(judgement.explanation)
    ctx.runtime.counts["invalid_outcomes"] += "outcome" in judgement.invalid
    ctx.changed([node])
    return list(judgement.scores)


def judged_turn(ctx: Context, node: Node) -> JudgedTurn:
    """What a judge sees of an action: the environment's answer, too, if it is in the tree."""
    state, action = ctx.state(node), ctx.action(node)
    turn = ctx.environment.judged(ctx.task, state, action, node.step, ctx.settings.budget)
    if ctx.environment.fresh:
        return turn
    path, answer = ctx.tree.path(node), ctx.answer(node)
    transcript = "".join(above.text for above in path[1:-1])
    turn = ctx.environment.recalled(turn, state, turns_of(path))
    observation = answer.text if answer is not None else None
    return msgspec.structs.replace(turn, transcript=transcript, observation=observation)


def _concluded(ctx: Context, node: Node) -> JudgedTurn:
    if not ctx.environment.fresh:
        return judged_turn(ctx, node)
    answer, state, action = ctx.answer(node), ctx.state(node), ctx.action(node)
    after = None if answer is None else ctx.after(answer)
    return ctx.environment.concluded(ctx.task, state, action, after, node.step, ctx.settings.budget)


def _extent(ctx: Context, turns: Sequence[Node]) -> dict[str, float]:
    """A trajectory's columns of length (methods.md 2.4)."""
    marks = [np.ones(len(turn.tokens)) if turn.sampled is None else turn.sampled for turn in turns]
    whole = ctx.tree.length(turns[-1]) - len(ctx.tree.nodes[0].tokens)
    return {
        "turns": float(len(turns)),
        "searches": float(sum(ctx.action(turn).kind == "search" for turn in turns)),
        "answered": float(ctx.action(turns[-1]).kind == "answer"),
        "sampled_tokens": float(sum(mark.sum() for mark in marks)),
        "response_tokens": float(whole),
    }
