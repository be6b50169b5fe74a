"""The embedded engine: continuous batching of a Hugging Face causal LM over a radix cache.

Weights are swapped between two steps: running samples keep their keys and values, their later
tokens carry the new version, and the prefix cache is emptied.
"""

import asyncio
import collections
import functools
import logging
import time
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import AutoConfig

from coppice.actors.config import ActorsConfig
from coppice.actors.engines import attend, decoder, weights
from coppice.actors.engines.base import check_request, check_tokens
from coppice.actors.engines.batch import RadixBatch
from coppice.actors.engines.cached import CachedBatch
from coppice.actors.engines.grammar import Grammar
from coppice.actors.engines.samples import ActiveRequest, Pictures, Running, StopStrings
from coppice.actors.engines.sampling import pick, uniforms
from coppice.actors.engines.thread import EngineThread
from coppice.common import vision
from coppice.common.concurrency import settle
from coppice.common.hardware import compute_dtype, free_memory, torch_device
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import GenerateRequest, GenerateResult, LoadRequest, LoadResult

log = logging.getLogger("actors.engines.local")


class LocalEngine:
    """Implements ``actors.engines.base.Engine`` for any causal language model: continuous batching
    over a radix cache for full attention (Llama, Qwen2.5-VL), else transformers' own caches.
    deterministic: requests are served one after the other, and each computes its whole prompt,
    because the rounding of a token's values depends on the tokens that are computed with it.

        engine = LocalEngine("models/smollm2", ActorsConfig(threads=2))
        await engine.start()
        result = await engine.generate(GenerateRequest(tokens, 4, Sampling(max_tokens=16)))
        await engine.close()
    """

    def __init__(
        self, model: str, config: ActorsConfig = ActorsConfig(), seed: int = 0,
        deterministic: bool = False,
    ):  # fmt: skip
        self.folder, self.config, self.seed = Path(model), config, seed
        self._alone = asyncio.Lock() if deterministic else None
        self.dtype: torch.dtype = getattr(torch, compute_dtype(config.dtype))
        self.device = torch_device()
        self.version = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.busy_s = 0.0
        self.batch: Any
        """A RadixBatch, or a CachedBatch for layers that it does not compute."""
        self._thread = EngineThread(
            lambda: bool(self.batch), self._step, lambda: self.batch.clear()
        )
        self.died, self.close = self._thread.died, self._thread.close
        self._loading = asyncio.Lock()
        self._held = ""
        """The digest of the whole weights that the model has, if it has any but the folder's."""
        self._requests = self._loads = 0

    async def start(self) -> None:
        """Load the model. Raises MemoryError when it does not fit, ValueError if unsupported."""
        await asyncio.to_thread(self._load_model)
        self._thread.tell(self._set_up_thread)
        self._thread.start()

    def _load_model(self) -> None:
        self._set_up_thread()
        settings = AutoConfig.from_pretrained(self.folder).get_text_config()
        self._check_fits(settings)
        self.longest = min(self.config.max_context, vision.context_of(settings))
        if not (others := not_computed(settings, self.longest)):
            self.model: Any = vision.load(self.folder, self.dtype, attend.ATTENTION)
            others = decoder.not_computed(self.model.to(self.device).eval())
        if others:
            self.model = vision.load(self.folder, self.dtype, None).to(self.device).eval()
        processor = vision.Vision.of(self.folder)
        self._pictures = Pictures(self.model, processor) if processor is not None else None
        self.tokenizer = tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        end = self.model.generation_config.eos_token_id
        self.end_tokens = frozenset(end if isinstance(end, list) else [] if end is None else [end])
        if others:
            log.warning(
                "%s: transformers generates, exactly and slowly, because the engine does not"
                " compute %s (docs/models.md)", self.folder, others,
            )  # fmt: skip
            budget = int(self.config.kv_cache_gib * 2**30)
            self.batch = CachedBatch(self.model, self.config.max_batch, budget, self.counts)
        else:
            args = self.model, self.config, self.longest, self.counts, self._pictures
            self.batch = RadixBatch(*args)
        self._stops = StopStrings(self.tokenizer)

    def _set_up_thread(self) -> None:
        """Set what torch keeps separately for each thread."""
        torch.set_grad_enabled(False)
        torch.set_num_threads(self.config.threads)

    def _check_fits(self, settings: Any) -> None:
        size = sum(path.stat().st_size for path in self.folder.glob("model*.safetensors"))
        if not size:
            raise FileNotFoundError(f"model folder {self.folder} holds no .safetensors file")
        stored = 2 if getattr(settings, "dtype", None) in (torch.bfloat16, torch.float16) else 4
        needed = size / stored * self.dtype.itemsize + self.config.kv_cache_gib * 2**30
        free = torch.cuda.mem_get_info()[0] if self.device == "cuda" else free_memory()
        if needed > free:
            raise MemoryError(
                f"{self.folder} needs {needed / 2**30:.1f} GiB (weights, keys and values) of"
                f" {free / 2**30:.1f}: use fewer processes or a smaller cache (actors.kv_cache_gib)"
            )

    @property
    def ended(self) -> str:
        """The reason why the engine no longer serves, "" while it does."""
        return self._thread.ended

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample ``request.n`` continuations."""
        check_request(request, self.config.max_batch, self.longest)
        self.batch.check(request)
        words = request.tokens if self._pictures is None else request.tokens[request.tokens >= 0]
        check_tokens(words, self.model.get_input_embeddings().num_embeddings, self.folder)
        if self._alone is None:
            return await self._generate(request)
        async with self._alone:
            try:
                return await self._generate(request)
            finally:
                await self._thread.run(self.batch.forget)

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        constraint, matcher = request.sampling.constraint, None
        if constraint is not None:
            matcher = await asyncio.to_thread(lambda: self._grammar.matcher(constraint))
        self._requests += 1
        positions = self._pictures.positions(request) if self._pictures is not None else None
        active = ActiveRequest(request, hash((self.seed, self._requests)), matcher, positions)
        self._thread.ask(active.future, lambda: self.batch.add(active))
        try:
            return await asyncio.wrap_future(active.future)
        except asyncio.CancelledError:
            self._thread.tell(lambda: self._abort(active))
            raise

    async def load(self, request: LoadRequest) -> LoadResult:
        """Verify the weights, then swap them between two steps, in the order of the calls."""
        start = time.monotonic()
        async with self._loading:
            published = Path(request.path), request.digest
            proven = await asyncio.to_thread(weights.verified, *published, self._held)
            await self._thread.run(lambda: self._swap(proven, request))
        return LoadResult(request.version, request.digest, time.monotonic() - start)

    def stats(self) -> dict[str, float]:
        """Return counters and gauges. kv_cache_bytes: without running requests."""
        return {**self.counts, **self.batch.stats(), "busy_s": self.busy_s, "version": self.version}

    @functools.cached_property
    def _grammar(self) -> Grammar:
        vocabulary = len(self.model.get_output_embeddings().weight)
        return Grammar(self.tokenizer, vocabulary, self.end_tokens)

    def _step(self) -> None:
        """Run one step and sample a token for every sample that has logits."""
        start = time.monotonic()
        try:
            decoding, logits = self.batch.step(self._loads)
            if logits is not None:
                self._sample(decoding, logits)
        finally:
            self.busy_s += time.monotonic() - start

    def _sample(self, running: list[Running], logits: torch.Tensor) -> None:
        """Sample one more token for each sample and remove the finished samples."""
        for row, one in enumerate(running):
            if one.matcher is not None:
                one.matcher.mask(logits[row])
        draws = uniforms([r.key for r in running], [len(r.tokens) for r in running])
        sampling = [r.owner.request.sampling for r in running]
        tokens, logprobs, top, left = pick(logits, sampling, draws)
        finished: list[tuple[Running, str]] = []
        for row, (one, token, logprob) in enumerate(zip(running, tokens, logprobs, strict=True)):
            one.tokens.append(token)
            one.logprobs.append(logprob)
            one.versions.append(self.version)
            if one.top is not None:
                one.top.append(top[row])
            if row in left:
                one.support.append(left[row])
            if finish := self._finish(one):
                finished.append((one, finish))
        self.counts["decoded_tokens"] += len(running)
        for one, finish in finished:
            self._leave(one, finish)

    def _finish(self, running: Running) -> str:
        sampling, token = running.owner.request.sampling, running.tokens[-1]
        if token in self.end_tokens:
            return "stop"
        if running.matcher is not None:
            running.matcher.accept(token)
            if running.matcher.problem:
                fault = DataFault(f"{sampling.constraint}: {running.matcher.problem}")
                settle(running.owner.future, fault)
            if running.matcher.done:
                return "stop"
        if sampling.stop and self._stops.found(running.tokens, sampling.stop):
            return "stop"
        return "length" if len(running.tokens) >= sampling.max_tokens else ""

    def _leave(self, running: Running, finish: Any) -> None:
        """Cache a sample's keys and values and free its row; answer with the last sample."""
        active = running.owner
        if finish != "abort":
            active.samples[running.index] = running.sample(finish)
        active.left -= 1
        self.batch.leave(running, finish != "abort" and active.version == self._loads)
        if active.left:
            return
        samples = [sample for sample in active.samples if sample is not None]
        if len(samples) == len(active.samples):
            result = GenerateResult(samples, len(active.prompt), active.cached, active.phases())
            settle(active.future, result)

    def _abort(self, active: ActiveRequest) -> None:
        self.batch.remove(active)
        for running in self.batch.running():
            if running.owner is active:
                self._leave(running, "abort")
        settle(active.future, InfrastructureFault("the caller has left"))

    def _swap(self, proven: weights.Version, request: LoadRequest) -> None:
        with decoder.plain(self.batch.products):
            weights.apply(self.model, self.folder, proven)
        self._held = request.digest if proven.kind == "full" else ""
        self.version = request.version
        self._loads += 1  # a number may come again with other weights
        self.batch.forget()
        if self._pictures is not None:
            self._pictures.forget()


def not_computed(settings: Any, longest: int) -> str:
    """Return which layers of a model RadixBatch does not compute for sequences up to ``longest``,
    "" if it computes all."""
    window = getattr(settings, "sliding_window", None)  # without kinds of layers it is of all
    if window and window < longest and not getattr(settings, "layer_types", None):
        return "sliding windows"
    kinds = set(getattr(settings, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    recurrent = ("conv_kernel", "mamba_d_conv", "conv_L_cache")
    if kinds or any(hasattr(settings, name) for name in recurrent):
        return ", ".join(sorted(kinds)) or "convolutions"
    ours = hasattr(settings, "num_key_value_heads") and not hasattr(settings, "kv_lora_rank")
    return "" if ours else "heads of other shapes than Llama's"
