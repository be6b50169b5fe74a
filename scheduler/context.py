"""What a strategy may do: every slow thing is one awaited call, every result is in the tree when it returns.

A step is one transaction of the journal: the one that writes its sampled action (or, in SLATE, its group of judged candidates) also
writes what changed since the step before: the observation, and scores that came meanwhile. A crash therefore never loses a sample
that a trajectory continues; it may cost one repeated call of the environment or the judge.
"""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from actors.environments.base import SPLIT, Action, Environment, Task
from scheduler.config import UNJUDGED, SchedulerConfig
from scheduler.dispatch import Dispatcher
from scheduler.fleet import Fleet
from scheduler.journal import Journal
from scheduler.judged import Judged
from scheduler.placement import Place
from scheduler.text import Text
from scheduler.together import together
from scheduler.tree import Node, Tree
from wire.messages import (
    GenerateRequest,
    GenerateResult,
    JudgedTurn,
    Judgement,
    JudgeRequest,
    JudgeResult,
    Passage,
    PlayRequest,
    PlayResult,
    RetrieveRequest,
    RetrieveResult,
    Sample,
    Sampling,
    Turn,
)

Emit = Callable[[Tree, list[Turn]], None]

ATTEMPTS = 5
"""How often a tree whose calls fail is taken up."""


class Shop(msgspec.Struct, frozen=True):
    """What all contexts of a run share. most: samples of one generate call; more are asked for in several calls.

    aside: room for calls of continuations, so that they wait here, where no deadline runs. fleet: places generate calls. judged: the
    tally of the run's judge.
    """

    dispatcher: Dispatcher
    journal: Journal
    text: Text
    environment: Environment
    settings: SchedulerConfig
    counts: Counter[str]
    emit: Emit
    most: int = 64
    aside: asyncio.Semaphore = msgspec.field(default_factory=lambda: asyncio.Semaphore(64))
    fleet: Fleet = msgspec.field(default_factory=Fleet)
    judged: Judged = msgspec.field(default_factory=Judged)


