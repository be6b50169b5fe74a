"""What one tree asks of the workers: samples, judgements, passages, moves and replies."""

import asyncio
import copy
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from coppice.actors.environments import base
from coppice.actors.environments.base import POLICY, SPLIT, Environment, Spent, Task, Tools
from coppice.common import support, vision
from coppice.common.concurrency import gather
from coppice.common.dialogue import until
from coppice.scheduler.config import UNJUDGED, SchedulerConfig
from coppice.scheduler.dispatch.calls import Check, Place
from coppice.scheduler.dispatch.dispatcher import Dispatcher
from coppice.scheduler.dispatch.placement import Fleet, Generation
from coppice.scheduler.dispatch.weight_sync import Versions
from coppice.scheduler.growth import answers
from coppice.scheduler.growth.text import Shown, Text
from coppice.scheduler.growth.tree import Node, Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.ledger.node_codec import encode_node
from coppice.scheduler.telemetry.alerts import Faults, JudgeTally
from coppice.wire import messages as wire
from coppice.wire.faults import DataFault

Emit = Callable[[Tree, list[wire.Turn]], None]

ATTEMPTS = 5
"""How many attempts a tree gets when infrastructure faults end them."""
_NO_TOKENS = np.empty(0, np.int32)


class Runtime(msgspec.Struct, frozen=True):
    """What all trees of a run share."""

    dispatcher: Dispatcher
    journal: Journal
    text: Text
    environment: Environment
    settings: SchedulerConfig
    counts: Counter[str]
    emit: Emit
    most: int = 64
    """The largest number of samples in one generate call; more samples take several calls."""
    continuations: asyncio.Semaphore = msgspec.field(default_factory=lambda: asyncio.Semaphore(64))
    """Bounds the calls for continuations, which wait for it before their deadlines start."""
    fleet: Fleet = msgspec.field(default_factory=Fleet)
    judged: JudgeTally = msgspec.field(default_factory=JudgeTally)
    longest: int = 0
    """The most tokens of a prefix and its continuation; 0 sets no limit."""
    routed: bool = False
    """Whether the learner routes trained tokens as the engine did."""
    faults: Faults = msgspec.field(default_factory=lambda: Faults("scheduler"))
    versions: Versions = msgspec.field(default_factory=Versions)


