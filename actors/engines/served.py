"""What the engines share that ask a server: a child of the actor, or a running one. The policy
version salts each request's cache entries, so no request reads another version's cache."""

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from coppice.actors.config import ActorsConfig, ServedConfig, SGLangConfig
from coppice.actors.engines.base import check_request, check_tokens
from coppice.actors.engines.served_weights import ServedWeights
from coppice.actors.engines.servers import Http, Launched, Sampled, Servers
from coppice.common import support, vision
from coppice.common.concurrency import gather
from coppice.common.http import pause_s
from coppice.common.turns import Turns
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import GenerateRequest, GenerateResult, LoadRequest, LoadResult, Sample

log = logging.getLogger("actors.served")

LOOK_S = 5.0
"""Seconds between two looks at the router's list."""
PATIENCE_S = 120.0
"""Seconds of repeated requests. The router blocks a server that failed ten times for 60 s."""


class ServedEngine(ABC):
    """Implements ``actors.engines.base.Engine``.

    serving --whole weights--> requests wait --success--> serving; after a failure every request
    fails until a load succeeds."""

    kind: type[Http]

    def __init__(
        self, model: str, config: ActorsConfig = ActorsConfig(), place: int = 0, turns: str = ""
    ):
        self.folder, self.config = Path(model), config
        self.turns = Turns(Path(turns)) if turns else None
        served: ServedConfig = getattr(config, self.kind.section)
        if served.way == "server":
            inherited = [self.turns.held] if self.turns else []
            self.way: Servers = Launched(self.kind, model, config, inherited)
        else:
            self.way = Servers(self.kind, served.urls[place % len(served.urls)], model, config)
        # vLLM takes whole weights from a disk alone
        wanted = served.weights if isinstance(served, SGLangConfig) else "disk"
        self.weights = ServedWeights(self.way, self.folder, wanted)
        self.vision = vision.Vision.of(model)
        self.version = 0
        self.counts: Counter[str] = Counter()
        self.longest = config.max_context
        self._open = asyncio.Event()
        self._updating = asyncio.Lock()
        self._following: asyncio.Task[Any] | None = None
        self._broken = ""
        self._failures = 0
        self._in_flight = 0
        self._busy_s = 0.0
        self._busy_since = 0.0

    async def start(self) -> None:
        """Start the server or connect to it. Raises InfrastructureFault when this fails."""
        try:
            if self.turns is not None:
                await self.turns.enter()
            await self.way.start()
            await self.weights.start()
        except BaseException:
            await self.way.close()
            raise
        facts = self.weights.facts
        self.longest = min(self.config.max_context, facts.context or self.config.max_context)
        if facts.updated:  # an earlier run did it, or this actor before it was restarted
            self._broken = (
                f"it holds weight version {facts.version} from before and waits for this run's"
                " weights; start it anew for a new run"
            )
        self._open.set()
        if self.way.elastic:
            self._following = asyncio.create_task(self._follow())
        if self.turns is not None:
            self._following = asyncio.create_task(self._share(self.turns))

    async def _follow(self) -> None:
        """Behind a router, read its list every ``LOOK_S`` seconds. Generation goes on."""
        while True:
            await asyncio.sleep(LOOK_S)
            async with self._updating:
                try:
                    if not self._broken:  # otherwise the next load decides which servers take part
                        await self.weights.refresh()
                except InfrastructureFault as fault:
                    log.warning("%s", fault)

    async def _share(self, turns: Turns) -> None:
        """Leave the GPUs to the learner whenever it wants them. Requests wait, in the server with
        their tokens, and go on with the weights of before until the next load."""
        server = self.way.front
        while True:
            await turns.called()
            async with self._updating:
                begun = time.monotonic()
                self._open.clear()
                await server.pause()
                await server.hold_memory(False)
                turns.leave()
                await turns.enter()
                await server.hold_memory(True)
                if not self._broken:
                    await self.weights.confirm()
                await server.go_on()
                self._open.set()
                log.info("the GPUs were left to the learner for %.2f s", time.monotonic() - begun)

    async def close(self) -> None:
        """Unload this engine's adapters, and end a server that it started."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self.weights.unload(0)
        await self.way.close()

    async def died(self) -> str:
        """Return the reason when the server is gone. Raises what ended ``_following``."""
        dying = asyncio.ensure_future(self.way.died())
        watched = {dying, self._following or dying}
        try:
            ended, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            return ended.pop().result()
        finally:
            dying.cancel()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample ``request.n`` continuations. When one fails, all are aborted."""
        check_request(request, self.config.max_batch, self.longest)
        words = request.tokens if self.vision is None else request.tokens[request.tokens >= 0]
        check_tokens(words, self.weights.facts.vocabulary, self.folder)
        bodies = self._bodies(request)
        if not self._in_flight:
            self._busy_since = time.monotonic()
        self._in_flight += 1
        try:
            begun, prefix = time.monotonic(), list[Sampled]()
            if request.n > 1:  # the prefix is computed once, before all samples together
                prefix = await self._ask([self._prefix(request)])
            prefilled = time.monotonic()
            answers = await self._ask(bodies)
            ended = time.monotonic()
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._busy_s += time.monotonic() - self._busy_since
        if len(answers) != request.n:
            raise InfrastructureFault(
                f"{self.way.name} answered {len(answers)} samples, expected n = {request.n}"
            )
        self._check_read(request, answers)
        samples = [self._sample(answer, request) for answer in answers]
        phases = {"prefill": prefilled - begun, "decode": ended - prefilled} if prefix else {}
        rows = prefix + answers
        self.counts.update(
            prompt_tokens=rows[0].prompt,
            cached_tokens=rows[0].cached,
            prefilled_tokens=sum(row.prompt - row.cached for row in rows),
            decoded_tokens=sum(len(sample.tokens) for sample in samples),
        )
        return GenerateResult(samples, len(request.tokens), rows[0].cached, phases)

    async def load(self, request: LoadRequest) -> LoadResult:
        """Verify the weights, update every server, and prove the update. New requests wait only
        while whole weights are moved. After a failure every request fails until a load succeeds."""
        async with self._updating:
            start, version = time.monotonic(), request.version
            ready = await self.weights.prepare(request)
            if ready.chosen != "adapter":
                self._open.clear()
            try:
                proof = await self.weights.update(ready)
                # in the same step of the event loop as the weights
                self.version, self._broken = version, ""
            except BaseException as error:
                self._failures += 1
                self._broken = (
                    f"the update to version {version} failed ({error!r}); weights are unknown until"
                    " one succeeds"
                )
                raise
            finally:
                self._open.set()
            await self.weights.unload()
            return LoadResult(version, request.digest, time.monotonic() - start, proof)

    def stats(self) -> dict[str, float]:
        """Return counters and gauges. busy_s: seconds with at least one open request."""
        busy = self._busy_s + (time.monotonic() - self._busy_since if self._in_flight else 0.0)
        capacity = self.weights.facts.capacity
        gauges = {"version": self.version, "running": self._in_flight, "busy_s": busy}
        return {**self.counts, **gauges, "kv_capacity_tokens": capacity}

    @abstractmethod
    def _bodies(self, request: GenerateRequest) -> list[dict[str, Any]]:
        """Return what ``kind.generate`` takes. Raises DataFault for what it cannot serve."""

    @abstractmethod
    def _prefix(self, request: GenerateRequest) -> dict[str, Any]:
        """Return a body that has the server compute the prompt alone."""

    def _check_read(self, request: GenerateRequest, answers: list[Sampled]) -> None:
        """Raise unless the server read the tree's tokens: pictures may be tokenized anew."""
        text = request.tokens >= 0
        for answer in [] if text.all() else answers:
            read = np.asarray(answer.read)
            if read.shape != text.shape or (read != request.tokens)[text].any():
                raise InfrastructureFault(
                    f"{self.way.name} read {len(read)} tokens, expected the tree's {len(text)}:"
                    f" is it {self.kind.release} or newer, set up as in docs/engines.md#pictures?"
                )

    async def _ask(self, bodies: list[dict[str, Any]]) -> list[Sampled]:
        """Return the answers to all bodies. Behind a router each is a request of its own."""
        if not self.way.elastic:
            return await self._once(bodies)
        # one failure is the answer of the whole request
        several = await gather(self._again(body) for body in bodies)
        return [answer for answers in several for answer in answers]

    async def _again(self, body: dict[str, Any]) -> list[Sampled]:
        """Ask again when the server behind the router was leaving or not ready."""
        end, name, attempt = time.monotonic() + PATIENCE_S, self.kind.naming, 0
        while True:
            attempt += 1
            try:
                return await self._once([body | {name: f"{body[name]}-{attempt}"}])
            except InfrastructureFault:
                if self._broken or time.monotonic() > end:
                    raise
            self.counts["asked_again"] += 1
            await asyncio.sleep(min(LOOK_S, pause_s(attempt, 0.1, 0.0, random.random())))

    async def _once(self, bodies: list[dict[str, Any]]) -> list[Sampled]:
        """Return the answers, sampled with the version now in force or a newer one, with the
        version of each token. A request that nobody waits for is aborted."""
        await self._open.wait()
        if self._broken:
            raise InfrastructureFault(f"{self.way.name}: {self._broken}")
        version, named, failures = self.version, self.weights.named, self._failures
        adapter = self.weights.adapter
        try:
            answers = await self.way.front.generate(bodies, adapter or named, adapter)
        except BaseException as fault:
            names = [one[self.kind.naming] for one in bodies]
            aborts = (server.abort(names) for server in self.way.servers)
            await asyncio.shield(asyncio.gather(*aborts))
            # somebody else has restarted the server
            if adapter and self.kind.lost in str(fault):
                raise InfrastructureFault(
                    f"{self.way.name} lost adapter {adapter}: {fault}"
                ) from None
            raise
        # the server may have sampled this request after the failed update
        if self._failures != failures:
            raise InfrastructureFault(
                f"{self.way.name}: {self._broken or 'an update failed meanwhile'}"
            )
        for one in answers:
            # a failed update or the server itself aborted it; a part of an action is useless
            if one.finish == "abort":
                raise InfrastructureFault(
                    f"{self.way.name} aborted a request: {one.reason or 'no reason given'}"
                )
            one.versions = np.full(len(one.tokens), version, np.int32)
            if not adapter:  # one adapter serves a request from its first to its last token
                one.versions = self._versions(one, named)
        return answers

    def _versions(self, one: Sampled, named: str) -> np.ndarray:
        """Return each token's version, int32 [count]. Raises InfrastructureFault unless this actor
        has proven all weights that sampled them, the last of them no older than ``named``."""
        spans, count = one.spans, len(one.tokens)
        order = [self.weights.order(span["version"]) for span in spans] or [-1]
        if min(order) < 0 or order[-1] < self.weights.order(named):
            names = ", ".join(repr(span["version"]) for span in spans)
            raise InfrastructureFault(
                f"{self.way.name} sampled with weights named {names}, expected {named!r} or newer"
                " ones of this actor: somebody started or updated a server, or it has just joined"
            )
        versions = np.full(count, -1, np.int32)
        for span in spans:
            versions[span["start"] : span["end"]] = int(span["version"].partition("@")[0])
        if (versions < 0).any():
            raise InfrastructureFault(
                f"{self.way.name} did not say which version sampled each of {count} tokens: {spans}"
            )
        return versions

    def _sample(self, one: Sampled, request: GenerateRequest) -> Sample:
        sampling, tokens = request.sampling, np.array(one.tokens, np.int32)
        left = b"" if sampling.support else None
        logprobs, masks = np.array(one.logprobs, np.float32), one.masks or []
        if one.finish not in ("stop", "length") or len(masks) not in (0, len(tokens)):
            told = f"finish reason {one.finish!r}, {len(masks)} masks of {len(tokens)} tokens"
            raise self.way.front.strange(ValueError(told))
        if sampling.support and masks:
            whole = self.weights.facts.vocabulary
            left = support.encode([[] if len(ids) == whole else ids for ids in masks])
        if len(tokens) != len(logprobs):
            raise InfrastructureFault(
                f"{self.way.name} gave {len(tokens)} tokens and {len(logprobs)} log-probabilities:"
                f" is it {self.kind.release} or newer?"
            )
        parts = tokens, logprobs, one.versions, one.finish
        return Sample(*parts, support=left, experts=one.experts)  # pyright: ignore
