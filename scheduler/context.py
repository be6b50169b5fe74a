"""What a strategy may do: every slow thing is one awaited call, and its result is in the tree when the call returns.

Each step is one transaction of the journal. The transaction that writes the sampled action (or, in SLATE, the group of judged
candidates) also writes the observation and the scores that came since the step before. A crash therefore never loses a sample that a
trajectory continues; at worst one call of the environment or the judge is repeated.
"""

import asyncio
import math
import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from actors.environments.base import POLICY, SPLIT, Action, Diverged, Environment, Spent, Task, Tools, Transition
from scheduler import answers
from scheduler.calls import Check
from scheduler.config import UNJUDGED, SchedulerConfig
from scheduler.dispatch import Dispatcher
from scheduler.fleet import Fleet
from scheduler.journal import Journal
from scheduler.judged import Judged
from scheduler.placement import Place
from scheduler.text import Shown, Text
from scheduler.together import together
from scheduler.tree import Fork, Node, Tree, turns_of
from wire import support, vision
from wire.faults import DataFault
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
    SpeakRequest,
    SpeakResult,
    Turn,
)

Emit = Callable[[Tree, list[Turn]], None]

ATTEMPTS = 5
"""How many attempts a tree gets when infrastructure faults end them."""


class Shop(msgspec.Struct, frozen=True):
    """What all contexts of a run share. most: the largest number of samples in one generate call; more samples take several calls.
    longest: the most tokens of a prefix and its continuation; 0 sets no limit. proven, newest: return the policy version that every actor has
    proven at least, and the newest one.

    aside: bounds the calls for continuations, which wait for it before their deadlines start. fleet: places generate calls. judged:
    the tally of the run's judge.
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
    longest: int = 0
    proven: Callable[[], int] = lambda: 0
    newest: Callable[[], int] = lambda: sys.maxsize


class Context(Tools):
    """One tree's view of the system. ``settings`` may differ from the run's: an evaluation has its own temperature.

    Call ``plant`` first; strategies do the rest. attempt: which of the ``ATTEMPTS`` is running, or 0 if there is only one. top: actions that
    are sampled from now on keep the entropy of the ``top`` most probable tokens at each token; 0: none.
    """

    attempt = 0
    top = 0

    def __init__(self, shop: Shop, settings: SchedulerConfig, task: Task, tree: Tree, rng: random.Random):
        self.shop, self.settings, self.task, self.tree, self.rng = shop, settings, task, tree, rng
        self.environment = shop.environment
        self.seed = rng.getrandbits(62)
        self.state_type: type = type(None)
        self._state: tuple[Node | None, Any] = None, None
        self._past: tuple[Node | None, list[tuple[str, str]], str] | None = None

    # ------------------------------------------------------------------------------------------ strategy calls

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
        if (
            node.kind == "prompt"
            and node.parent < 0
            and (self.environment.fresh or not self.environment.begins_with_prompt)
        ):
            state = await self.environment.open(self._typed(node.state), self)
            return self._show(state, trajectory, 0)
        return node

    async def generate(self, node: Node, n: int, trajectory: int | None = None) -> list[Node]:
        """Sample ``n`` actions from the prefix that ends in ``node``, and add them as its children."""
        state = None if node.state is None else self._typed(node.state)
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
        (sample,), cached = await self.sample(prefix, 1, stop, kept=kept, limit=self._limit(place))
        new = [sample.tokens, sample.logprobs, sample.versions]
        tokens, logprobs, versions = (np.concatenate([a[:kept], b]) for a, b in zip(old, new, strict=True))
        left = support.spliced(action.support, len(action.tokens), kept, sample.support or b"", len(sample.tokens))
        whole = msgspec.structs.replace(sample, tokens=tokens, logprobs=logprobs, versions=versions, support=left)
        node = self._sampled(place, whole, opening, trajectory=trajectory, cached=cached, kept=kept)
        if node.entropies is not None and action.entropies is not None:
            node.entropies = np.concatenate([action.entropies[:kept], node.entropies])
        return node

    def action(self, node: Node) -> Action:
        """The parsed action of an action node. Each node is parsed once."""
        known = self.tree.actions_read.get(node.id)
        if known is None:
            read = self.environment
            known = read.parse_forced(node.text) if node.forced else read.read(self.state(node), node.text)
            self.tree.actions_read[node.id] = known
        return known

    async def judge(self, nodes: Sequence[Node]) -> None:
        """Have sibling actions judged, and mark them. If rewards are composed of the judge's columns, only valid actions are judged
        (methods.md 1.4)."""
        await self.score([node for node in nodes if self.action(node).valid or self.environment.rewarded_by_judge])
        self.mark(nodes)

    async def score(self, nodes: Sequence[Node]) -> None:
        """Have actions judged, valid or not, and write the judge's columns to them. Does nothing in a run without a judge."""
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
        """Write the column "valid" to actions and count them. Marked actions are skipped, so repeating the call is safe."""
        new = [node for node in nodes if "valid" not in node.scores]
        for node in new:
            valid = self.action(node).valid
            node.scores["valid"] = float(valid)
            self.shop.counts["invalid_actions"] += not valid
        self.shop.counts["actions"] += len(new)
        self.changed(nodes)

    async def step(self, node: Node) -> Node | None:
        """Take a chosen action in the environment. Returns the node at which the policy acts next, None when the episode is over.

        An episode is also over if its next prompt has no room in the context. It counts as ``Environment.outgrown`` says, or as its judge does.
        """
        answer, fresh = self._answer(node), self.environment.fresh
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
        prefix = self.environment.forced_prefix
        tokens = self.shop.text.encode(prefix)
        (sample,), _ = await self.sample(np.concatenate([self.tree.prefix(node), tokens]), 1, ["</answer>"])
        # Only now: after a fault of the call, the next attempt must not find an opening without its answer.
        opening = self.tree.add(node, "observation", tokens, prefix, chosen=True, state=node.state)
        answer = self._sampled(opening, sample, forced=True, chosen=True)
        self.save([opening, answer])
        return answer

    async def finish(self, trajectory: int = 0) -> bool:
        """Write the outcome of a finished trajectory to its last own action, if a judge gives the outcome.

        If the policy did not answer within its budget, the outcome is 0; the forced answer is only logged. Returns False if the judge could
        not give the outcome. Such a trajectory is not trained, because an unknown outcome is not 0.
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
        """Write the outcome judge's columns, such as exact match and F1, to the last action. Returns their names."""
        judge = self.environment.outcome_judge
        (judgement,) = await self._score(judge, [self._concluded(node)])
        node.scores.update(judgement.scores)
        node.invalid = sorted({*node.invalid, *judgement.invalid})
        if judgement.explanation:
            node.notes[judge] = judgement.explanation
        self.shop.counts["invalid_outcomes"] += "outcome" in judgement.invalid
        self.changed([node])
        return list(judgement.scores)

    def emit(self, trajectories: Sequence[Sequence[Node]]) -> None:
        """Send one finished group to the learner now. trajectories: each is a list of scored actions."""
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
        """Write ``nodes`` and every other changed node of the tree in one transaction. Call it once per step, after sampling."""
        self.changed(nodes)
        self.shop.journal.save_nodes(self.tree)

    def state(self, node: Node) -> Any:
        """The environment state in which ``node`` acts."""
        place = self.tree.acted_in(node)
        if place is not self._state[0]:  # siblings act in one state
            self._state = place, self._typed(None if place is None else place.state)
        return self._state[1]

    # ------------------------------------------------------------------------------------------ beside the tree

    def aside(self, purpose: str) -> "Context":
        """A context of the same tree with its own randomness, so that concurrent work draws the same in any order."""
        context = Context(self.shop, self.settings, self.task, self.tree, random.Random(f"{self.seed}/{purpose}"))
        context.state_type, context.attempt, context.top = self.state_type, self.attempt, self.top
        return context

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

    async def sample(
        self, prefix: np.ndarray, n: int, stop: list[str], beside: bool = False, kept: int = 0, limit: int = 0
    ) -> tuple[list[Sample], int]:
        """Sample ``n`` continuations of a prefix together. Also returns how many tokens of the prefix the engine had cached.

        beside: these samples belong to no trained trajectory, so the calls of trained trajectories go first. kept: how many tokens at the end
        of the prefix count towards the length of the action. limit: the most tokens of the action if fewer than the run's, 0 for the run's limit.
        Raises DataFault if the learner could not score the samples, because the engine cuts the distribution and does not report what it left.
        """
        most = self.shop.most
        sizes = [min(most, n - first) for first in range(0, n, most)]
        pictures = self.shop.journal.pictures(prefix)
        trained = self.tree.split == "train" and not beside
        requests = [
            GenerateRequest(prefix, size, self._sampling(stop, trained, kept, limit), pictures) for size in sizes
        ]
        results = await together(self._generate(request, beside) for request in requests)
        samples = [sample for result in results for sample in result.samples]
        if trained and requests[0].sampling.cuts and any(sample.support is None for sample in samples):
            raise DataFault(
                f"scheduler.top_p = {self.settings.top_p} and top_k = {self.settings.top_k} with an engine that does not report which tokens they"
                " left: expected Sample.support (docs/engines.md); set top_p = 1 and top_k = 0, or take another actors.engine"
            )
        self.shop.counts["generated_tokens"] += sum(len(sample.tokens) for sample in samples)
        return samples, results[0].cached_tokens

    async def acted(
        self, prefix: np.ndarray, n: int, state: Any, beside: bool = False
    ) -> tuple[list[Sample], int, int]:
        """Sample ``n`` actions of ``state``, None if unknown, whose prompt is ``prefix``. Also returns the cached tokens, and how many tokens at the
        beginning of each action are its opening (``Environment.beginning``), which was given and not sampled. beside: as in ``sample``."""
        environment = self.environment
        opening = self.shop.text.encode("" if state is None else environment.beginning(state))
        given, limit = len(opening), 0 if state is None else environment.most(state)
        begun = np.concatenate([prefix, opening]) if given else prefix
        samples, cached = await self.sample(begun, n, environment.stop, beside, given, limit)
        return [_opened(sample, opening) for sample in samples] if given else samples, cached, given

    async def outcome_of(self, state: Any, action: Action, step: int, after: Any) -> float:
        """The outcome that the outcome judge gives to an episode whose last action, taken in ``state``, is in no tree."""
        turn = self.environment.concluded(self.task, state, action, after, step, self.settings.budget)
        (judgement,) = await self._score(self.environment.outcome_judge, [turn])
        return judgement.scores.get("outcome", 0.0)

    # ------------------------------------------------------------------------------------------ environment tools

    async def retrieve(self, query: str, topk: int) -> list[Passage]:
        """The nearest passages (``actors.environments.base.Tools``)."""
        request = RetrieveRequest([query], topk)
        check = partial(answers.complete, "passages", 1)
        result: RetrieveResult = await self._call("retrieve", request, self.settings.judge_deadline_s, check)
        self.shop.counts["retrievals"] += 1
        return result.passages[0]

    async def play(self, player: str, state: Any) -> tuple[int, ...]:
        """An opponent's move (``actors.environments.base.Tools``)."""
        request = PlayRequest(msgspec.to_builtins(state), self.rng.getrandbits(62))
        result: PlayResult = await self._call(f"player.{player}", request, self.settings.judge_deadline_s)
        self.shop.counts["opponent_moves"] += 1
        return tuple(result.move)

    async def say(self, speaker: str, messages: list[dict[str, str]], max_tokens: int, stop: list[str]) -> str:
        """A reply in text (``actors.environments.base.Tools``). The policy's reply enters no tree, so it is never trained."""
        messages = [message | {"content": message["content"].replace(SPLIT, "")} for message in messages]
        self.shop.counts["spoken_replies"] += 1
        if speaker != POLICY:
            request = SpeakRequest(messages, max_tokens, self.settings.temperature, stop, self.rng.getrandbits(62))
            spoken: SpeakResult = await self._call(f"speaker.{speaker}", request, self.settings.judge_deadline_s)
            return spoken.text
        sampling = msgspec.structs.replace(self._sampling(stop), max_tokens=max_tokens)
        prompt = self.shop.text.encode(self.shop.text.prompt(messages, self.settings.thinking))
        result = await self._generate(GenerateRequest(prompt, 1, sampling), beside=False)
        tokens = result.samples[0].tokens
        self.shop.counts["generated_tokens"] += len(tokens)
        text = self.shop.text.decode(tokens)
        return text[: min((place for place in map(text.find, stop) if place >= 0), default=len(text))]

    # ------------------------------------------------------------------------------------------ inner workings

    def _taking(self, node: Node) -> "Taken":
        above = self.tree.parent(node)
        prompt = 0 if above is None else len(self.tree.prefix(above))
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
        prompt = self.tree.add(
            self.tree.nodes[0],
            "prompt",
            self.encode(tail),
            tail.text,
            state=msgspec.to_builtins(state),
            chosen=True,
            trajectory=trajectory,
            step=step,
        )
        self.changed([prompt])
        return prompt

    def _fits(self, place: Node) -> bool:
        """Whether the context has room for an action after ``place``, also if the action's opening is forced."""
        opening = self.shop.text.encode(self.environment.forced_prefix) if self.environment.forced_prefix else ()
        tokens = len(self.tree.prefix(place)) + len(opening) + self.settings.max_action_tokens
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

    def _limit(self, place: Node) -> int:
        """The environment's own limit of an action's tokens after ``place``."""
        return self.environment.most(self._typed(place.state)) if place.state is not None else 0

    def _sampling(self, stop: list[str], trained: bool = False, kept: int = 0, limit: int = 0) -> Sampling:
        s, seed = self.settings, self.rng.getrandbits(62)
        tokens = min(s.max_action_tokens, limit or s.max_action_tokens) - kept
        return Sampling(
            max(tokens, 1), s.temperature, s.top_p, s.top_k, stop, seed, top_logprobs=self.top, support=trained
        )

    def _anchor(self, node: Node) -> int | None:
        text = self.environment.anchor(self.state(node))
        return None if text is None else zlib.crc32(text.encode())

    async def _generate(self, request: GenerateRequest, beside: bool) -> GenerateResult:
        shop, place = self.shop, self.shop.fleet.call(self.tree.id, request, beside)
        check = partial(answers.sampled, request, shop.text.vocabulary, shop.proven(), shop.newest)
        return await self._call("generate", request, self.settings.generate_deadline_s, check, place)

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

    def _typed(self, plain: Any) -> Any:
        return msgspec.convert(plain, self.state_type)

    def _judged(self, node: Node, action: Action) -> JudgedTurn:
        turn = self.environment.judged(self.task, self.state(node), action, node.step, self.settings.budget)
        if self.environment.fresh:
            return turn
        place, answer = self.tree.parent(node), self._answer(node)
        if self._past is None or place is not self._past[0]:  # siblings have one past
            path = self.tree.path(node)
            self._past = place, turns_of(path), "".join([above.text for above in path[1:-1]])
        _, before, transcript = self._past
        turn = self.environment.recalled(turn, self.state(node), before)
        return msgspec.structs.replace(
            turn, transcript=transcript, observation=answer.text if answer is not None else None
        )

    def _answer(self, node: Node) -> Node | None:
        """The environment's observation below an action."""
        return next((child for child in self.tree.children(node) if child.kind == "observation"), None)

    def _concluded(self, node: Node) -> JudgedTurn:
        action, answer = self.action(node), self._answer(node)
        if not self.environment.fresh:
            return self._judged(node, action)
        after = None if answer is None else self._typed(answer.state)
        return self.environment.concluded(self.task, self.state(node), action, after, node.step, self.settings.budget)

    async def _score(self, judge: str, turns: list[JudgedTurn]) -> list[Judgement]:
        if judge == UNJUDGED:
            return [Judgement({}) for _ in turns]
        request, check = JudgeRequest(turns), partial(answers.judged, len(turns))
        result: JudgeResult = await self._call(f"judge.{judge}", request, self.settings.judge_deadline_s, check)
        return result.judgements

    async def _judgements(self, turns: list[JudgedTurn]) -> list[Judgement]:
        """Have ``turns`` judged by the run's judge, and count its scores."""
        judgements = await self._score(self.settings.judge, turns)
        scores, invalid = self.shop.judged.note(judgements)
        self.shop.counts["judged_scores"] += scores
        self.shop.counts["invalid_judgements"] += invalid
        return judgements

    async def _call(
        self,
        service: str,
        request: msgspec.Struct,
        deadline: float,
        check: Check | None = None,
        place: Place | None = None,
    ) -> Any:
        """Call a service through the dispatcher, with this tree named as the caller."""
        caller = f"tree {self.tree.id}" + (f", attempt {self.attempt} of {ATTEMPTS}" if self.attempt else "")
        return await self.shop.dispatcher.call(
            service, request, deadline=deadline, place=place, caller=caller, check=check
        )

    def _extent(self, turns: Sequence[Node]) -> dict[str, float]:
        """A trajectory's columns: turns, valid searches, whether it answered, sampled tokens, all tokens of its response (methods.md 2.4)."""
        sampled = sum(len(turn.tokens) if turn.sampled is None else int(turn.sampled.sum()) for turn in turns)
        whole = len(self.tree.prefix(turns[-1])) - len(self.tree.nodes[0].tokens)
        searches = sum(self.action(turn).kind == "search" for turn in turns)
        return {
            "turns": float(len(turns)),
            "searches": float(searches),
            "answered": float(self.action(turns[-1]).kind == "answer"),
            "sampled_tokens": float(sampled),
            "response_tokens": float(whole),
        }