class Services(Tools):
    """The calls of one tree, and its environment's tools. attempt: which of the ``ATTEMPTS`` runs,
    or 0. top: actions keep the entropy of the ``top`` most probable tokens at each token; 0: none.
    """

    attempt = 0
    top = 0
    _spent = Spent()
    _replies: tuple[str, ...] = ()

    def __init__(self, runtime: Runtime, task: Task, tree: Tree, rng: random.Random):
        self.runtime, self.task, self.tree, self.rng = runtime, task, tree, rng
        self.settings, self.environment = runtime.settings, runtime.environment

    async def sample(
        self, prefix: np.ndarray, n: int, stop: list[str], background: bool = False, kept: int = 0,
        limit: int = 0, experts_from: int = -1,
    ) -> tuple[list[wire.Sample], int]:  # fmt: skip
        """Sample ``n`` continuations of a prefix together. Also returns its cached tokens.
        background: for no trained trajectory. kept: tokens at the end of the prefix that count
        towards the action. limit: the most tokens of the action, 0 for the run's. experts_from: see
        ``wire.messages.Sampling``. Raises DataFault if the engine cuts the distribution and does
        not report what it left, or does not report experts."""
        most = self.runtime.most
        pictures = self.runtime.journal.pictures(prefix)
        trained = self.tree.split == "train" and not background
        requests = []
        for count in (min(most, n - first) for first in range(0, n, most)):
            sampling = self._sampling(stop, trained, kept, limit)
            sampling = msgspec.structs.replace(sampling, experts_from=experts_from)
            requests.append(wire.GenerateRequest(prefix, count, sampling, pictures))
        results = await gather(self._generate(request, background) for request in requests)
        samples = [sample for result in results for sample in result.samples]
        cuts = trained and requests[0].sampling.cuts
        if cuts and any(sample.support is None for sample in samples):
            raise DataFault(
                f"scheduler.top_p = {self.settings.top_p} and top_k = {self.settings.top_k} with an"
                " engine that does not report which tokens they left: expected Sample.support"
                " (docs/engines.md); set top_p = 1 and top_k = 0, or take another actors.engine"
            )
        if experts_from >= 0 and any(sample.experts is None for sample in samples):
            raise DataFault(
                "learner.routing_replay with an engine that does not report experts: expected"
                " Sample.experts (docs/learner.md); set routing_replay = false"
            )
        self.runtime.counts["generated_tokens"] += sum(len(sample.tokens) for sample in samples)
        return samples, results[0].cached_tokens

    async def sample_actions(
        self, prefix: np.ndarray, n: int, state: Any, background: bool = False,
        experts_from: int = -1,
    ) -> tuple[list[wire.Sample], int, int]:  # fmt: skip
        """Sample ``n`` actions of ``state``, None if unknown. Also returns the cached tokens, and
        the length of their opening (``Environment.beginning``), which was not sampled."""
        environment = self.environment
        opening = self.runtime.text.encode("" if state is None else environment.beginning(state))
        given, limit = len(opening), 0 if state is None else environment.most(state)
        begun = np.concatenate([prefix, opening]) if given else prefix
        stop = environment.stop if state is None else environment.stops(state)
        samples, cached = await self.sample(begun, n, stop, background, given, limit, experts_from)
        return [_opened(sample, opening) for sample in samples] if given else samples, cached, given

    async def judgements(self, judge: str, turns: list[wire.JudgedTurn]) -> list[wire.Judgement]:
        """The judge's answer to each turn; empty ones from the judge "none"."""
        if judge == UNJUDGED:
            return [wire.Judgement({}) for _ in turns]
        check = partial(answers.complete, "judgements", len(turns))
        return (await self._call(f"judge.{judge}", wire.JudgeRequest(turns), check)).judgements

    def rendered(self, state: Any, thinking: bool | None = None) -> tuple[Shown, Shown]:
        """The prompt in ``state``: what all turns share, and the rest. Where turns append to a
        prompt, all of it is shared; where nothing begins with one, nothing is."""
        messages, tools = self.environment.prompt(self.task, state), self.environment.tools(state)
        thinking = self.settings.thinking if thinking is None else thinking
        text = self.runtime.text.prompt(messages, thinking, tools)
        if not self.environment.begins_with_prompt:
            return Shown(""), Shown(text)
        head, mark, tail = text.partition(SPLIT)
        pictures: tuple[list[bytes], list[bytes]] = [], []
        split = False
        for part in vision.shown(messages):
            if isinstance(part, bytes):
                pictures[split].append(part)
            else:
                split = split or SPLIT in part
        if mark and self.environment.fresh:
            return Shown(head, tuple(pictures[0])), Shown(tail, tuple(pictures[1]))
        # without the mark, or where the chat template strips it, fresh prompts share nothing
        whole = Shown(head + tail.replace(SPLIT, ""), (*pictures[0], *pictures[1]))
        return (Shown(""), whole) if self.environment.fresh else (whole, Shown(""))

    def encode(self, part: Shown) -> np.ndarray:
        """int32 [tokens]: a part of a prompt, whose pictures enter the journal."""
        for png in part.pictures:
            vision.check(png)
        numbered = [(self.runtime.journal.picture(png), png) for png in part.pictures]
        return self.runtime.text.encode(part.text, numbered)

    # the tools of an environment (``actors.environments.base.Tools``)

    def during(self, spent: Spent, replies: tuple[str, ...]) -> "Services":
        """The tools of one step, which know what its action took and the replies before it."""
        step = copy.copy(self)
        step._spent, step._replies = spent, replies
        return step

    def spent(self) -> Spent:
        return self._spent

    def replies(self) -> tuple[str, ...]:
        return self._replies

    def check(self, transition: base.Transition) -> None:
        if transition.messages is None or transition.after is None:
            text = "".join(part.text for part in self.rendered(transition.state))
        else:
            text = self.runtime.text.after(_NO_TOKENS, transition.messages, self.settings.thinking)
        state = msgspec.to_builtins(transition.state)
        encode_node(Node(0, -1, "prompt", _NO_TOKENS, text, 0, state=state))
        self.runtime.text.encode(text)

    def count(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]]) -> int:
        text = self.runtime.text
        return len(text.encode(text.prompt(messages, self.settings.thinking, tools)))

    async def retrieve(self, query: str, topk: int) -> list[wire.Passage]:
        request = wire.RetrieveRequest([query], topk)
        result = await self._call("retrieve", request, partial(answers.complete, "passages", 1))
        self.runtime.counts["retrievals"] += 1
        return result.passages[0]

    async def play(self, player: str, state: Any) -> tuple[int, ...]:
        request = wire.PlayRequest(msgspec.to_builtins(state), self.rng.getrandbits(62))
        result = await self._call(f"player.{player}", request)
        self.runtime.counts["opponent_moves"] += 1
        return tuple(result.move)

    async def say(
        self, speaker: str, messages: list[dict[str, str]], max_tokens: int, stop: list[str]
    ) -> str:
        messages = [m | {"content": m["content"].replace(SPLIT, "")} for m in messages]
        self.runtime.counts["spoken_replies"] += 1
        if speaker != POLICY:
            drawing = self.settings.temperature, stop, self.rng.getrandbits(62)
            request = wire.SpeakRequest(messages, max_tokens, *drawing)
            return (await self._call(f"speaker.{speaker}", request)).text
        text = self.runtime.text
        prompt = text.encode(text.prompt(messages, self.settings.thinking))
        if self.runtime.longest:
            if (room := self.runtime.longest - len(prompt)) < 1:
                return ""
            max_tokens = min(max_tokens, room)
        sampling = msgspec.structs.replace(self._sampling(stop), max_tokens=max_tokens)
        result = await self._generate(wire.GenerateRequest(prompt, 1, sampling), False)
        tokens = result.samples[0].tokens
        self.runtime.counts["generated_tokens"] += len(tokens)
        return until(text.decode(tokens), stop)[0]

    async def _call(
        self, service: str, request: msgspec.Struct, check: Check | None = None,
        deadline: float | None = None, place: Place | None = None,
    ) -> Any:  # fmt: skip
        """Call a service through the dispatcher, with this tree named as the caller. Of calls that
        wait, those of the oldest tree go first."""
        attempt = f", attempt {self.attempt} of {ATTEMPTS}" if self.attempt else ""
        caller, seconds = f"tree {self.tree.id}{attempt}", self.settings.judge_deadline_s
        place, seconds = place or Place(self.tree.id), deadline or seconds
        return await self.runtime.dispatcher.call(
            service, request, deadline=seconds, place=place, caller=caller, check=check
        )

    async def _generate(
        self, request: wire.GenerateRequest, background: bool
    ) -> wire.GenerateResult:
        place = Generation(self.runtime.fleet, self.tree.id, request, background)
        vocabulary, versions = self.runtime.text.vocabulary, self.runtime.versions
        check = partial(answers.sampled, request, vocabulary, versions.proven, versions)
        deadline = self.settings.generate_deadline_s
        return await self._call("generate", request, check, deadline, place)

    def _sampling(
        self, stop: list[str], trained: bool = False, kept: int = 0, limit: int = 0
    ) -> wire.Sampling:
        s, seed = self.settings, self.rng.getrandbits(62)
        tokens = max(min(s.max_action_tokens, limit or s.max_action_tokens) - kept, 1)
        shape = tokens, s.temperature, s.top_p, s.top_k, stop, seed
        return wire.Sampling(*shape, top_logprobs=self.top, support=trained)


def _opened(sample: wire.Sample, opening: np.ndarray) -> wire.Sample:
    """A sample with its opening, of log-probability 0 and of the version of its first token."""
    given, left = len(opening), sample.support
    return msgspec.structs.replace(
        sample,
        tokens=np.concatenate([opening, sample.tokens]),
        logprobs=np.concatenate([np.zeros(given, np.float32), sample.logprobs]),
        versions=np.concatenate([np.repeat(sample.versions[:1], given), sample.versions]),
        top=None if sample.top is None else [*({},) * given, *sample.top],
        support=support.spliced(b"", given, given, left, len(sample.tokens)) if left else left,
    )
