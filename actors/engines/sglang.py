"""SGLang as an engine: a server that the actor starts, or running servers.

SGLang's log-probabilities refer to the distribution after temperature. If top-p or top-k cut the
distribution, its sampling mask gives the log-probabilities of the rest; a constraint is applied
before both. At temperature 0 they refer to the untempered distribution. The policy version salts
each request's cache entries, so no request reads another version's cache.
"""

import asyncio
import base64
import itertools
import logging
import random
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.base import check_request, check_tokens
from coppice.actors.engines.sglang_api import Launched, Servers
from coppice.actors.engines.sglang_weights import SGLangWeights
from coppice.common import support, vision
from coppice.common.http import pause_s
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import (
    GenerateRequest,
    GenerateResult,
    LoadRequest,
    LoadResult,
    Sample,
    Sampling,
)

log = logging.getLogger("actors.sglang")

LOOK_S = 5.0
"""Seconds between two looks at the router's list."""
PATIENCE_S = 120.0
"""Seconds of repeated requests. The router blocks a server that failed ten times for 60 s."""
_FINISHES = ("stop", "length")
_ROWS = ("input_ids", "rid", "sampling_params", "image_data", "extra_key", "lora_path")
"""Fields of a body that have one value per sample, where there are several."""


class SGLangEngine:
    """Implements ``actors.engines.base.Engine``.

    serving --whole weights--> requests wait --success--> serving; after a failure every request
    fails until a load succeeds."""

    def __init__(self, model: str, config: ActorsConfig = ActorsConfig(), place: int = 0):
        self.folder, self.config = Path(model), config
        urls = config.sglang.urls
        if config.sglang.way == "server":
            self.way: Servers = Launched(model, config)
        else:
            self.way = Servers(urls[place % len(urls)], model, config)
        self.weights = SGLangWeights(self.way, self.folder, config.sglang)
        self._vision = vision.Vision.of(model)
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
        """Start SGLang or connect to it. Raises InfrastructureFault when this fails."""
        try:
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

    async def close(self) -> None:
        """Unload this engine's adapters, and end an SGLang that it started."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self.weights.unload(0)
        await self.way.close()

    async def died(self) -> str:
        """Return the reason when SGLang is gone. Raises what ended ``_follow``."""
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
        words = request.tokens if self._vision is None else request.tokens[request.tokens >= 0]
        check_tokens(words, self.weights.facts.vocabulary, self.folder)
        if request.sampling.top_logprobs:
            raise DataFault(
                f"top_logprobs {request.sampling.top_logprobs}: expected 0 with SGLang; ask the"
                ' embedded engine (actors.engine = "local", coppice serve --model)'
            )
        if request.sampling.cuts and self.way.elastic:
            raise DataFault(
                "scheduler.top_p and top_k behind a router, which drops the request for the tokens"
                " they left: set top_p = 1 and top_k = 0"
            )
        bodies = self._bodies(request)
        if not self._in_flight:
            self._busy_since = time.monotonic()
        self._in_flight += 1
        try:
            begun, prefix = time.monotonic(), list[dict[str, Any]]()
            if request.n > 1:  # the prefix is computed once, before all samples together
                nothing = {"max_new_tokens": 0, "temperature": 0.0}
                body = {"sampling_params": nothing, "rid": f"{bodies[0]['rid']}-prefix"}
                prefix = await self._ask([self._prompt(request) | body])
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
        samples = [self._sample(answer, request.sampling) for answer in answers]
        phases = {"prefill": prefilled - begun, "decode": ended - prefilled} if prefix else {}
        cached = self._count([answer["meta_info"] for answer in prefix + answers])
        self.counts["decoded_tokens"] += sum(len(sample.tokens) for sample in samples)
        return GenerateResult(samples, len(request.tokens), cached, phases)

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

    def _prompt(self, request: GenerateRequest) -> dict[str, Any]:
        """Return ids with one placeholder per picture, which SGLang repeats, and pictures."""
        tokens = request.tokens
        if self._vision is None or not (tokens < 0).any():
            return {"input_ids": tokens.tolist()}
        try:
            self._vision.sequence(tokens, request.images)
        except ValueError as error:
            raise DataFault(str(error)) from None
        shown = vision.runs(tokens)
        kept = tokens >= 0
        kept[[run.start for run in shown]] = True
        ids = np.where(tokens < 0, self._vision.token, tokens)[kept]
        return {
            "input_ids": ids.tolist(),
            "image_data": [vision.url(request.images[run.number]) for run in shown],
        }

    def _check_read(self, request: GenerateRequest, answers: list[dict[str, Any]]) -> None:
        """Raise unless SGLang read the tree's tokens: pictures may be tokenized anew."""
        text = request.tokens >= 0
        for answer in [] if text.all() else answers:
            read = np.asarray(answer.get("prompt_token_ids") or [])
            if read.shape != text.shape or (read != request.tokens)[text].any():
                raise InfrastructureFault(
                    f"{self.way.name} read {len(read)} tokens, expected the tree's {len(text)}:"
                    " is it sglang 0.5.23 or newer, set up as in docs/engines.md#pictures?"
                )

    def _bodies(self, request: GenerateRequest) -> list[dict[str, Any]]:
        """Return the bodies of POST /generate, one per sample."""
        sampling, prompt = request.sampling, self._prompt(request)
        settings: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
        }
        settings |= {"stop": sampling.stop} if sampling.stop else {}
        if sampling.constraint is not None:
            settings[sampling.constraint.kind] = sampling.constraint.text
        prompt |= {"return_logprob": True, "logprob_start_len": -1}
        prompt |= {"return_prompt_token_ids": True} if "image_data" in prompt else {}
        if sampling.experts_from >= 0:
            prompt |= {"return_routed_experts": True}
            prompt |= {"routed_experts_start_len": sampling.experts_from}
        if sampling.cuts:
            vocabulary, limit = self.weights.facts.vocabulary, self.weights.facts.mask
            prompt["return_sampling_mask"] = True
            # SGLang reports the mask only with a top-k; that of the vocabulary cuts nothing
            settings["top_k"] = sampling.top_k or vocabulary or limit + 1
            if settings["top_k"] > limit:
                raise DataFault(
                    f"top_k {sampling.top_k}: expected a top_k of at most {limit}, or actors."
                    f"sglang.arguments.sampling_mask_max_tokens = {vocabulary}"
                )
        bodies: list[dict[str, Any]] = []
        for i in range(request.n):
            # SGLang uses seeds only if it was started with enable_deterministic_inference
            seed = sampling.seed
            own = {} if seed is None else {"sampling_seed": (seed * 1000003 + i) % 2**31}
            name = f"coppice-{uuid.uuid4().hex}"
            bodies.append(prompt | {"rid": name, "sampling_params": settings | own})
        return bodies

    async def _ask(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return one answer per body. Behind a router each is a request of its own."""
        if not self.way.elastic:
            return await self._once(bodies)
        tasks = [asyncio.create_task(self._again(body)) for body in bodies]
        try:
            return [answer for answers in await asyncio.gather(*tasks) for answer in answers]
        except BaseException:  # one failure is the answer of the whole request
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _again(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Ask again when the server behind the router was leaving or not ready."""
        end = time.monotonic() + PATIENCE_S
        for attempt in itertools.count(1):
            try:
                return await self._once([body | {"rid": f"{body['rid']}-{attempt}"}])
            except InfrastructureFault:
                if self._broken or time.monotonic() > end:
                    raise
            self.counts["asked_again"] += 1
            await asyncio.sleep(min(LOOK_S, pause_s(attempt, 0.1, 0.0, random.random())))
        raise AssertionError

    async def _once(self, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the answers, sampled with the version now in force or a newer one, with the
        version of each token as "versions". A request that nobody waits for is aborted."""
        await self._open.wait()
        if self._broken:
            raise InfrastructureFault(f"{self.way.name}: {self._broken}")
        version, named, failures = self.version, self.weights.named, self._failures
        adapter = self.weights.adapter
        fields = {"extra_key": adapter or named} | ({"lora_path": adapter} if adapter else {})
        rows = [body | fields for body in bodies]
        body = rows[0]
        if len(rows) > 1:
            body = body | {key: [one[key] for one in rows] for key in _ROWS if key in body}
        try:
            answer = await self.way.front.call("/generate", body, self.way.front.timeout_s)
        except BaseException as fault:
            names = [one["rid"] for one in bodies]
            aborts = (server.abort(names) for server in self.way.servers)
            await asyncio.shield(asyncio.gather(*aborts))
            # somebody else has restarted the server
            if isinstance(fault, DataFault) and "never been loaded" in str(fault):
                raise InfrastructureFault(
                    f"{self.way.name} lost adapter {adapter}: {fault}"
                ) from None
            raise
        # the server may have sampled this request after the failed update
        if self._failures != failures:
            raise InfrastructureFault(
                f"{self.way.name}: {self._broken or 'an update failed meanwhile'}"
            )
        answers = answer if isinstance(answer, list) else [answer]
        for row in answers:
            if not isinstance(row, dict) or not isinstance(row.get("meta_info"), dict):
                raise self._strange(TypeError(f"{str(answer)[:200]}"))
            reason = row["meta_info"].get("finish_reason") or {}
            # a failed update or SGLang itself aborted it; a part of an action is useless
            if reason.get("type") == "abort":
                raise InfrastructureFault(
                    f"{self.way.name} aborted a request:"
                    f" {reason.get('message') or 'no reason given'}"
                )
            count = len(row.get("output_ids") or [])
            row["versions"] = np.full(count, version, np.int32)
            if not adapter:  # one adapter serves a request from its first to its last token
                row["versions"] = self._versions(row["meta_info"], count, named)
        return answers

    def _versions(self, meta: dict[str, Any], count: int, named: str) -> np.ndarray:
        """Return each token's version, int32 [count]. Raises InfrastructureFault unless this actor
        has proven all weights that sampled them, the last of them no older than ``named``."""
        spans: list[dict[str, Any]] = meta.get("weight_versions") or [
            {"version": meta.get("weight_version"), "start": 0, "end": count}
        ]
        order = [self.weights.order(span["version"]) for span in spans]
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

    def _sample(self, answer: dict[str, Any], sampling: Sampling) -> Sample:
        meta = answer["meta_info"]
        try:
            tokens = np.array(answer["output_ids"], np.int32)
            rows = meta.get("output_token_logprobs") or []
            logprobs = np.array([row[0] for row in rows], np.float32)
            left = b"" if sampling.support else None
            if sampling.cuts and len(tokens):
                logprobs = np.array(meta["output_token_sampling_logprobs"], np.float32).reshape(-1)
                if sampling.support:
                    masks = meta["output_token_sampling_mask"]
                    if len(masks) != len(tokens):
                        raise ValueError(f"{len(masks)} masks of {len(tokens)} tokens")
                    whole = self.weights.facts.vocabulary
                    left = support.encode([[] if len(ids) == whole else ids for ids in masks])
            finish = meta["finish_reason"]["type"]
            if finish not in _FINISHES:
                raise ValueError(f"finish reason {finish!r}")
            experts = None
            if sampling.experts_from >= 0 and (text := meta.get("routed_experts")):
                told = np.frombuffer(base64.b64decode(text), np.int32).astype(np.int16)
                rows = int(meta["prompt_tokens"]) + len(tokens) - 1 - sampling.experts_from
                experts = told.reshape(rows, -1)
        except (KeyError, TypeError, ValueError) as error:
            raise self._strange(error) from None
        if len(tokens) != len(logprobs):
            raise InfrastructureFault(
                f"{self.way.name} gave {len(tokens)} tokens and {len(logprobs)} log-probabilities:"
                " is it sglang 0.5.23 or newer?"
            )
        parts = tokens, logprobs, answer["versions"], finish
        return Sample(*parts, support=left, experts=experts)  # pyright: ignore

    def _count(self, rows: list[dict[str, Any]]) -> int:
        """Count a request's tokens, and return the cached ones of its prompt."""
        prompts = [int(row.get("prompt_tokens") or 0) for row in rows]
        cached = [int(row.get("cached_tokens") or 0) for row in rows]
        self.counts["prompt_tokens"] += prompts[0]
        self.counts["cached_tokens"] += cached[0]
        self.counts["prefilled_tokens"] += sum(prompts) - sum(cached)
        return cached[0]

    def _strange(self, error: Exception) -> InfrastructureFault:
        return InfrastructureFault(
            f"{self.way.name} answered what /generate of sglang 0.5.23 does not"
            f" ({type(error).__name__}: {error})"
        )