class Context:
    """One tree's view of the system. ``settings`` may differ from the run's (an evaluation is greedy).

    attempt: which of ``ATTEMPTS`` this is, 0 where there is only one.
    """

    attempt = 0

    def __init__(self, shop: Shop, settings: SchedulerConfig, task: Task, tree: Tree, rng: random.Random):
        self.shop, self.settings, self.task, self.tree, self.rng = shop, settings, task, tree, rng
        self.environment = shop.environment
        self.seed = rng.getrandbits(62)
        self.state_type: type = type(None)

    # ------------------------------------------------------------------------------------------ strategy calls

    async def plant(self) -> None:
        """The root, unless the tree has one: the rendered prompt, or what all turns' prompts share, and the first state."""
        state = await asyncio.to_thread(self.environment.initial, self.task)
        self.state_type = type(state)
        if not self.tree.nodes:
            head, _ = self.rendered(state)
            root = self.tree.add(None, "prompt", self.shop.text.encode(head), head, state=msgspec.to_builtins(state))
            self.changed([root])

    async def tip(self, trajectory: int = 0) -> Node:
        """Where the trajectory stands: its last chosen node, or the prompt of its first turn."""
        node = self.tree.tip(trajectory)
        if node.kind == "prompt" and node.parent < 0 and self.environment.fresh:
            state = await self.environment.open(self._typed(node.state), self)
            return self._show(state, trajectory, 0)
        return node

    async def generate(self, node: Node, n: int, trajectory: int | None = None) -> list[Node]:
        """``n`` actions sampled from the prefix that ends in ``node``."""
        samples, cached = await self.sample(self.tree.prefix(node), n, self.environment.stop)
        place = node.trajectory if trajectory is None else trajectory
        made = [self._sampled(node, sample, trajectory=place) for sample in samples]
        made[0].cached = cached
        return made

    def action(self, node: Node) -> Action:
        """The action of an action node, parsed once."""
        known = self.tree.actions_read.get(node.id)
        if known is None:
            read = self.environment
            known = read.parse_forced(node.text) if node.forced else read.read(self.state(node), node.text)
            self.tree.actions_read[node.id] = known
        return known

    async def judge(self, nodes: Sequence[Node]) -> None:
        """Have sibling actions judged, and mark them; where the judge's columns make the reward, invalid ones are not judged (methods.md 1.4)."""
        await self.score([node for node in nodes if self.action(node).valid or self.environment.rewarded_by_judge])
        self.mark(nodes)

    async def score(self, nodes: Sequence[Node]) -> None:
        """Write the judge's columns to actions, whether they are valid or not; without a judge there are none."""
        if not nodes or self.settings.judge == UNJUDGED:
            return
        turns = [self._judged(node, self.action(node)) for node in nodes]
        for node, judgement in zip(nodes, await self._judgements(turns), strict=True):
            node.scores.update(judgement.scores)
            node.invalid = judgement.invalid
            if judgement.explanation:
                node.notes[self.settings.judge] = judgement.explanation
        self.changed(nodes)

    def mark(self, nodes: Sequence[Node]) -> None:
        """Write to actions whether they are valid, and count them; each once, also after a crash or a fault."""
        new = [node for node in nodes if "valid" not in node.scores]
        for node in new:
            valid = self.action(node).valid
            node.scores["valid"] = float(valid)
            self.shop.counts["invalid_actions"] += not valid
        self.shop.counts["actions"] += len(new)
        self.changed(nodes)

    async def step(self, node: Node) -> Node | None:
        """The environment's answer to a chosen action, as the node to act on next; None when the episode is over."""
        if node.forced or "outcome" in node.scores:
            return None
        transition = await self.environment.step(self.state(node), self.action(node), self)
        self.shop.counts["environment_steps"] += 1
        if transition.done:
            if transition.outcome is not None:
                node.scores |= {"outcome": transition.outcome, **transition.measures}
                self.changed([node])
            return None
        if self.environment.fresh:
            return self._show(transition.state, node.trajectory, node.step)
        text = transition.observation
        made = self.tree.add(
            node,
            "observation",
            self.shop.text.encode(text),
            text,
            state=msgspec.to_builtins(transition.state),
            chosen=True,
        )
        self.changed([made])
        return made

    async def onward(self, node: Node) -> Node | None:
        """Where the trajectory that stands at ``node`` acts next; None when it is over. A used-up budget forces an answer.

        Where nothing can be forced the environment ends its episodes itself.
        """
        place = await self.step(node) if node.kind == "action" else node
        if place is not None and self.environment.forced_prefix and place.step >= self.settings.budget:
            await self.force_answer(place)
            return None
        return place

    async def force_answer(self, node: Node) -> Node:
        """Append the forced opening of an answer and let the policy finish it: for the log, never trained."""
        prefix = self.environment.forced_prefix
        opening = self.tree.add(
            node, "observation", self.shop.text.encode(prefix), prefix, chosen=True, state=node.state
        )
        (sample,), _ = await self.sample(self.tree.prefix(opening), 1, ["</answer>"])
        made = self._sampled(opening, sample, forced=True, chosen=True)
        self.save([opening, made])
        return made

    async def finish(self, trajectory: int = 0) -> None:
        """The outcome of a finished trajectory as columns of its last action, where a judge gives it.

        A policy that did not answer within its budget has outcome 0; a forced answer is only logged.
        """
        if self.environment.outcome_judge:
            columns = await self.log_outcome(self.tree.actions(trajectory)[-1])
            own = [node for node in self.tree.actions(trajectory) if not node.forced]
            own[-1].scores = dict.fromkeys(columns, 0.0) | own[-1].scores | self._extent(own)
            self.changed([own[-1]])

    async def log_outcome(self, node: Node) -> list[str]:
        """The outcome judge's columns (exact match and F1) of the answer in ``node``; their names."""
        (judgement,) = await self._score(self.environment.outcome_judge, [self._judged(node, self.action(node))])
        node.scores.update(judgement.scores)
        self.changed([node])
        return list(judgement.scores)

    def emit(self, trajectories: Sequence[Sequence[Node]]) -> None:
        """One finished group: its trajectories, each a list of scored actions, leave for the learner now."""
        turns = [
            Turn(node.id, index, node.step, _finite(node.scores))
            for index, nodes in enumerate(trajectories)
            for node in nodes
        ]
        if turns:
            self.shop.emit(self.tree, turns)

    def changed(self, nodes: Sequence[Node]) -> None:
        """Nodes are new or have new columns: the tree's next transaction writes them."""
        self.tree.changed.update((node.id, node) for node in nodes)

    def save(self, nodes: Sequence[Node]) -> None:
        """Write nodes now, and whatever else changed in the tree, in one transaction: once per step, when its sample has come."""
        self.changed(nodes)
        self.shop.journal.save_nodes(self.tree)

    def state(self, node: Node) -> Any:
        """The environment state in which ``node`` acts."""
        return self._typed(self.tree.state_before(node))

    # ------------------------------------------------------------------------------------------ beside the tree

    def aside(self, purpose: str) -> "Context":
        """The same tree with randomness of its own, for work whose order among other work is not fixed."""
        made = Context(self.shop, self.settings, self.task, self.tree, random.Random(f"{self.seed}/{purpose}"))
        made.state_type, made.attempt = self.state_type, self.attempt
        return made

    def rendered(self, state: Any, thinking: bool | None = None) -> tuple[str, str]:
        """The prompt to act in ``state``: what all turns share, and the rest ("" where turns are appended)."""
        messages = self.environment.prompt(self.task, state)
        text = self.shop.text.prompt(messages, self.settings.thinking if thinking is None else thinking)
        head, _, tail = text.partition(SPLIT)
        return head, tail

    async def sample(
        self, prefix: np.ndarray, n: int, stop: list[str], beside: bool = False
    ) -> tuple[list[Sample], int]:
        """``n`` continuations of a prefix, asked for together, and how many of its tokens the engine had in its cache.

        beside: they are no turns of a trained trajectory, so those go first.
        """
        most = self.shop.most
        sizes = [min(most, n - first) for first in range(0, n, most)]
        requests = [GenerateRequest(prefix, size, self._sampling(stop)) for size in sizes]
        results = await together(self._generate(request, beside) for request in requests)
        samples = [sample for result in results for sample in result.samples]
        self.shop.counts["generated_tokens"] += sum(len(sample.tokens) for sample in samples)
        return samples, results[0].cached_tokens

    async def outcome_of(self, state: Any, action: Action, step: int) -> float:
        """The outcome judge's verdict on an action that is in no tree."""
        turn = self.environment.judged(self.task, state, action, step, self.settings.budget)
        (judgement,) = await self._score(self.environment.outcome_judge, [turn])
        return judgement.scores.get("outcome", 0.0)

    # ------------------------------------------------------------------------------------------ environment tools

    async def retrieve(self, query: str, topk: int) -> list[Passage]:
        """The nearest passages (``actors.environments.base.Tools``)."""
        request = RetrieveRequest([query], topk)
        result: RetrieveResult = await self._call("retrieve", request, self.settings.judge_deadline_s)
        self.shop.counts["retrievals"] += 1
        return result.passages[0]

    async def play(self, player: str, state: Any) -> tuple[int, ...]:
        """An opponent's move (``actors.environments.base.Tools``)."""
        request = PlayRequest(msgspec.to_builtins(state), self.rng.getrandbits(62))
        result: PlayResult = await self._call(f"player.{player}", request, self.settings.judge_deadline_s)
        self.shop.counts["opponent_moves"] += 1
        return tuple(result.move)

    # ------------------------------------------------------------------------------------------ inner workings

    def _show(self, state: Any, trajectory: int, step: int) -> Node:
        """A fresh prompt that shows ``state``, below what all turns share."""
        _, tail = self.rendered(state)
        made = self.tree.add(
            self.tree.nodes[0],
            "prompt",
            self.shop.text.encode(tail),
            tail,
            state=msgspec.to_builtins(state),
            chosen=True,
            trajectory=trajectory,
            step=step,
        )
        self.changed([made])
        return made

    def _sampling(self, stop: list[str]) -> Sampling:
        s = self.settings
        return Sampling(s.max_action_tokens, s.temperature, s.top_p, s.top_k, stop, seed=self.rng.getrandbits(62))

    async def _generate(self, request: GenerateRequest, beside: bool) -> GenerateResult:
        place = self.shop.fleet.call(self.tree.id, request, beside)
        return await self._call("generate", request, self.settings.generate_deadline_s, place)

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

    def _typed(self, plain: Any) -> Any:
        return msgspec.convert(plain, self.state_type)

    def _judged(self, node: Node, action: Action) -> JudgedTurn:
        turn = self.environment.judged(self.task, self.state(node), action, node.step, self.settings.budget)
        if self.environment.fresh:
            return turn
        answers = [child.text for child in self.tree.children(node) if child.kind == "observation"]
        transcript = "".join(above.text for above in self.tree.path(node)[1:-1])
        return msgspec.structs.replace(turn, transcript=transcript, observation=answers[0] if answers else None)

    async def _score(self, judge: str, turns: list[JudgedTurn]) -> list[Judgement]:
        if judge == UNJUDGED:
            return [Judgement({}) for _ in turns]
        result: JudgeResult = await self._call(f"judge.{judge}", JudgeRequest(turns), self.settings.judge_deadline_s)
        return result.judgements

    async def _judgements(self, turns: list[JudgedTurn]) -> list[Judgement]:
        """The run's judge on ``turns``, counted."""
        judgements = await self._score(self.settings.judge, turns)
        given, invalid = self.shop.judged.note(judgements)
        self.shop.counts["judged_scores"] += given
        self.shop.counts["invalid_judgements"] += invalid
        return judgements

    async def _call(self, service: str, request: msgspec.Struct, deadline: float, place: Place | None = None) -> Any:
        """The dispatcher's ``call``, in this tree's name."""
        caller = f"tree {self.tree.id}" + (f", attempt {self.attempt} of {ATTEMPTS}" if self.attempt else "")
        return await self.shop.dispatcher.call(service, request, deadline=deadline, place=place, caller=caller)

    def _extent(self, turns: Sequence[Node]) -> dict[str, float]:
        """Of a trajectory: turns, valid searches, whether it answered, tokens of the response, sampled ones and all (methods.md 2.4)."""
        sampled = sum(len(turn.tokens) for turn in turns)
        whole = len(self.tree.prefix(turns[-1])) - len(self.tree.nodes[0].tokens)
        searches = sum(self.action(turn).kind == "search" for turn in turns)
        return {
            "turns": float(len(turns)),
            "searches": float(searches),
            "answered": float(self.action(turns[-1]).kind == "answer"),
            "sampled_tokens": float(sampled),
            "response_tokens": float(whole),
        }


def _finite(scores: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in scores.items() if math.isfinite(value)}