class Taken(Tools):
    """The tools of one step: the context's services, and what is known of the action that is taken. replies: see ``Tools.replies``."""

    def __init__(self, ctx: Context, spent: Spent, replies: tuple[str, ...]):
        self.rng, self.retrieve, self.play, self.say = ctx.rng, ctx.retrieve, ctx.play, ctx.say
        self._spent, self._replies = spent, replies

    def spent(self) -> Spent:
        """What the action took."""
        return self._spent

    def replies(self) -> tuple[str, ...]:
        """The trajectory's actions up to the one that is taken."""
        return self._replies


def _opened(sample: Sample, opening: np.ndarray) -> Sample:
    """Return a sample with the tokens before it, which have the log-probability 0 and the version of its first token."""
    given = len(opening)
    return msgspec.structs.replace(
        sample,
        tokens=np.concatenate([opening, sample.tokens]),
        logprobs=np.concatenate([np.zeros(given, np.float32), sample.logprobs]),
        versions=np.concatenate([np.repeat(sample.versions[:1], given), sample.versions]),
        top=None if sample.top is None else [*({},) * given, *sample.top],
        support=support.spliced(b"", given, given, sample.support, len(sample.tokens))
        if sample.support
        else sample.support,
    )


def _cut(node: Node) -> dict[str, float]:
    """The column "truncated": whether the token limit cut the action, or the context had no room for a further one."""
    return {"truncated": float(node.finish == "length" or "ended" in node.notes)}


def _entropies(top: list[dict[int, float]]) -> np.ndarray:
    """-sum p log p over the most probable tokens at each token, float32 [tokens]."""
    return np.array([-math.fsum(math.exp(x) * x for x in one.values()) for one in top], np.float32)


def _finite(scores: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in scores.items() if math.isfinite(value)}
