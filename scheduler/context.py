"""What a strategy may do: every slow thing is one awaited call, and its result is in the tree when the call returns.

Each step is one transaction of the journal. The transaction that writes the sampled action (or, in SLATE, the group of judged
candidates) also writes the observation and the scores that came since the step before. A crash therefore never loses a sample that a
trajectory continues; at worst one call of the environment or the judge is repeated.
"""

import asyncio
import math
import random
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from actors.environments.base import SPLIT, Diverged, Spent, Task, Transition
from scheduler.scoring import Scoring
from scheduler.services import Shop, Taken
from scheduler.text import Shown
from scheduler.tree import Fork, Node, Tree
from wire import support, vision
from wire.messages import Sample


class Context(Scoring):
    """One tree's view of the system: what it can ask for (``Services``), how it is scored (``Scoring``), and here how it grows.

    Call ``plant`` first; strategies do the rest.
    """

    def __init__(self, shop: Shop, task: Task, tree: Tree, rng: random.Random):
        super().__init__(shop, task, tree, rng)
        self.seed = rng.getrandbits(62)

    async def plant(self) -> None:
        """Add the root unless the tree has one: the first state with its prompt, or with the part that all turns' prompts share."""
        state = await asyncio.to_thread(self.environment.initial, self.task)
        self.state_type = type(state)
        if not self.tree.nodes:
            head, _ = self.rendered(state)
            root = self.tree.add(None, "prompt", self.encode(head), head.text, state=msgspec.to_builtins(state))
            self.changed([root])

    async def tip(self, trajectory: int = 0) -> Node:
        """Where the trajectory stands: its last chosen node, or the prompt of its first turn."""
        node = self.tree.tip(trajectory)
        if node.parent >= 0 or (self.environment.begins_with_prompt and not self.environment.fresh):
            return node
        return self._show(await self.environment.open(self.after(node), self), trajectory, 0)

    async def generate(self, node: Node, n: int, trajectory: int | None = None) -> list[Node]:
        """Sample ``n`` actions from the prefix that ends in ``node``, and add them as its children."""
        state = None if node.state is None else self.after(node)
        samples, cached, opening = await self.acted(self.tree.prefix(node), n, state)
        trajectory = node.trajectory if trajectory is None else trajectory
        actions = [self._sampled(node, sample, opening, trajectory=trajectory) for sample in samples]
        actions[0].cached = cached
        return actions

    async def branch(self, fork: Fork, trajectory: int) -> Node:
        """Sample another action where ``fork`` says, and add it as the first action of a new trajectory. The kept tokens have the
        log-probabilities with which they were sampled. Fewer are kept if the engine would otherwise not see the beginning of a stop string, and
        no fewer than were not sampled (``Environment.beginning``).
        """
        action, kept, stop = fork.action, fork.kept, self.environment.stop
        openings = tuple(text[:end] for text in stop for end in range(1, len(text)))
        while kept and self.shop.text.decode(action.tokens[:kept]).endswith(openings):
            kept -= 1
        opening = 0 if action.sampled is None else int((~action.sampled).sum())
        kept = max(kept, opening)
        place, old = self.tree.parent(action), [action.tokens, action.logprobs, action.versions]
        assert place is not None, "an action has a prompt above it"
        prefix = np.concatenate([self.tree.prefix(place), action.tokens[:kept]])
        limit = 0 if place.state is None else self.environment.most(self.after(place))
        (sample,), cached = await self.sample(prefix, 1, stop, kept=kept, limit=limit)
        new = [sample.tokens, sample.logprobs, sample.versions]
        tokens, logprobs, versions = (np.concatenate([a[:kept], b]) for a, b in zip(old, new, strict=True))
        left = support.spliced(action.support, len(action.tokens), kept, sample.support or b"", len(sample.tokens))
        whole = msgspec.structs.replace(sample, tokens=tokens, logprobs=logprobs, versions=versions, support=left)
        node = self._sampled(place, whole, opening, trajectory=trajectory, cached=cached, kept=kept)
        if node.entropies is not None and action.entropies is not None:
            node.entropies = np.concatenate([action.entropies[:kept], node.entropies])
        return node

    async def step(self, node: Node) -> Node | None:
        """Take a chosen action in the environment. Returns the node at which the policy acts next, None when the episode is over.

        An episode is also over if its next prompt has no room in the context. It counts as ``Environment.outgrown`` says, or as its judge does.
        """
        answer, fresh = self.answer(node), self.environment.fresh
        over = node.forced or "outcome" in node.scores or "replay" in node.notes
        if over or (answer is not None and (fresh or not answer.chosen)):
            return None  # the last: an observation without a next prompt ended the episode before a crash
        try:
            transition = await self.environment.step(self.state(node), self.action(node), self._taking(node))
        except Diverged as fault:
            return self._drop(node, fault)
        self.shop.counts["environment_steps"] += 1
        columns = {} if transition.reward is None else {"step_reward": transition.reward}
        if transition.done:
            columns |= transition.measures | ({} if transition.outcome is None else {"outcome": transition.outcome})
            self.shop.crashes.note(transition.fault)
        if transition.fault:
            node.notes["crashed"] = transition.fault
            self.shop.counts["crashed_episodes"] += 1
        if columns:
            node.scores |= columns
            self.changed([node])
        if transition.observation and fresh:  # for readers of the tree: the policy reads the next prompt instead
            self._observe(node, transition)
        if transition.done:
            return None
        place = self._next(node, transition)
        if self._fits(place):
            return place
        self._outgrown(node, place, transition.state)
        return None

    async def onward(self, node: Node) -> Node | None:
        """The node at which the policy acts after ``node``, or None when the trajectory is over.

        A used-up budget forces an answer. An environment without forced answers ends its episodes itself.
        """
        place = await self.step(node) if node.kind == "action" else node
        if place is not None and self.environment.forced_prefix and place.step >= self.settings.budget:
            await self.force_answer(place)
            return None
        return place

    async def force_answer(self, node: Node) -> Node:
        """Append the forced opening of an answer and let the policy finish the answer. The answer is logged, never trained."""
        prefix, tokens = self.environment.forced_prefix, self._forced
        (sample,), _ = await self.sample(np.concatenate([self.tree.prefix(node), tokens]), 1, ["</answer>"])
        # Only now: after a fault of the call, the next attempt must not find an opening without its answer.
        opening = self.tree.add(node, "observation", tokens, prefix, chosen=True, state=node.state)
        answer = self._sampled(opening, sample, forced=True, chosen=True)
        self.save([opening, answer])
        return answer

    def aside(self, purpose: str) -> "Context":
        """A context of the same tree with its own randomness, so that concurrent work draws the same in any order."""
        context = Context(self.shop, self.task, self.tree, random.Random(f"{self.seed}/{purpose}"))
        context.state_type, context.attempt, context.top = self.state_type, self.attempt, self.top
        return context

    # ------------------------------------------------------------------------------------------ what the policy reads

    def rendered(self, state: Any, thinking: bool | None = None) -> tuple[Shown, Shown]:
        """The prompt for acting in ``state``, as the part that all turns share and the rest ("" where turns are appended)."""
        messages = self.environment.prompt(self.task, state)
        tools = self.environment.tools(state)
        text = self.shop.text.prompt(messages, self.settings.thinking if thinking is None else thinking, tools)
        if not self.environment.begins_with_prompt:
            return Shown(""), Shown(text)
        head, _, tail = text.partition(SPLIT)
        parts = list(vision.shown(messages))
        split = next((i for i, part in enumerate(parts) if isinstance(part, str) and SPLIT in part), len(parts))
        first, rest = ([part for part in some if isinstance(part, bytes)] for some in (parts[:split], parts[split:]))
        return Shown(head, tuple(first)), Shown(tail, tuple(rest))

    def encode(self, part: Shown) -> np.ndarray:
        """int32 [tokens]: a part of a prompt, whose pictures enter the journal."""
        return self.shop.text.encode(part.text, [(self.shop.journal.picture(png), png) for png in part.pictures])

    # ------------------------------------------------------------------------------------------ inner workings

    @cached_property
    def _forced(self) -> np.ndarray:
        """int32 [tokens]: the forced opening of an answer; empty if the environment forces none."""
        return self.shop.text.encode(self.environment.forced_prefix)

    def _taking(self, node: Node) -> Taken:
        above = self.tree.parent(node)
        prompt = 0 if above is None else self.tree.length(above)
        replies = () if self.environment.begins_with_prompt else (n.text for n in self.tree.actions(node.trajectory))
        return Taken(self, Spent(prompt, node.cached, len(node.tokens), node.finish), tuple(replies))

    def _drop(self, node: Node, fault: Diverged) -> None:
        """End an episode that cannot go on, without an outcome. It is not trained."""
        node.notes["replay"], node.invalid = str(fault), sorted({*node.invalid, "outcome"})
        self.shop.counts["dropped_branches"] += 1
        self.changed([node])

    def _next(self, node: Node, transition: Transition) -> Node:
        """Add what the policy reads after ``node``: a prompt below the root, or what follows an action of the trajectory."""
        if self.environment.fresh or (transition.messages is not None and transition.after is None):
            return self._show(transition.state, node.trajectory, node.step)
        if transition.after is not None:
            node = msgspec.structs.replace(self.tree.actions(node.trajectory)[transition.after], step=node.step)
        return self._observe(node, transition)

    def _observe(self, node: Node, transition: Transition) -> Node:
        """Add the environment's answer below an action. It continues the trajectory only where turns are appended."""
        text, state = transition.observation, msgspec.to_builtins(transition.state)
        if transition.messages:
            text = self.shop.text.after(node.tokens, transition.messages)
        tokens, appended = self.shop.text.encode(text), not self.environment.fresh
        observation = self.tree.add(node, "observation", tokens, text, state=state, chosen=appended)
        self.changed([observation])
        return observation

    def _show(self, state: Any, trajectory: int, step: int) -> Node:
        """Add a fresh prompt that shows ``state`` as a child of the root, which holds what all turns share."""
        _, tail = self.rendered(state)
        place = {"chosen": True, "trajectory": trajectory, "step": step, "state": msgspec.to_builtins(state)}
        prompt = self.tree.add(self.tree.nodes[0], "prompt", self.encode(tail), tail.text, **place)
        self.changed([prompt])
        return prompt

    def _fits(self, place: Node) -> bool:
        """Whether the context has room for an action after ``place``, also if the action's opening is forced."""
        tokens = self.tree.length(place) + len(self._forced) + self.settings.max_action_tokens
        return not 0 < self.shop.longest < tokens

    def _outgrown(self, action: Node, place: Node, state: Any) -> None:
        """End the episode after ``action``, since nothing can follow ``place``."""
        place.chosen = False
        action.notes["ended"] = f"the next prompt and an action exceed the context of {self.shop.longest} tokens"
        if not self.environment.outcome_judge:
            end = self.environment.outgrown(state)
            action.scores |= {"outcome": 0.0 if end.outcome is None else end.outcome, **end.measures}
        self.shop.counts["outgrown_trajectories"] += 1
        self.changed([action, place])

    def _sampled(self, parent: Node, sample: Sample, opening: int = 0, **settings: Any) -> Node:
        """Add a sampled action to the tree. opening: how many tokens at its beginning were not sampled."""
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
