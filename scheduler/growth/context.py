"""What a strategy may do: every slow thing is one awaited call, and its result is in the tree when
the call returns. The transaction that writes the sampled action also writes the observation and
scores that came since the step before, so a crash never loses a sample that a trajectory continues.
"""

import asyncio
import contextlib
import logging
import math
import os
import random
import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from coppice.actors.environments.base import Action, Dropped, Spent, Task, Transition
from coppice.common import support
from coppice.scheduler.growth import answers, routing
from coppice.scheduler.growth.failures import plugged
from coppice.scheduler.growth.services import Runtime, Services
from coppice.scheduler.growth.text import Shown
from coppice.scheduler.growth.tree import DROPPED, Fork, Node, Tree
from coppice.wire.faults import DataFault
from coppice.wire.messages import Sample, Turn

MOST_TURNS = 2000
"""No episode is longer: an environment that ends none would hold its run up."""

log = logging.getLogger("scheduler.context")


def refuse_endless(environment: str, turns: int) -> None:
    """Raise DataFault for an episode that goes on after ``MOST_TURNS``."""
    if turns >= MOST_TURNS:
        raise DataFault(
            f"an episode of {environment} has {turns} turns and goes on: its rules must end it"
        )


class Context:
    """One tree's growth: its services, actions and states, and the steps that a strategy takes.
    Call ``plant`` first, which sets ``state_type``, the type of the environment's states."""

    state_type: type = type(None)
    _state: tuple[Node | None, Any] = None, None

    def __init__(self, runtime: Runtime, task: Task, tree: Tree, rng: random.Random):
        self.runtime, self.task, self.tree, self.rng = runtime, task, tree, rng
        self.settings, self.environment = runtime.settings, runtime.environment
        self.services = Services(runtime, task, tree, rng)
        self.seed = rng.getrandbits(62)

    async def plant(self) -> None:
        """Add the root unless there is one: the first prompt, or what all prompts share."""
        with plugged():
            state = await asyncio.to_thread(self.environment.initial, self.task)
        self.state_type = type(state)
        if not self.tree.nodes:
            head, _ = self.services.rendered(state)
            tokens, plain = self.services.encode(head), msgspec.to_builtins(state)
            self.changed([self.tree.add(None, "prompt", tokens, head.text, state=plain)])

    async def tip(self, trajectory: int = 0) -> Node:
        """Where the trajectory stands: its last chosen node, or the prompt of its first turn."""
        node = self.tree.tip(trajectory)
        if node.parent >= 0 or (self.environment.begins_with_prompt and not self.environment.fresh):
            return node
        with plugged():
            state = await self.environment.open(self.after(node), self.services)
        return self._show(state, trajectory, 0)

    async def generate(self, node: Node, n: int, trajectory: int | None = None) -> list[Node]:
        """Sample ``n`` actions from the prefix that ends in ``node``, its new children."""
        state = None if node.state is None else self.after(node)
        trajectory = node.trajectory if trajectory is None else trajectory
        prefix, experts = self.tree.prefix(node), self._experts_from(node)
        samples, cached, opening = await self.services.sample_actions(
            prefix, n, state, experts_from=experts
        )
        actions = [self._sampled(node, s, opening, trajectory=trajectory) for s in samples]
        actions[0].cached = cached
        return actions

    async def branch(self, fork: Fork, trajectory: int) -> Node:
        """Sample another action where ``fork`` says, as the first of a new trajectory. Kept tokens
        keep their log-probabilities. Fewer are kept where a stop string would begin among them, and
        never fewer than were not sampled (``Environment.beginning``)."""
        action, kept = fork.action, fork.kept
        place = self.tree.parent(action)
        assert place is not None, "an action has a prompt above it"
        state = None if place.state is None else self.after(place)
        stop = self.environment.stop if state is None else self.environment.stops(state)
        while kept and _ends_in_part(self.runtime.text.decode(action.tokens[:kept]), stop):
            kept -= 1
        opening = 0 if action.sampled is None else int((~action.sampled).sum())
        kept = max(kept, opening)
        prefix = np.concatenate([self.tree.prefix(place), action.tokens[:kept]])
        limit = 0 if state is None else self.environment.most(state)
        (sample,), cached = await self.services.sample(
            prefix, 1, stop, kept=kept, limit=limit, experts_from=self._experts_from(place)
        )
        after = sample.support or b"", len(sample.tokens)
        left = support.spliced(action.support, len(action.tokens), kept, *after)
        spliced = {
            name: np.concatenate([getattr(action, name)[:kept], getattr(sample, name)])
            for name in ("tokens", "logprobs", "versions")
        }
        whole = msgspec.structs.replace(sample, **spliced, support=left)
        node = self._sampled(place, whole, opening, trajectory=trajectory, cached=cached, kept=kept)
        if node.entropies is not None and action.entropies is not None:
            node.entropies = np.concatenate([action.entropies[:kept], node.entropies])
        return node

    async def step(self, node: Node) -> Node | None:
        """Take a chosen action. Returns the node at which the policy acts next, None when the
        episode is over, as it is when its next prompt has no room in the context; it then counts as
        ``Environment.outgrown`` says, or as its judge does."""
        answer, fresh = self.answer(node), self.environment.fresh
        over = node.forced or "outcome" in node.scores or DROPPED in node.notes
        if over or (answer is not None and (fresh or not answer.chosen)):
            # the last: an observation without a next prompt ended the episode before a crash
            return None
        try:
            state, action, tools = self.state(node), self.action(node), self._tools(node)
            with plugged():
                transition = await self.environment.step(state, action, tools)
        except Dropped as fault:
            return self._drop(node, fault)
        self.runtime.counts["environment_steps"] += 1
        columns = {} if transition.reward is None else {"step_reward": transition.reward}
        if transition.done:
            columns |= transition.measures
            columns |= {} if transition.outcome is None else {"outcome": transition.outcome}
        if transition.fault:
            node.notes["crashed"] = transition.fault
            self.runtime.counts["crashed_episodes"] += 1
            reason = transition.fault.partition("\n")[0]
            whose = f"tree {self.tree.id}, task {self.tree.task}"
            self.runtime.faults.failed("an episode", reason, whose)
        if columns:
            node.scores |= answers.given(self.environment.name, columns)
            self.changed([node])
        # for readers of the tree: the policy reads the next prompt instead
        if transition.observation and fresh:
            self._observe(node, transition)
        if transition.done:
            return None
        refuse_endless(self.environment.name, node.step)
        place = self._next(node, transition)
        room = self.runtime.longest - self.tree.length(place) - len(self._forced)
        if not self.runtime.longest or self.settings.max_action_tokens <= room:
            return place
        self._outgrown(node, place, transition.state)
        return None

    async def try_out(self, nodes: Sequence[Node]) -> None:
        """Write "step_reward" to actions, of which none is taken; not where that is Dropped."""
        for node in nodes:
            state, action, tools = self.state(node), self.action(node), self._tools(node)
            with contextlib.suppress(Dropped):
                with plugged():
                    tried = await self.environment.step(state, action, tools)
                columns = {} if tried.reward is None else {"step_reward": tried.reward}
                node.scores |= answers.given(self.environment.name, columns)

    async def onward(self, node: Node) -> Node | None:
        """The node at which the policy acts after ``node``, None when the trajectory is over. A
        used-up budget forces an answer, unless the environment ends its episodes itself."""
        place = await self.step(node) if node.kind == "action" else node
        forced = place is not None and place.step >= self.settings.budget
        if place is None or not (forced and self.environment.forced_prefix):
            return place
        await self.force_answer(place)
        return None

    async def force_answer(self, node: Node) -> None:
        """Append the forced opening, and sample the answer, which is never trained."""
        prefix, tokens = self.environment.forced_prefix, self._forced
        whole = np.concatenate([self.tree.prefix(node), tokens])
        (sample,), _ = await self.services.sample(whole, 1, ["</answer>"])
        # only now: after a fault of the call, an opening must not stay without its answer
        opening = self.tree.add(node, "observation", tokens, prefix, chosen=True, state=node.state)
        self.save([opening, self._sampled(opening, sample, forced=True, chosen=True)])

    def derive(self, purpose: str) -> "Context":
        """A context of the same tree with random numbers of its own, for concurrent work."""
        rng = random.Random(f"{self.seed}/{purpose}")
        context, services = Context(self.runtime, self.task, self.tree, rng), self.services
        context.state_type = self.state_type
        context.services.attempt, context.services.top = services.attempt, services.top
        return context

    def action(self, node: Node) -> Action:
        """The parsed action of an action node. Each node is parsed once."""
        parsed, e = self.tree.actions_read, self.environment
        if node.id not in parsed:
            read = e.parse_forced(node.text) if node.forced else e.read(self.state(node), node.text)
            parsed[node.id] = read
        return parsed[node.id]

    def state(self, node: Node) -> Any:
        """The environment state in which ``node`` acts."""
        return self.after(self.tree.acted_in(node))

    def after(self, place: Node | None) -> Any:
        """The environment state after ``place``."""
        if place is not self._state[0]:  # siblings act in one state
            value = None if place is None else place.state
            self._state = place, msgspec.convert(value, self.state_type)
        return self._state[1]

    def answer(self, node: Node) -> Node | None:
        """The environment's observation below an action."""
        children = self.tree.children(node)
        return next((child for child in children if child.kind == "observation"), None)

    def changed(self, nodes: Sequence[Node]) -> None:
        """Mark nodes that are new or have new columns. The tree's next transaction writes them."""
        self.tree.changed.update((node.id, node) for node in nodes)

    def save(self, nodes: Sequence[Node]) -> None:
        """Write all changed nodes in one transaction. Call it once per step, after sampling."""
        self.changed(nodes)
        self.runtime.journal.save_nodes(self.tree)

    def emit(self, trajectories: Sequence[Sequence[Node]]) -> None:
        """Send one finished group of scored actions, by trajectory, to the learner. The column
        "truncated": the token limit cut the action, or the context had no room for another."""
        turns = []
        for index, nodes in enumerate(trajectories):
            for node in nodes:
                cut = float(node.finish == "length" or "ended" in node.notes)
                scores = node.scores | {"truncated": cut}
                text = self.environment.anchor(self.state(node))
                anchor = None if text is None else zlib.crc32(text.encode())
                turns.append(Turn(node.id, index, node.step, scores, anchor))
        if turns:
            self.runtime.emit(self.tree, turns)

    @cached_property
    def _forced(self) -> np.ndarray:
        """int32 [tokens]: the forced opening of an answer; empty if the environment forces none."""
        return self.runtime.text.encode(self.environment.forced_prefix)

    def _tools(self, node: Node) -> Services:
        above, replies = self.tree.parent(node), ()
        prompt = 0 if above is None else self.tree.length(above)
        if not self.environment.begins_with_prompt:
            replies = tuple(n.text for n in self.tree.actions(node.trajectory))
        spent = Spent(prompt, node.cached, len(node.tokens), node.finish)
        return self.services.during(spent, replies)

    def _drop(self, node: Node, fault: Dropped) -> None:
        """End an episode that cannot go on, without an outcome. It is not trained."""
        node.notes[DROPPED], node.invalid = str(fault), sorted({*node.invalid, "outcome"})
        log.warning("an episode of tree %d is dropped: %s", self.tree.id, fault)
        self.runtime.counts[fault.count] += 1
        whose = f"tree {self.tree.id}, task {self.tree.task}: the episode is dropped"
        self.runtime.faults.failed(fault.what, fault, whose)
        self.changed([node])

    def _next(self, node: Node, transition: Transition) -> Node:
        """Add what the policy reads next: a prompt below the root, or what follows an action."""
        if self.environment.fresh or (transition.messages is not None and transition.after is None):
            return self._show(transition.state, node.trajectory, node.step)
        if transition.after is not None:
            before = self.tree.actions(node.trajectory)[transition.after]
            node = msgspec.structs.replace(before, step=node.step, trajectory=node.trajectory)
        return self._observe(node, transition)

    def _observe(self, node: Node, transition: Transition) -> Node:
        """Add the environment's answer. The trajectory goes on there if turns are appended."""
        text, state = transition.observation, msgspec.to_builtins(transition.state)
        if transition.messages:
            text = self.runtime.text.after(node.tokens, transition.messages, self.settings.thinking)
        tokens, appended = self.services.encode(Shown(text)), not self.environment.fresh
        observation = self.tree.add(node, "observation", tokens, text, state=state, chosen=appended)
        self.changed([observation])
        return observation

    def _show(self, state: Any, trajectory: int, step: int) -> Node:
        """Add a fresh prompt below the root, which holds what all turns share."""
        head, tail = self.services.rendered(state)
        tokens, plain = self.services.encode(tail), msgspec.to_builtins(state)
        where: dict[str, Any] = {"trajectory": trajectory, "step": step, "chosen": True}
        root = self.tree.nodes[0]
        if head.text != root.text:
            at = len(os.path.commonprefix([head.text, root.text]))  # noqa: RUF071
            new, old = (text[max(0, at - 30) : at + 30] for text in (head.text, root.text))
            raise DataFault(
                f"the prompt of {self.environment.name} has {new!r} before SPLIT, and had {old!r}"
                " before: put SPLIT before the first text that changes"
            )
        prompt = self.tree.add(root, "prompt", tokens, tail.text, state=plain, **where)
        self.changed([prompt])
        return prompt

    def _outgrown(self, action: Node, place: Node, state: Any) -> None:
        place.chosen = False
        context = f"the context of {self.runtime.longest} tokens"
        action.notes["ended"] = f"the next prompt and an action exceed {context}"
        if not self.environment.outcome_judge:
            end = self.environment.outgrown(state)
            columns = {"outcome": 0.0 if end.outcome is None else end.outcome, **end.measures}
            action.scores |= answers.given(self.environment.name, columns)
        self.runtime.counts["outgrown_trajectories"] += 1
        self.changed([action, place])

    def _experts_from(self, place: Node) -> int:
        """The first position up to ``place`` of which a sample must tell the experts, or -1."""
        wanted = self.runtime.routed and self.tree.split == "train"
        return routing.first_unknown(self.tree.path(place)) if wanted else -1

    def _sampled(self, parent: Node, sample: Sample, opening: int = 0, **settings: Any) -> Node:
        """Add a sampled action. opening: how many tokens at its beginning were not sampled."""
        if sample.experts is not None:
            told = routing.fill(self.tree.path(parent), sample.experts, len(sample.tokens))
            settings["experts"], filled, conflicts = told
            self.runtime.counts["routing_conflicts"] += conflicts
            self.changed(filled)
        return self.tree.add(
            parent,
            "action",
            sample.tokens,
            self.runtime.text.decode(sample.tokens),
            logprobs=sample.logprobs,
            versions=sample.versions,
            sampled=np.arange(len(sample.tokens)) >= opening,
            support=sample.support or b"",
            finish=sample.finish,
            entropies=None if sample.top is None else _entropies(sample.top),
            **settings,
        )


def _ends_in_part(text: str, stop: Sequence[str]) -> bool:
    """Whether a stop string would begin at the end of a text."""
    parts = ((one, size) for one in stop for size in range(1, min(len(one), len(text) + 1)))
    return any(text.endswith(one[:size]) for one, size in parts)


def _entropies(top: list[dict[int, float]]) -> np.ndarray:
    """-sum p log p over the most probable tokens at each token, float32 [tokens]."""
    return np.array([-math.fsum(math.exp(x) * x for x in one.values()) for one in top], np.float32)
