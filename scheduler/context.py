"""What a strategy may do: every slow thing is one awaited call, every result is in the tree and the journal when it returns."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from actors.environments.base import Action, Task
from actors.environments.search_qa import SearchQA
from scheduler.config import SchedulerConfig
from scheduler.dispatch import Dispatcher
from scheduler.journal import Journal
from scheduler.rewards import INVALID_REWARD, composite
from scheduler.text import Text
from scheduler.tree import Node, Tree
from wire.messages import (
    GenerateRequest,
    GenerateResult,
    JudgedTurn,
    Judgement,
    JudgeRequest,
    JudgeResult,
    Passage,
    RetrieveRequest,
    RetrieveResult,
    Sample,
    Sampling,
    Turn,
)

Emit = Callable[[Tree, list[Node], list[Turn]], None]


class Shop(msgspec.Struct, frozen=True):
    """What all contexts of a run share."""

    dispatcher: Dispatcher
    journal: Journal
    text: Text
    environment: SearchQA
    settings: SchedulerConfig
    counts: Counter[str]
    emit: Emit


class Context:
    """One tree's view of the system. ``settings`` may differ from the run's (an evaluation is greedy with k = 1)."""

    def __init__(self, shop: Shop, settings: SchedulerConfig, task: Task, tree: Tree, rng: random.Random):
        self.shop, self.settings, self.task, self.tree, self.rng = shop, settings, task, tree, rng
        self._home: str | None = None
        self._state_type = type(shop.environment.initial(task))

    # ------------------------------------------------------------------------------------------ strategy calls

    def plant(self) -> Node:
        """The root: the rendered prompt and the first environment state."""
        prompt = self.shop.text.prompt(self.shop.environment.prompt(self.task))
        state = msgspec.to_builtins(self.shop.environment.initial(self.task))
        return self.tree.add(None, "prompt", self.shop.text.encode(prompt), prompt, state=state)

    async def generate(self, node: Node, n: int, trajectory: int | None = None) -> list[Node]:
        """``n`` actions sampled from the prefix that ends in ``node``, at the actor that holds it unless that is overloaded."""
        sampling = self._sampling(self.shop.environment.stop)
        result = await self._generate(self.tree.prefix(node), n, sampling)
        place = node.trajectory if trajectory is None else trajectory
        made = [self._sampled(node, sample, trajectory=place) for sample in result.samples]
        if made:
            made[0].cached = result.cached_tokens
        return made

    def action(self, node: Node) -> Action:
        """The parsed action of an action node."""
        if node.forced:
            return self.shop.environment.parse_forced(node.text)
        return self.shop.environment.parse(node.text)

    async def judge(self, nodes: Sequence[Node]) -> list[float]:
        """Rewards r_t of sibling actions; columns are written to the nodes. Invalid actions are not judged (methods.md 1.4)."""
        actions = [self.action(node) for node in nodes]
        valid = [i for i, action in enumerate(actions) if action.valid]
        turns = [self._judged(nodes[i], actions[i]) for i in valid]
        judgements = await self._score(self.settings.judge, turns) if turns else []
        for i, judgement in zip(valid, judgements, strict=True):
            nodes[i].scores.update(judgement.scores)
            nodes[i].invalid = judgement.invalid
            if judgement.explanation:
                nodes[i].notes[self.settings.judge] = judgement.explanation
        for node, action in zip(nodes, actions, strict=True):
            node.scores["valid"] = float(action.valid)
            node.scores["reward"] = self._reward(node, action)
        self._count(nodes, actions)
        return [node.scores["reward"] for node in nodes]

    async def step(self, node: Node) -> Node | None:
        """The environment's answer to a chosen action, as a new observation node; None when the episode is over."""
        action = self.action(node)
        if node.forced:
            return None
        state = self._state(node)
        transition = await self.shop.environment.step(state, action, self)
        if transition.done:
            return None
        text = transition.observation
        made = self.tree.add(
            node,
            "observation",
            self.shop.text.encode(text),
            text,
            state=msgspec.to_builtins(transition.state),
            chosen=True,
        )
        self.save([node, made])
        return made

    async def force_answer(self, node: Node) -> Node:
        """Append the forced opening of an answer and let the policy finish it: for the log, never trained."""
        prefix = self.shop.environment.forced_prefix
        opening = self.tree.add(
            node, "observation", self.shop.text.encode(prefix), prefix, chosen=True, state=node.state
        )
        result = await self._generate(self.tree.prefix(opening), 1, self._sampling(["</answer>"]))
        made = self._sampled(opening, result.samples[0], forced=True, chosen=True)
        self.save([opening, made])
        return made

    async def log_outcome(self, node: Node) -> None:
        """Exact match and F1 of the trajectory's answer, as columns of its last action."""
        action = self.action(node)
        (judgement,) = await self._score("exact_match", [self._judged(node, action)])
        node.scores.update(judgement.scores)
        self.save([node])

    def emit(self, trajectories: Sequence[Sequence[Node]]) -> None:
        """One finished group: its trajectories, each a list of scored actions, leave for the learner now."""
        turns = [
            Turn(node.id, index, node.step, _finite(node.scores))
            for index, nodes in enumerate(trajectories)
            for node in nodes
        ]
        if turns:
            self.shop.emit(self.tree, [node for nodes in trajectories for node in nodes], turns)

    def save(self, nodes: Sequence[Node]) -> None:
        """Make nodes durable."""
        self.shop.journal.save_nodes(self.tree, nodes)

    # ------------------------------------------------------------------------------------------ environment tools

    async def retrieve(self, query: str, topk: int) -> list[Passage]:
        """The nearest passages (``actors.environments.base.Tools``)."""
        deadline = self.settings.judge_deadline_s
        result: RetrieveResult = await self.shop.dispatcher.call(
            "retrieve", RetrieveRequest([query], topk), deadline=deadline
        )
        self.shop.counts["retrievals"] += 1
        return result.passages[0]

    # ------------------------------------------------------------------------------------------ inner workings

    def _sampling(self, stop: list[str]) -> Sampling:
        s = self.settings
        return Sampling(s.max_action_tokens, s.temperature, s.top_p, s.top_k, stop, seed=self.rng.getrandbits(62))

    async def _generate(self, prefix: np.ndarray, n: int, sampling: Sampling) -> GenerateResult:
        def remember(worker: str) -> None:
            self._home = worker

        return await self.shop.dispatcher.call(
            "generate",
            GenerateRequest(prefix, n, sampling),
            deadline=self.settings.generate_deadline_s,
            prefer=self._home,
            served_by=remember,
        )

    def _sampled(self, parent: Node, sample: Sample, **settings: Any) -> Node:
        """A sampled action as a node of the tree."""
        return self.tree.add(
            parent,
            "action",
            sample.tokens,
            self.shop.text.decode(sample.tokens),
            logprobs=sample.logprobs,
            versions=sample.versions,
            sampled=np.ones(len(sample.tokens), bool),
            finish=sample.finish,
            **settings,
        )

    def _state(self, node: Node) -> Any:
        return msgspec.convert(self.tree.state_before(node), self._state_type)

    def _judged(self, node: Node, action: Action) -> JudgedTurn:
        state = msgspec.convert(self.tree.state_before(node), self._state_type)
        return self.shop.environment.judged(self.task, state, action, node.step, self.settings.budget)

    async def _score(self, judge: str, turns: list[JudgedTurn]) -> list[Judgement]:
        deadline = self.settings.judge_deadline_s
        result: JudgeResult = await self.shop.dispatcher.call(f"judge.{judge}", JudgeRequest(turns), deadline=deadline)
        return result.judgements

    def _reward(self, node: Node, action: Action) -> float:
        if not action.valid:
            return INVALID_REWARD
        s = self.settings
        return composite(node.scores, action.kind == "answer", node.step, s.budget, s.bonus)

    def _count(self, nodes: Sequence[Node], actions: Sequence[Action]) -> None:
        counts = self.shop.counts
        counts["actions"] += len(nodes)
        counts["invalid_actions"] += sum(not action.valid for action in actions)
        counts["invalid_judgements"] += sum(len(node.invalid) for node in nodes)


def _finite(scores: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in scores.items() if math.isfinite(value)}
