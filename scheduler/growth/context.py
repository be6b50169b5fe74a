"""What a strategy may do: every slow thing is one awaited call, and its result is in the tree when
the call returns.

Each step is one transaction of the journal. The transaction that writes the sampled action (or, in
SLATE, the group of judged candidates) also writes the observation and the scores that came since
the step before. A crash therefore never loses a sample that a trajectory continues; at worst one
call of the environment or the judge is repeated.
"""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import AsyncIterator
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from coppice.actors.environments.base import SPLIT, Dropped, Spent, Task, Transition
from coppice.common import support, vision
from coppice.scheduler.growth.ahead import Ahead, Drawn, How
from coppice.scheduler.growth.scoring import Scoring
from coppice.scheduler.growth.services import Shop, Taken
from coppice.scheduler.growth.text import Shown
from coppice.scheduler.growth.tree import DROPPED, Fork, Node, Tree, encode_node
from coppice.wire.messages import Sample

log = logging.getLogger("scheduler.context")

_NO_TOKENS = np.empty(0, np.int32)


class Context(Scoring):
    """One tree's view of the system: what it can ask for (``Services``), how it is scored
    (``Scoring``), and here how it grows.

    Call ``plant`` first; strategies do the rest.
    """

    _checked: tuple[str, np.ndarray] = "", _NO_TOKENS
    """The text that ``check`` saw last, with its tokens: what the policy reads next as a rule, so
    that it is tokenized once."""

    def __init__(self, shop: Shop, task: Task, tree: Tree, rng: random.Random):
        super().__init__(shop, task, tree, rng)
        self.seed = rng.getrandbits(62)
        self.ahead = Ahead()

    async def plant(self) -> None:
        """Add the root unless the tree has one: the first state with its prompt, or with the part
        that all turns' prompts share."""
        self.ahead.forget()
        state = await asyncio.to_thread(self.environment.initial, self.task)
        self.state_type = type(state)
        if not self.tree.nodes:
            head, _ = self.rendered(state)
            root = self.tree.add(
                None, "prompt", self.encode(head), head.text, state=msgspec.to_builtins(state)
            )
            self.changed([root])

    async def tip(self, trajectory: int = 0) -> Node:
        """Where the trajectory stands: its last chosen node, or the prompt of its first turn."""
        node = self.tree.tip(trajectory)
        if node.parent >= 0 or (self.environment.begins_with_prompt and not self.environment.fresh):
            return node
        return self._show(await self.environment.open(self.after(node), self), trajectory, 0)

    async def generate(self, node: Node, n: int, trajectory: int | None = None) -> list[Node]:
        """Sample ``n`` actions from the prefix that ends in ``node``, and add them as its children.
        What else waits in the same episode is sampled at the same time, for a later call of this
        method."""
        state = None if node.state is None else self.after(node)
        trajectory = node.trajectory if trajectory is None else trajectory
        samples, cached, opening = await self._drawn(self.tree.prefix(node), n, state, trajectory)
        actions = [
            self._sampled(node, sample, opening, trajectory=trajectory) for sample in samples
        ]
        actions[0].cached = cached
        return actions

    async def branch(self, fork: Fork, trajectory: int) -> Node:
        """Sample another action where ``fork`` says, and add it as the first action of a new
        trajectory. The kept tokens have the log-probabilities with which they were sampled. Fewer
        are kept if the engine would otherwise not see the beginning of a stop string, and no fewer
        than were not sampled (``Environment.beginning``).
        """
        action, kept = fork.action, fork.kept
        place, old = self.tree.parent(action), [action.tokens, action.logprobs, action.versions]
        assert place is not None, "an action has a prompt above it"
        state = None if place.state is None else self.after(place)
        stop = self.environment.stop if state is None else self.environment.stops(state)
        openings = tuple(text[:end] for text in stop for end in range(1, len(text)))
        while kept and self.shop.text.decode(action.tokens[:kept]).endswith(openings):
            kept -= 1
        opening = 0 if action.sampled is None else int((~action.sampled).sum())
        kept = max(kept, opening)
        prefix = np.concatenate([self.tree.prefix(place), action.tokens[:kept]])
        limit = 0 if state is None else self.environment.most(state)
        (sample,), cached = await self.sample(prefix, 1, stop, kept=kept, limit=limit)
        new = [sample.tokens, sample.logprobs, sample.versions]
        tokens, logprobs, versions = (
            np.concatenate([a[:kept], b]) for a, b in zip(old, new, strict=True)
        )
        left = support.spliced(
            action.support, len(action.tokens), kept, sample.support or b"", len(sample.tokens)
        )
        whole = msgspec.structs.replace(
            sample, tokens=tokens, logprobs=logprobs, versions=versions, support=left
        )
        node = self._sampled(place, whole, opening, trajectory=trajectory, cached=cached, kept=kept)
        if node.entropies is not None and action.entropies is not None:
            node.entropies = np.concatenate([action.entropies[:kept], node.entropies])
        return node

    async def step(self, node: Node) -> Node | None:
        """Take a chosen action in the environment. Returns the node at which the policy acts next,
        None when the episode is over.

        An episode is also over if its next prompt has no room in the context. It counts as
        ``Environment.outgrown`` says, or as its judge does.
        """
        answer, fresh = self.answer(node), self.environment.fresh
        over = node.forced or "outcome" in node.scores or DROPPED in node.notes
        if over or (answer is not None and (fresh or not answer.chosen)):
            # the last: an observation without a next prompt ended the episode before a crash
            return None
        try:
            transition = await self.environment.step(
                self.state(node), self.action(node), self._taking(node)
            )
        except BaseException as error:
            self.ahead.forget(node.trajectory)  # nobody will ask for it
            if isinstance(error, Dropped):
                return self._drop(node, error)
            raise
        self.shop.counts["environment_steps"] += 1
        columns = {} if transition.reward is None else {"step_reward": transition.reward}
        if transition.done:
            columns |= transition.measures | (
                {} if transition.outcome is None else {"outcome": transition.outcome}
            )
            self.shop.crashes.note(transition.fault)
        if transition.fault:
            node.notes["crashed"] = transition.fault
            self.shop.counts["crashed_episodes"] += 1
        if columns:
            node.scores |= columns
            self.changed([node])
        # for readers of the tree: the policy reads the next prompt instead
        if transition.observation and fresh:
            self._observe(node, transition)
        if transition.done:
            self.ahead.forget(node.trajectory)
            return None
        place = self._next(node, transition)
        if self._fits(place):
            return place
        self._outgrown(node, place, transition.state)
        return None

    async def onward(self, node: Node) -> Node | None:
        """The node at which the policy acts after ``node``, or None when the trajectory is over.

        A used-up budget forces an answer. An environment without forced answers ends its episodes
        itself.
        """
        place = await self.step(node) if node.kind == "action" else node
        if (
            place is not None
            and self.environment.forced_prefix
            and place.step >= self.settings.budget
        ):
            await self.force_answer(place)
            return None
        return place

    async def force_answer(self, node: Node) -> Node:
        """Append the forced opening of an answer and let the policy finish the answer. The answer
        is logged, never trained."""
        prefix, tokens = self.environment.forced_prefix, self._forced
        (sample,), _ = await self.sample(
            np.concatenate([self.tree.prefix(node), tokens]), 1, ["</answer>"]
        )
        # Only now: after a fault of the call, the next attempt must not find an opening without its
        # answer.
        opening = self.tree.add(node, "observation", tokens, prefix, chosen=True, state=node.state)
        answer = self._sampled(opening, sample, forced=True, chosen=True)
        self.save([opening, answer])
        return answer

    def aside(self, purpose: str) -> "Context":
        """A context of the same tree with its own randomness, so that concurrent work draws the
        same in any order."""
        context = Context(self.shop, self.task, self.tree, random.Random(f"{self.seed}/{purpose}"))
        context.state_type, context.attempt, context.top = self.state_type, self.attempt, self.top
        return context

    # ------------------------------------------------------------------------------------------
    # what the policy reads

    def rendered(self, state: Any, thinking: bool | None = None) -> tuple[Shown, Shown]:
        """The prompt for acting in ``state``, as the part that all turns share and the rest (""
        where turns are appended)."""
        messages = self.environment.prompt(self.task, state)
        tools = self.environment.tools(state)
        text = self.shop.text.prompt(
            messages, self.settings.thinking if thinking is None else thinking, tools
        )
        if not self.environment.begins_with_prompt:
            return Shown(""), Shown(text)
        head, _, tail = text.partition(SPLIT)
        parts = list(vision.shown(messages))
        split = next(
            (i for i, part in enumerate(parts) if isinstance(part, str) and SPLIT in part),
            len(parts),
        )
        first, rest = (
            [part for part in some if isinstance(part, bytes)]
            for some in (parts[:split], parts[split:])
        )
        return Shown(head, tuple(first)), Shown(tail, tuple(rest))

    def encode(self, part: Shown) -> np.ndarray:
        """int32 [tokens]: a part of a prompt, whose pictures enter the journal."""
        text, tokens = self._checked
        if part.text == text and not part.pictures:
            return tokens
        return self.shop.text.encode(
            part.text, [(self.shop.journal.picture(png), png) for png in part.pictures]
        )

    def check(self, transition: Transition) -> None:
        """Render, tokenize and encode for the journal what follows ``transition``, as ``step`` will
        (``actors.environments.base.Tools``)."""
        if transition.messages is None or transition.after is None:
            text = "".join(part.text for part in self.rendered(transition.state))
        else:
            text = self.shop.text.after(_NO_TOKENS, transition.messages)
        encode_node(
            Node(0, -1, "prompt", _NO_TOKENS, text, 0, state=msgspec.to_builtins(transition.state))
        )
        self._checked = text, self.shop.text.encode(text)

    # ------------------------------------------------------------------------------------------
    # inner workings

    @cached_property
    def _forced(self) -> np.ndarray:
        """int32 [tokens]: the forced opening of an answer; empty if the environment forces none."""
        return self.shop.text.encode(self.environment.forced_prefix)

    async def _drawn(self, prefix: np.ndarray, n: int, state: Any, trajectory: int) -> Drawn:
        """Sample actions, or take what was begun ahead; meanwhile begin what else waits
        (``Environment.beside``)."""
        others = None if state is None else self.environment.beside(state)
        if others is None:
            return await self.acted(prefix, n, state)
        begun = self.ahead.take(trajectory, self._how(prefix, n, state))
        own = begun or asyncio.ensure_future(self.acted(prefix, n, state))
        watching = asyncio.create_task(self._begin(others, n, trajectory))
        try:
            return await own
        except BaseException:
            self.ahead.forget(trajectory)
            raise
        finally:
            own.cancel()
            watching.cancel()

    async def _begin(
        self, others: AsyncIterator[tuple[str, Transition]], n: int, trajectory: int
    ) -> None:
        """Begin to sample what waits beside the action that is sampled now, each as soon as it
        comes. What cannot be shown fails in its own turn."""
        async for call, transition in others:
            with contextlib.suppress(ValueError):
                prefix, state = self._prefix(transition, trajectory), transition.state
                if self._room(len(prefix)):
                    self.ahead.begin(
                        trajectory, call, self._how(prefix, n, state), self.acted(prefix, n, state)
                    )

    def _prefix(self, transition: Transition, trajectory: int) -> np.ndarray:
        """int32 [tokens]: what the policy reads after a transition of a trajectory, as ``_next``
        adds it to the tree."""
        if transition.after is None:
            _, tail = self.rendered(transition.state)
            return np.concatenate([self.tree.nodes[0].tokens, self.encode(tail)])
        node = self.tree.actions(trajectory)[transition.after]
        return np.concatenate(
            [self.tree.prefix(node), self.shop.text.encode(self._answered(node, transition))]
        )

    def _how(self, prefix: np.ndarray, n: int, state: Any) -> How:
        asked = self.environment
        return prefix.tobytes(), n, asked.most(state), asked.beginning(state), asked.stops(state)

    def _taking(self, node: Node) -> Taken:
        above = self.tree.parent(node)
        prompt = 0 if above is None else self.tree.length(above)
        replies = (
            ()
            if self.environment.begins_with_prompt
            else (n.text for n in self.tree.actions(node.trajectory))
        )
        return Taken(
            self, Spent(prompt, node.cached, len(node.tokens), node.finish), tuple(replies)
        )

    def _drop(self, node: Node, fault: Dropped) -> None:
        """End an episode that cannot go on, without an outcome. It is not trained."""
        node.notes[DROPPED], node.invalid = str(fault), sorted({*node.invalid, "outcome"})
        log.warning("an episode of tree %d is dropped: %s", self.tree.id, fault)
        self.shop.counts[fault.count] += 1
        self.shop.faults.failed(
            fault.what, fault, f"tree {self.tree.id}, task {self.tree.task}: the episode is dropped"
        )
        self.changed([node])

    def _next(self, node: Node, transition: Transition) -> Node:
        """Add what the policy reads after ``node``: a prompt below the root, or what follows an
        action of the trajectory."""
        if self.environment.fresh or (transition.messages is not None and transition.after is None):
            return self._show(transition.state, node.trajectory, node.step)
        if transition.after is not None:
            node = msgspec.structs.replace(
                self.tree.actions(node.trajectory)[transition.after], step=node.step
            )
        return self._observe(node, transition)

    def _observe(self, node: Node, transition: Transition) -> Node:
        """Add the environment's answer below an action. It continues the trajectory only where
        turns are appended."""
        text, state = self._answered(node, transition), msgspec.to_builtins(transition.state)
        tokens, appended = self.encode(Shown(text)), not self.environment.fresh
        observation = self.tree.add(node, "observation", tokens, text, state=state, chosen=appended)
        self.changed([observation])
        return observation

    def _answered(self, node: Node, transition: Transition) -> str:
        """The text that follows an action."""
        return (
            self.shop.text.after(node.tokens, transition.messages)
            if transition.messages
            else transition.observation
        )

    def _show(self, state: Any, trajectory: int, step: int) -> Node:
        """Add a fresh prompt that shows ``state`` as a child of the root, which holds what all
        turns share."""
        _, tail = self.rendered(state)
        place = {
            "chosen": True,
            "trajectory": trajectory,
            "step": step,
            "state": msgspec.to_builtins(state),
        }
        prompt = self.tree.add(self.tree.nodes[0], "prompt", self.encode(tail), tail.text, **place)
        self.changed([prompt])
        return prompt

    def _fits(self, place: Node) -> bool:
        """Whether the context has room for an action after ``place``, also if the action's opening
        is forced."""
        return self._room(self.tree.length(place))

    def _room(self, length: int) -> bool:
        return (
            not 0 < self.shop.longest < length + len(self._forced) + self.settings.max_action_tokens
        )

    def _outgrown(self, action: Node, place: Node, state: Any) -> None:
        """End the episode after ``action``, since nothing can follow ``place``."""
        place.chosen = False
        action.notes["ended"] = (
            f"the next prompt and an action exceed the context of {self.shop.longest} tokens"
        )
        if not self.environment.outcome_judge:
            end = self.environment.outgrown(state)
            action.scores |= {
                "outcome": 0.0 if end.outcome is None else end.outcome,
                **end.measures,
            }
        self.shop.counts["outgrown_trajectories"] += 1
        self.changed([action, place])

    def _sampled(self, parent: Node, sample: Sample, opening: int = 0, **settings: Any) -> Node:
        """Add a sampled action to the tree. opening: how many tokens at its beginning were not
        sampled."""
        return self.tree.add(
            parent,
            "action",
            sample.tokens,
            self.shop.text.decode(sample.tokens),
            logprobs=sample.logprobs,
            versions=sample.versions,
            sampled=np.arange(len(sample.tokens)) >= opening,
            support=sample.support or b"",
            finish=sample.finish,
            entropies=None if sample.top is None else _entropies(sample.top),
            **settings,
        )


def _entropies(top: list[dict[int, float]]) -> np.ndarray:
    """-sum p log p over the most probable tokens at each token, float32 [tokens]."""
    return np.array([-math.fsum(math.exp(x) * x for x in one.values()) for one in top], np.float32)
