"""The embedded engine: continuous batching of a Hugging Face causal LM over a radix cache.

Weights are swapped between two steps: running samples keep their keys and values, their later
tokens carry the new version, and the prefix cache is emptied.
"""

import asyncio
import collections
import functools
import time
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from transformers import AutoConfig

from coppice.actors.config import ActorsConfig
from coppice.actors.engines import attend, decoder, weights
from coppice.actors.engines.admission import Admission
from coppice.actors.engines.base import check_request, check_tokens
from coppice.actors.engines.grammar import Grammar
from coppice.actors.engines.memory import KVMemory, Stretch
from coppice.actors.engines.samples import ActiveRequest, Pictures, Running, StopStrings
from coppice.actors.engines.sampling import pick, uniforms
from coppice.actors.engines.thread import EngineThread
from coppice.common import vision
from coppice.common.hardware import compute_dtype, free_memory, torch_device
from coppice.wire.faults import DataFault, Fault, InfrastructureFault
from coppice.wire.messages import GenerateRequest, GenerateResult, LoadRequest, LoadResult


class LocalEngine:
    """Implements ``actors.engines.base.Engine`` for models with full attention, such as Llama,
    Qwen2, Qwen3 and Qwen2.5-VL. deterministic: requests are served one after the other, and each
    computes its whole prompt, because the rounding of a token's values depends on the tokens that
    are computed with it.

        engine = LocalEngine("models/smollm2", ActorsConfig(threads=2))
        await engine.start()
        result = await engine.generate(GenerateRequest(tokens, 4, Sampling(max_tokens=16)))
        await engine.close()
    """

    def __init__(
        self,
        model: str,
        config: ActorsConfig = ActorsConfig(),
        seed: int = 0,
        deterministic: bool = False,
    ):
        self.folder, self.config, self.seed = Path(model), config, seed
        self._alone = asyncio.Lock() if deterministic else None
        self.dtype: torch.dtype = getattr(torch, compute_dtype(config.dtype))
        self.device = torch_device()
        self.version = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.busy_s = 0.0
        self._running = 0
        self._thread = EngineThread(self._has_work, self._timed_step, self._free)
        self._loading = asyncio.Lock()
        self._requests = 0

    async def start(self) -> None:
        """Load the model. Raises MemoryError when it does not fit, ValueError if unsupported."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._load_model)
        self._thread.tell(self._set_up_thread)
        self._thread.start()

    def _load_model(self) -> None:
        self._set_up_thread()
        settings = AutoConfig.from_pretrained(self.folder).get_text_config()
        self._check_fits(settings)
        self.model: Any = vision.load(self.folder, self.dtype, attend.ATTENTION).to(self.device)
        self.model.eval()
        processor = vision.Vision.of(self.folder)
        self._pictures = Pictures(self.model, processor) if processor is not None else None
        self.tokenizer = tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        end = self.model.generation_config.eos_token_id
        self.end_tokens = frozenset(end if isinstance(end, list) else [] if end is None else [end])
        self.longest = min(self.config.max_context, settings.max_position_embeddings)
        heads = settings.num_key_value_heads
        width = getattr(settings, "head_dim", None)
        width = width or settings.hidden_size // settings.num_attention_heads
        shape = (settings.num_hidden_layers, 2, heads, width)
        token = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.memory = KVMemory(token, int(self.config.kv_cache_gib * 2**30), self.longest)
        self.cache = self.memory.cache
        self._admission = Admission(
            self.memory, self.config.max_batch, self.config.prefill_tokens, self.counts
        )
        self._decoder = decoder.decoder(self.model, self.longest)
        self._head = decoder.Head(self.model)
        self._stops = StopStrings(self.tokenizer)

    def _set_up_thread(self) -> None:
        """Set what torch keeps separately for each thread."""
        torch.set_grad_enabled(False)
        torch.set_num_threads(self.config.threads)

    def _check_fits(self, settings: Any) -> None:
        kinds = set(getattr(settings, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(
                f"{self.folder}: layers of kind {sorted(kinds)}; the local engine has full"
                " attention only. Serve this model with another engine"
            )
        ours = hasattr(settings, "num_key_value_heads") and not hasattr(settings, "kv_lora_rank")
        if not ours:
            raise ValueError(
                f"{self.folder}: {settings.model_type} has no key and value heads of one width, as"
                " Llama has; serve this model with another engine (docs/models.md)"
            )
        size = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
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

    async def died(self) -> str:
        """Return the reason when an error has ended the thread; never return after ``close``."""
        return await self._thread.died()

    @property
    def ended(self) -> str:
        """The reason why the engine no longer serves, "" while it does."""
        return self._thread.ended

    async def close(self) -> None:
        """Stop the thread and abort open requests."""
        await self._thread.close()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample ``request.n`` continuations."""
        self._check(request)
        if self._alone is None:
            return await self._generate(request)
        async with self._alone:
            try:
                return await self._generate(request)
            finally:
                await self._thread.run(self._forget)

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        constraint, matcher = request.sampling.constraint, None
        if constraint is not None:
            matcher = await asyncio.to_thread(lambda: self._grammar.matcher(constraint))
        self._requests += 1
        positions = self._pictures.positions(request) if self._pictures is not None else None
        seed = hash((self.seed, self._requests))
        active = ActiveRequest(request, seed, matcher, positions)
        self._thread.ask(active.future, lambda: self._admission.waiting.append(active))
        try:
            return await asyncio.wrap_future(active.future)
        except asyncio.CancelledError:
            self._thread.tell(lambda: self._abort(active))
            raise

    async def load(self, request: LoadRequest) -> LoadResult:
        """Verify the weights, then swap them between two steps, in the order of the calls."""
        start = time.monotonic()
        async with self._loading:
            kind, path = await asyncio.to_thread(
                weights.verified_file, Path(request.path), request.digest
            )
            await self._thread.run(lambda: self._swap(kind, path, request.version))
        return LoadResult(request.version, request.digest, time.monotonic() - start)

    def stats(self) -> dict[str, float]:
        """Return counters and gauges. kv_cache_bytes: without running requests."""
        return {
            **self.counts,
            "evicted_tokens": self.cache.evicted_tokens,
            "busy_s": self.busy_s,
            "version": self.version,
            "running": self._running,
            "kv_cache_bytes": self.cache.bytes,
            "kv_running_bytes": self.memory.running_bytes,
            "kv_capacity_tokens": self.cache.budget // self.memory.token.nbytes,
        }

    def _check(self, request: GenerateRequest) -> None:
        sampling, prompt = request.sampling, len(request.tokens)
        check_request(request, self.config.max_batch, self.longest)
        needed = self.memory.needed(prompt, request.n, sampling.max_tokens)
        if needed > self.memory.budget:
            raise DataFault(
                f"{request.n} samples of {sampling.max_tokens} need {needed / 2**30:.4f} GiB of"
                f" keys and values: expected at most actors.kv_cache_gib={self.config.kv_cache_gib}"
            )
        words = request.tokens
        if self._pictures is not None:
            words = words[words >= 0]
        check_tokens(words, self.model.get_input_embeddings().num_embeddings, self.folder)

    @functools.cached_property
    def _grammar(self) -> Grammar:
        vocabulary = len(self.model.get_output_embeddings().weight)
        return Grammar(self.tokenizer, vocabulary, self.end_tokens)

    def _has_work(self) -> bool:
        return bool(self._admission) or self._running > 0

    def _timed_step(self) -> None:
        start = time.monotonic()
        try:
            self._step()
        finally:
            self.busy_s += time.monotonic() - start

    def _free(self) -> None:
        """Free the memory of all requests after a failure."""
        self._admission.clear()
        self.memory.clear()
        self._running = 0

    def _decoding(self) -> list[Running]:
        """Return the running samples in the order of their rows."""
        return [tail.owner for shelf in self.memory.tails.values() for tail in shelf.held]

    def _step(self) -> None:
        """Run one forward over decoding rows and chunks; sample a token for every sample."""
        self._admission.admit(self.version)
        chunks = self._admission.chunks()
        decoding = self._decoding()
        hidden = self._forward(decoding, chunks) if decoding or chunks else None
        for running in decoding:
            running.tail.length += 1
        end, ends = len(decoding), dict[Stretch, int]()
        for chunk in chunks:
            chunk.prefix.length += chunk.count
            end = ends[chunk.prefix] = end + chunk.count
        rows = [hidden[: len(decoding)]] if hidden is not None and decoding else []
        copies = [1] * len(decoding)
        for active in self._admission.ready():
            if active.ending is None:
                assert hidden is not None
                active.ending = hidden[ends[active.prefix] - 1].clone()
            rows.append(active.ending[None])
            copies.append(active.request.n)
            decoding += self._branch(active)
        if rows:
            logits = self._head.logits(torch.cat(rows))
            if len(decoding) > len(logits):
                logits = logits.repeat_interleave(torch.tensor(copies, device=logits.device), 0)
            self._sample(decoding, logits)

    def _forward(self, decoding: list[Running], chunks: list[attend.Chunk]) -> torch.Tensor:
        """Return final hidden states [rows, hidden]: decoding samples, then chunks' tokens."""
        plan = attend.AttentionPlan(
            [shelf for shelf in self.memory.tails.values() if shelf.held], chunks
        )
        tokens: list[Any] = [np.array([r.tokens[-1] for r in decoding], np.int64)]
        positions = [np.array([r.position for r in decoding], np.int64)]
        for chunk in chunks:
            start, end = chunk.prefix.length, chunk.prefix.length + chunk.count
            tokens.append(chunk.prefix.owner.prompt[start:end])
            positions.append(chunk.prefix.owner.where(start, end))
        if any(part.ndim > 1 for part in positions):
            positions = [np.broadcast_to(part, (3, part.shape[-1])) for part in positions]
        ids, where = (
            torch.from_numpy(np.concatenate(parts, -1)).to(self.device)
            for parts in (tokens, positions)
        )
        features = self._pictures.features(chunks) if self._pictures is not None else None
        return self._decoder.forward(ids, where, plan, features)

    def _branch(self, active: ActiveRequest) -> list[Running]:
        """Keep the prompt in the cache and start the request's samples."""
        # keys and values of an older version must not enter the new version's cache
        if active.version == self.version:

            def read(start: int, end: int) -> torch.Tensor:
                return active.prefix.view(start, end).clone()

            self.memory.keep(active.prompt, read, active.ending)
        active.clock["decode"] = time.monotonic()
        branches: list[Running] = []
        for index in range(active.request.n):
            tail = active.tails.put(None)
            tail.owner = Running(active, index, tail)
            branches.append(tail.owner)
        self._running += len(branches)
        return branches

    def _sample(self, running: list[Running], logits: torch.Tensor) -> None:
        """Sample one more token for each sample and remove the finished samples."""
        for row, one in enumerate(running):
            if one.matcher is not None:
                one.matcher.mask(logits[row])
        draws = uniforms([r.key for r in running], [len(r.tokens) for r in running])
        tokens, logprobs, top, left = pick(
            logits, [r.owner.request.sampling for r in running], draws
        )
        finished: list[tuple[Running, str]] = []
        for row, (one, token, logprob) in enumerate(zip(running, tokens, logprobs, strict=True)):
            one.tokens.append(token)
            one.logprobs.append(logprob)
            one.versions.append(self.version)
            if one.top is not None:
                one.top.append(top[row])
            if row in left:
                one.support.append(left[row])
            finish = self._finish(one)
            if finish:
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
                _settle(running.owner, fault)
            if running.matcher.done:
                return "stop"
        if sampling.stop and self._stops.found(running.tokens, sampling.stop):
            return "stop"
        return "length" if len(running.tokens) >= sampling.max_tokens else ""

    def _leave(self, running: Running, finish: Any) -> None:
        """Cache a sample's keys and values and free its row; answer with the last sample."""
        active = running.owner
        if finish != "abort":
            if active.version == self.version:
                context = running.context()
                self.memory.keep(context, running.read)
                self._admission.ideal.insert(context)
            active.samples[running.index] = running.sample(finish)
        running.tail.shelf.drop(running.tail)
        self._running -= 1
        self._admission.places += 1
        active.left -= 1
        if active.left:
            return
        active.prefix.shelf.drop(active.prefix)
        samples = [sample for sample in active.samples if sample is not None]
        if len(samples) == len(active.samples):
            phases = active.phases()
            _settle(active, GenerateResult(samples, len(active.prompt), active.cached, phases))

    def _abort(self, active: ActiveRequest) -> None:
        self._admission.remove(active)
        for running in self._decoding():
            if running.owner is active:
                self._leave(running, "abort")
        _settle(active, InfrastructureFault("the caller has left"))

    def _swap(self, kind: str, path: Path, version: int) -> None:
        weights.apply(self.model, self.folder, kind, path)
        self.version = version
        self._forget()
        if self._pictures is not None:
            self._pictures.forget()

    def _forget(self) -> None:
        """Empty the prefix cache."""
        self.cache.clear()
        self._admission.ideal.clear()


def _settle(active: ActiveRequest, outcome: GenerateResult | Fault) -> None:
    """Answer or fail a request, unless this was done before."""
    if active.future.done():
        return
    if isinstance(outcome, Fault):
        active.future.set_exception(outcome)
    else:
        active.future.set_result(outcome)
