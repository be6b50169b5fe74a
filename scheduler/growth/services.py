"""What one tree asks of the workers: samples of the policy, judgements, passages, moves and
replies. Each is one awaited call."""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from coppice.actors.environments.base import POLICY, SPLIT, Environment, Spent, Task, Tools
from coppice.common import support
from coppice.common.dialogue import until
from coppice.scheduler.config import UNJUDGED, SchedulerConfig
from coppice.scheduler.dispatch.calls import Check
from coppice.scheduler.dispatch.dispatcher import Dispatcher
from coppice.scheduler.dispatch.placement import Place
from coppice.scheduler.growth import answers
from coppice.scheduler.growth.crashes import Crashes
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.telemetry.fleet import Fleet
from coppice.scheduler.telemetry.judged import Judged
from coppice.scheduler.telemetry.terminal import Faults
from coppice.scheduler.telemetry.together import together
from coppice.wire.faults import DataFault
from coppice.wire.messages import (
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
    """What all contexts of a run share. most: the largest number of samples in one generate call;
    more samples take several calls. longest: the most tokens of a prefix and its continuation; 0
    sets no limit. proven, newest: return the policy version that every actor has proven at least,
    and the newest one.

    aside: bounds the calls for continuations, which wait for it before their deadlines start.
    fleet: places generate calls. judged: the tally of the run's judge. faults: says on the terminal
    what failed, once in a while. crashes: the tally of its episodes.
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
    crashes: Crashes = msgspec.field(default_factory=Crashes)
    longest: int = 0
    faults: Faults = msgspec.field(default_factory=lambda: Faults("scheduler"))
    proven: Callable[[], int] = lambda: 0
    newest: Callable[[], int] = lambda: sys.maxsize


class Services(Tools):
    """The calls on behalf of one tree, with its task, its randomness and the settings of its shop.

    attempt: which of the ``ATTEMPTS`` is running, or 0 if there is only one. top: actions that are
    sampled from now on keep the entropy of the ``top`` most probable tokens at each token; 0: none.
    """

    attempt = 0
    top = 0

    def __init__(self, shop: Shop, task: Task, tree: Tree, rng: random.Random):
        self.shop, self.settings, self.environment = shop, shop.settings, shop.environment
        self.task, self.tree, self.rng = task, tree, rng

    async def sample(
        self,
        prefix: np.ndarray,
        n: int,
        stop: list[str],
        beside: bool = False,
        kept: int = 0,
        limit: int = 0,
    ) -> tuple[list[Sample], int]:
        """Sample ``n`` continuations of a prefix together. Also returns how many tokens of the
        prefix the engine had cached.

        beside: these samples belong to no trained trajectory, so the calls of trained trajectories
        go first. kept: how many tokens at the end of the prefix count towards the length of the
        action. limit: the most tokens of the action if fewer than the run's, 0 for the run's limit.
        Raises DataFault if the learner could not score the samples, because the engine cuts the
        distribution and does not report what it left.
        """
        most = self.shop.most
        sizes = [min(most, n - first) for first in range(0, n, most)]
        pictures = self.shop.journal.pictures(prefix)
        trained = self.tree.split == "train" and not beside
        requests = [
            GenerateRequest(prefix, size, self._sampling(stop, trained, kept, limit), pictures)
            for size in sizes
        ]
        results = await together(self._generate(request, beside) for request in requests)
        samples = [sample for result in results for sample in result.samples]
        if (
            trained
            and requests[0].sampling.cuts
            and any(sample.support is None for sample in samples)
        ):
            raise DataFault(
                f"scheduler.top_p = {self.settings.top_p} and top_k = {self.settings.top_k} with an engine that does not report which tokens they"
                " left: expected Sample.support (docs/engines.md); set top_p = 1 and top_k = 0, or take another actors.engine"
            )
        self.shop.counts["generated_tokens"] += sum(len(sample.tokens) for sample in samples)
        return samples, results[0].cached_tokens

    async def acted(
        self, prefix: np.ndarray, n: int, state: Any, beside: bool = False
    ) -> tuple[list[Sample], int, int]:
        """Sample ``n`` actions of ``state``, None if unknown, whose prompt is ``prefix``. Also
        returns the cached tokens, and how many tokens at the beginning of each action are its
        opening (``Environment.beginning``), which was given and not sampled. beside: as in
        ``sample``."""
        environment = self.environment
        opening = self.shop.text.encode("" if state is None else environment.beginning(state))
        given, limit = len(opening), 0 if state is None else environment.most(state)
        begun = np.concatenate([prefix, opening]) if given else prefix
        stop = environment.stop if state is None else environment.stops(state)
        samples, cached = await self.sample(begun, n, stop, beside, given, limit)
        return [_opened(sample, opening) for sample in samples] if given else samples, cached, given

    async def retrieve(self, query: str, topk: int) -> list[Passage]:
        """The nearest passages (``actors.environments.base.Tools``)."""
        request = RetrieveRequest([query], topk)
        check = partial(answers.complete, "passages", 1)
        result: RetrieveResult = await self._call(
            "retrieve", request, self.settings.judge_deadline_s, check
        )
        self.shop.counts["retrievals"] += 1
        return result.passages[0]

    async def play(self, player: str, state: Any) -> tuple[int, ...]:
        """An opponent's move (``actors.environments.base.Tools``)."""
        request = PlayRequest(msgspec.to_builtins(state), self.rng.getrandbits(62))
        result: PlayResult = await self._call(
            f"player.{player}", request, self.settings.judge_deadline_s
        )
        self.shop.counts["opponent_moves"] += 1
        return tuple(result.move)

    async def say(
        self, speaker: str, messages: list[dict[str, str]], max_tokens: int, stop: list[str]
    ) -> str:
        """A reply in text (``actors.environments.base.Tools``). The policy's reply enters no tree,
        so it is never trained."""
        messages = [
            message | {"content": message["content"].replace(SPLIT, "")} for message in messages
        ]
        self.shop.counts["spoken_replies"] += 1
        if speaker != POLICY:
            request = SpeakRequest(
                messages, max_tokens, self.settings.temperature, stop, self.rng.getrandbits(62)
            )
            spoken: SpeakResult = await self._call(
                f"speaker.{speaker}", request, self.settings.judge_deadline_s
            )
            return spoken.text
        sampling = msgspec.structs.replace(self._sampling(stop), max_tokens=max_tokens)
        prompt = self.shop.text.encode(self.shop.text.prompt(messages, self.settings.thinking))
        result = await self._generate(GenerateRequest(prompt, 1, sampling), beside=False)
        tokens = result.samples[0].tokens
        self.shop.counts["generated_tokens"] += len(tokens)
        return until(self.shop.text.decode(tokens), stop)

    def count(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[dict[str, Any]]) -> int:
        """The tokens of a prompt (``actors.environments.base.Tools``)."""
        return len(
            self.shop.text.encode(self.shop.text.prompt(messages, self.settings.thinking, tools))
        )

    async def judgements(self, judge: str, turns: list[JudgedTurn]) -> list[Judgement]:
        """The judge's answer to each turn; empty ones from the judge "none"."""
        if judge == UNJUDGED:
            return [Judgement({}) for _ in turns]
        request, check = JudgeRequest(turns), partial(answers.judged, len(turns))
        result: JudgeResult = await self._call(
            f"judge.{judge}", request, self.settings.judge_deadline_s, check
        )
        return result.judgements

    async def _call(self, service: str, request: msgspec.Struct, deadline: float, check: Check | None = None, place: Place | None = None) -> Any:  # fmt: skip
        """Call a service through the dispatcher, with this tree named as the caller."""
        caller = f"tree {self.tree.id}" + (
            f", attempt {self.attempt} of {ATTEMPTS}" if self.attempt else ""
        )
        call = self.shop.dispatcher.call
        return await call(
            service, request, deadline=deadline, place=place, caller=caller, check=check
        )

    async def _generate(self, request: GenerateRequest, beside: bool) -> GenerateResult:
        shop, place = self.shop, self.shop.fleet.call(self.tree.id, request, beside)
        check = partial(answers.sampled, request, shop.text.vocabulary, shop.proven(), shop.newest)
        return await self._call(
            "generate", request, self.settings.generate_deadline_s, check, place
        )

    def _sampling(
        self, stop: list[str], trained: bool = False, kept: int = 0, limit: int = 0
    ) -> Sampling:
        s, seed = self.settings, self.rng.getrandbits(62)
        tokens = min(s.max_action_tokens, limit or s.max_action_tokens) - kept
        return Sampling(
            max(tokens, 1),
            s.temperature,
            s.top_p,
            s.top_k,
            stop,
            seed,
            top_logprobs=self.top,
            support=trained,
        )


class Taken(Tools):
    """The tools of one step: the tree's services, and what is known of the action that is taken
    (``Tools.spent``, ``Tools.replies``)."""

    def __init__(self, asked: Services, spent: Spent, replies: tuple[str, ...]):
        self.rng, self.retrieve, self.play, self.say = (
            asked.rng,
            asked.retrieve,
            asked.play,
            asked.say,
        )
        self.check, self.count = asked.check, asked.count
        self.spent, self.replies = lambda: spent, lambda: replies


def _opened(sample: Sample, opening: np.ndarray) -> Sample:
    """Return a sample with the tokens before it, which have the log-probability 0 and the version
    of its first token."""
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
