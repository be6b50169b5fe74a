"""Read a tree's actions, have them scored, keep them in the journal, and send finished groups to
the learner."""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from coppice.actors.environments.base import Action
from coppice.scheduler.config import UNJUDGED
from coppice.scheduler.growth.services import Services
from coppice.scheduler.growth.tree import Node, turns_of
from coppice.wire.messages import JudgedTurn, Turn


class Scoring(Services):
    """What is known of the actions of one tree. state_type: the type of the environment's states,
    once the tree is planted."""

    state_type: type = type(None)
    _state: tuple[Node | None, Any] = None, None
    _past: tuple[Node | None, list[tuple[str, str]], str] | None = None

    def action(self, node: Node) -> Action:
        """The parsed action of an action node. Each node is parsed once."""
        known = self.tree.actions_read.get(node.id)
        if known is None:
            read = self.environment
            known = (
                read.parse_forced(node.text)
                if node.forced
                else read.read(self.state(node), node.text)
            )
            self.tree.actions_read[node.id] = known
        return known

    def state(self, node: Node) -> Any:
        """The environment state in which ``node`` acts."""
        return self.after(self.tree.acted_in(node))

    def after(self, place: Node | None) -> Any:
        """The environment state after ``place``."""
        if place is not self._state[0]:  # siblings act in one state
            self._state = (
                place,
                msgspec.convert(None if place is None else place.state, self.state_type),
            )
        return self._state[1]

    def answer(self, node: Node) -> Node | None:
        """The environment's observation below an action."""
        return next(
            (child for child in self.tree.children(node) if child.kind == "observation"), None
        )

    async def judge(self, nodes: Sequence[Node]) -> None:
        """Have sibling actions judged, and mark them. If rewards are composed of the judge's
        columns, only valid actions are judged (methods.md 1.4)."""
        await self.score(
            [
                node
                for node in nodes
                if self.action(node).valid or self.environment.rewarded_by_judge
            ]
        )
        self.mark(nodes)

    async def score(self, nodes: Sequence[Node]) -> None:
        """Have actions judged, valid or not, and write the judge's columns to them. Does nothing in
        a run without a judge."""
        if not nodes or self.settings.judge == UNJUDGED:
            return
        turns = [self._judged(node, self.action(node)) for node in nodes]
        judgements = await self.judgements(self.settings.judge, turns)
        scores, invalid = self.shop.judged.note(judgements)
        self.shop.counts["judged_scores"] += scores
        self.shop.counts["invalid_judgements"] += invalid
        for node, judgement in zip(nodes, judgements, strict=True):
            node.scores.update(judgement.scores)
            node.invalid = judgement.invalid
            if judgement.explanation:
                node.notes[self.settings.judge] = judgement.explanation
        self.changed(nodes)

    def mark(self, nodes: Sequence[Node]) -> None:
        """Write the column "valid" to actions and count them. Marked actions are skipped, so
        repeating the call is safe."""
        new = [node for node in nodes if "valid" not in node.scores]
        for node in new:
            valid = self.action(node).valid
            node.scores["valid"] = float(valid)
            self.shop.counts["invalid_actions"] += not valid
        self.shop.counts["actions"] += len(new)
        self.changed(nodes)

    async def finish(self, trajectory: int = 0) -> bool:
        """Write the outcome of a finished trajectory to its last own action, if a judge gives the
        outcome.

        If the policy did not answer within its budget, the outcome is 0; the forced answer is only
        logged. Returns False if the judge could not give the outcome. Such a trajectory is not
        trained, because an unknown outcome is not 0.
        """
        actions = self.tree.actions(trajectory)
        own = [node for node in actions if not node.forced]
        if "outcome" in own[-1].invalid:
            return False
        if not self.environment.outcome_judge or "outcome" in own[-1].scores:
            return True
        columns = await self.log_outcome(actions[-1])
        extent = {} if self.environment.fresh else self._extent(own)
        own[-1].scores = dict.fromkeys(columns, 0.0) | own[-1].scores | extent
        self.changed([own[-1]])
        return "outcome" not in actions[-1].invalid

    async def log_outcome(self, node: Node) -> list[str]:
        """Write the outcome judge's columns, such as exact match and F1, to the last action.
        Returns their names."""
        judge = self.environment.outcome_judge
        (judgement,) = await self.judgements(judge, [self._concluded(node)])
        node.scores.update(judgement.scores)
        node.invalid = sorted({*node.invalid, *judgement.invalid})
        if judgement.explanation:
            node.notes[judge] = judgement.explanation
        self.shop.counts["invalid_outcomes"] += "outcome" in judgement.invalid
        self.changed([node])
        return list(judgement.scores)

    def emit(self, trajectories: Sequence[Sequence[Node]]) -> None:
        """Send one finished group to the learner now. trajectories: each is a list of scored
        actions."""
        turns = [
            Turn(node.id, index, node.step, _finite(node.scores) | _cut(node), self._anchor(node))
            for index, nodes in enumerate(trajectories)
            for node in nodes
        ]
        if turns:
            self.shop.emit(self.tree, turns)

    def changed(self, nodes: Sequence[Node]) -> None:
        """Mark nodes that are new or have new columns. The tree's next transaction writes them."""
        self.tree.changed.update((node.id, node) for node in nodes)

    def save(self, nodes: Sequence[Node]) -> None:
        """Write ``nodes`` and every other changed node of the tree in one transaction. Call it once
        per step, after sampling."""
        self.changed(nodes)
        self.shop.journal.save_nodes(self.tree)

    def _judged(self, node: Node, action: Action) -> JudgedTurn:
        state = self.state(node)
        turn = self.environment.judged(self.task, state, action, node.step, self.settings.budget)
        if self.environment.fresh:
            return turn
        place, answer = self.tree.parent(node), self.answer(node)
        if self._past is None or place is not self._past[0]:  # siblings have one past
            path = self.tree.path(node)
            self._past = place, turns_of(path), "".join([above.text for above in path[1:-1]])
        _, before, transcript = self._past
        turn = self.environment.recalled(turn, state, before)
        return msgspec.structs.replace(
            turn, transcript=transcript, observation=answer.text if answer is not None else None
        )

    def _concluded(self, node: Node) -> JudgedTurn:
        action, answer = self.action(node), self.answer(node)
        if not self.environment.fresh:
            return self._judged(node, action)
        after = None if answer is None else self.after(answer)
        return self.environment.concluded(
            self.task, self.state(node), action, after, node.step, self.settings.budget
        )

    def _extent(self, turns: Sequence[Node]) -> dict[str, float]:
        """A trajectory's columns: turns, valid searches, whether it answered, sampled tokens, all
        tokens of its response (methods.md 2.4)."""
        sampled = sum(
            len(turn.tokens) if turn.sampled is None else int(turn.sampled.sum()) for turn in turns
        )
        whole = self.tree.length(turns[-1]) - len(self.tree.nodes[0].tokens)
        searches = sum(self.action(turn).kind == "search" for turn in turns)
        return {
            "turns": float(len(turns)),
            "searches": float(searches),
            "answered": float(self.action(turns[-1]).kind == "answer"),
            "sampled_tokens": float(sampled),
            "response_tokens": float(whole),
        }

    def _anchor(self, node: Node) -> int | None:
        text = self.environment.anchor(self.state(node))
        return None if text is None else zlib.crc32(text.encode())


def _cut(node: Node) -> dict[str, float]:
    """The column "truncated": whether the token limit cut the action, or the context had no room
    for a further one."""
    return {"truncated": float(node.finish == "length" or "ended" in node.notes)}


def _finite(scores: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in scores.items() if math.isfinite(value)}
