"""The embedded engine: continuous batching of a Hugging Face causal LM over a radix cache, exact on any machine.

A prompt's new tokens are prefilled once, whatever the number of samples and children; running samples decode together, one
token a step. Weights are swapped between two steps: running samples keep the keys and values they have, their later tokens carry
the new version, and the prefix cache starts anew, so no request reads another version's cache.

All compute runs on one thread; the coroutines only pass messages to it.
"""

import asyncio
import collections
import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tokenizers
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from actors.config import ActorsConfig
from actors.engines import slots as slot_memory
from actors.engines import weights
from actors.engines.radix import RadixCache, common_length
from actors.engines.sampling import pick
from wire.faults import DataFault, InfrastructureFault
from wire.hardware import compute_dtype
from wire.messages import (
    GenerateRequest,
    GenerateResult,
    LoadRequest,
    LoadResult,
    Sample,
    ScoreRequest,
    ScoreResult,
)

_STOP_TAIL = 16
"""Sampled tokens decoded to look for a stop string: enough for any tag, few enough to cost nothing."""


class Waiting:
    """A request until its last sample is done."""

    def __init__(self, request: GenerateRequest, seed: int):
        self.request = request
        self.prompt: list[int] = request.tokens.tolist()
        self.future: Future[GenerateResult] = Future()
        self.samples: list[Sample | None] = [None] * request.n
        self.cached = 0
        base = request.sampling.seed if request.sampling.seed is not None else seed
        self.random = [random.Random(f"{base}/{index}") for index in range(request.n)]

    def answer(self, result: GenerateResult) -> None:
        """Give the result, unless the caller has left."""
        with contextlib.suppress(InvalidStateError):  # a caller may leave at any moment, on its own thread
            self.future.set_result(result)

    def fail(self, fault: InfrastructureFault) -> None:
        """Give the fault, unless the caller has left or was answered."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(fault)


class Running:
    """One sample that decodes; its slot is its place in the engine's list."""

    def __init__(self, owner: Waiting, index: int):
        self.owner, self.index = owner, index
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []

    @property
    def position(self) -> int:
        """Where the last token stands (it is not in the slot yet)."""
        return len(self.owner.prompt) + len(self.tokens) - 1

    def context(self) -> list[int]:
        """The tokens whose keys and values are in the slot."""
        return self.owner.prompt + self.tokens[:-1]


class LocalEngine:
    """Implements ``actors.engines.base.Engine`` for Llama, Qwen2, Qwen3 and models built like them."""

    def __init__(self, model: str, config: ActorsConfig = ActorsConfig(), seed: int = 0):
        self.folder, self.config, self.seed = Path(model), config, seed
        self.dtype: torch.dtype = getattr(torch, compute_dtype(config.dtype))
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.version = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.busy_s = 0.0
        self._commands: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._waiting: collections.deque[Waiting] = collections.deque()
        self._running: list[Running] = []
        self._seen: set[int] = set()
        self._thread: threading.Thread | None = None
        self._requests = 0

    # ------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Load the model. Raises MemoryError before loading when it does not fit, ValueError for an unsupported model."""
        await asyncio.to_thread(self._load_model)
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def _load_model(self) -> None:
        torch.set_num_threads(self.config.threads)
        torch.set_grad_enabled(False)
        settings = AutoConfig.from_pretrained(self.folder)
        self._check_fits(settings)
        model: Any = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=self.dtype, attn_implementation=slot_memory.ATTENTION
        )
        self.model: Any = model.to(self.device)
        self.model.eval()
        self.tokenizer = tokenizers.Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        end = self.model.generation_config.eos_token_id
        self.end_tokens = frozenset(end if isinstance(end, list) else [] if end is None else [end])
        self.longest = min(self.config.max_context, settings.max_position_embeddings)
        heads = settings.num_key_value_heads
        width = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
        self.slots = slot_memory.Slots(
            settings.num_hidden_layers, heads, width, self.config.max_batch, self.longest, self.dtype, self.device
        )
        self.cache = RadixCache(int(self.config.kv_cache_gib * 2**30))

    def _check_fits(self, settings: Any) -> None:
        kinds = set(getattr(settings, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(
                f"{self.folder}: layers of kind {sorted(kinds)}; the local engine has full attention only."
                " Serve this model with another engine"
            )
        size = sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))
        stored = 2 if getattr(settings, "dtype", None) in (torch.bfloat16, torch.float16) else 4
        needed = size / stored * (2 if self.dtype == torch.bfloat16 else 4) + self.config.kv_cache_gib * 2**30
        free = torch.cuda.mem_get_info()[0] if self.device == "cuda" else psutil.virtual_memory().available
        if not size:
            raise FileNotFoundError(f"model folder {self.folder} holds no .safetensors file")
        if needed > free:
            raise MemoryError(
                f"{self.folder} needs about {needed / 2**30:.1f} GiB (weights and prefix cache), {free / 2**30:.1f} GiB are"
                " free: use a smaller model, fewer actors or a smaller actors.kv_cache_gib"
            )

    async def close(self) -> None:
        """Stop the thread; open requests are aborted."""
        self._commands.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    # ------------------------------------------------------------------------------------------ requests

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """``request.n`` continuations of one prefix; cancelling the coroutine aborts them."""
        sampling, prompt = request.sampling, len(request.tokens)
        if not 1 <= request.n <= self.config.max_batch:
            raise DataFault(f"n={request.n}: expected 1 to actors.max_batch={self.config.max_batch}")
        if prompt < 1 or sampling.max_tokens < 1 or prompt + sampling.max_tokens > self.longest:
            raise DataFault(
                f"a prompt of {prompt} tokens and {sampling.max_tokens} new ones: expected at least one of each and at most"
                f" {self.longest} together (actors.max_context)"
            )
        if not (sampling.temperature == 0 or sampling.temperature >= 1e-3) or not 0 < sampling.top_p <= 1:
            raise DataFault(
                f"temperature {sampling.temperature} and top_p {sampling.top_p}: expected 0 (greedy) or at least 0.001,"
                " and a top_p in (0, 1]"
            )
        self._check_tokens(request.tokens)
        self._requests += 1
        waiting = Waiting(request, hash((self.seed, self._requests)))
        self._commands.put(lambda: self._waiting.append(waiting))
        try:
            return await asyncio.wrap_future(waiting.future)
        except asyncio.CancelledError:
            self._commands.put(lambda: self._abort(waiting))
            raise

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Log-probabilities of given tokens by one plain forward at temperature 1."""
        if not len(request.tokens):
            raise DataFault("0 tokens to score: expected at least one")
        self._check_tokens(request.tokens)
        return await self._on_thread(lambda: self._score(request))

    async def load(self, request: LoadRequest) -> LoadResult:
        """Verify, then swap between two steps."""
        start = time.monotonic()
        kind, path = await asyncio.to_thread(weights.verified_file, Path(request.path), request.digest)
        await self._on_thread(lambda: self._swap(kind, path, request.version))
        return LoadResult(request.version, request.digest, time.monotonic() - start)

    def stats(self) -> dict[str, float]:
        """Counters; see ``actors.engines.base``."""
        return {
            **self.counts,
            "busy_s": self.busy_s,
            "version": self.version,
            "running": len(self._running),
            "kv_cache_bytes": self.cache.bytes,
        }

    def _check_tokens(self, tokens: np.ndarray) -> None:
        """An id beyond the embedding would fail inside the model, for every request of the step."""
        rows = self.model.get_input_embeddings().num_embeddings
        if tokens.min() < 0 or tokens.max() >= rows:
            raise DataFault(
                f"token ids from {tokens.min()} to {tokens.max()}: expected 0 to {rows - 1}, the ids of {self.folder};"
                " the request was made with another model's tokenizer"
            )

    async def _on_thread(self, work: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():  # its caller has left
                return
            try:
                future.set_result(work())
            except (RuntimeError, KeyError, ValueError, OSError) as error:
                future.set_exception(InfrastructureFault(f"{type(error).__name__}: {error}"))

        self._commands.put(run)
        return await asyncio.wrap_future(future)

    # ------------------------------------------------------------------------------------------ the engine thread

    def _work(self) -> None:
        torch.set_grad_enabled(False)
        torch.set_num_threads(self.config.threads)
        while True:
            idle = not self._waiting and not self._running
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                command = self._timed_step
            if command is None:
                self._fail_open("engine closed")
                return
            command()

    def _timed_step(self) -> None:
        start = time.monotonic()
        try:
            self._step()
        except RuntimeError as error:  # out of memory, or a model that fails: every open request learns of it
            self._fail_open(f"engine step failed: {error}")
        self.busy_s += time.monotonic() - start

    def _fail_open(self, reason: str) -> None:
        for waiting in {r.owner for r in self._running} | set(self._waiting):
            waiting.fail(InfrastructureFault(reason))
        self._running.clear()
        self._waiting.clear()

    def _step(self) -> None:
        decoding = len(self._running)
        admitted = self._admit()
        prefills = [prefill for _, prefill, _ in admitted]
        self.slots.reserve(max([r.position + 1 for r in self._running] + [p.start + p.count for p in prefills]))
        for _, prefill, pieces in admitted:
            end = 0
            for piece in pieces:
                end = self.slots.write(prefill.slot, end, piece[:, :, :, : prefill.start - end])
        decoders = self._running[:decoding]
        plan = slot_memory.Plan(self.slots, [r.position for r in decoders], prefills)
        tokens = [r.tokens[-1] for r in decoders]
        positions = [r.position for r in decoders]
        for waiting, prefill, _ in admitted:
            tokens += waiting.prompt[prefill.start :]
            positions += range(prefill.start, prefill.start + prefill.count)
        last = list(range(decoding))
        for prefill in prefills:
            last.append((last[-1] if last else -1) + prefill.count)
        logits = self._forward(tokens, positions, last, plan)
        row_of: list[int] = list(range(decoding))
        for offset, (waiting, prefill, _) in enumerate(admitted):
            self._branch(waiting, prefill)
            row_of += [decoding + offset] * waiting.request.n
        self._sample(logits[row_of])

    def _forward(
        self, tokens: list[int], positions: list[int], rows: list[int], plan: slot_memory.Plan
    ) -> torch.Tensor:
        """Logits [rows, vocabulary]; only the given rows pass the language-model head."""
        ids = torch.tensor([tokens], device=self.device)
        where = torch.tensor([positions], device=self.device)
        hidden = self.model.get_decoder()(input_ids=ids, position_ids=where, use_cache=False, plan=plan)
        return self.model.get_output_embeddings()(hidden.last_hidden_state[0, rows])

    def _admit(self) -> list[tuple[Waiting, slot_memory.Prefill, list[torch.Tensor]]]:
        """Requests that start now, each with its first slot and its cached pieces.

        One whose prefix another admitted request is about to compute waits a step, so that it is computed once.
        """
        admitted: list[tuple[Waiting, slot_memory.Prefill, list[torch.Tensor]]] = []
        budget = self.config.prefill_tokens
        for waiting in list(self._waiting):
            first = len(self._running)
            if first + waiting.request.n > self.config.max_batch or budget <= 0:
                break
            matched, pieces = self.cache.match(waiting.prompt)
            start = min(matched, len(waiting.prompt) - 1)  # the last token's logits are needed in any case
            if any(common_length(waiting.prompt, other.prompt) > start + 1 for other, _, _ in admitted):
                continue
            self._waiting.remove(waiting)
            prefill = slot_memory.Prefill(first, start, len(waiting.prompt) - start)
            admitted.append((waiting, prefill, pieces))
            self._running += [Running(waiting, index) for index in range(waiting.request.n)]
            budget -= prefill.count
            waiting.cached = start
            self._count_prompt(waiting.prompt, start)
        return admitted

    def _count_prompt(self, prompt: list[int], cached: int) -> None:
        self.counts["prompt_tokens"] += len(prompt)
        self.counts["cached_tokens"] += cached
        self.counts["prefilled_tokens"] += len(prompt) - cached
        self.counts["ideal_prefill_tokens"] += self._note(prompt)

    def _note(self, tokens: list[int]) -> int:
        """Remember every prefix of ``tokens``; how many were new in this version."""
        before, key = len(self._seen), 0
        for token in tokens:
            key = hash((key, token))
            self._seen.add(key)
        return len(self._seen) - before

    def _branch(self, waiting: Waiting, prefill: slot_memory.Prefill) -> None:
        """Keep the prompt in the cache and copy it to the slots of the request's other samples."""
        length = len(waiting.prompt)
        self.cache.insert(waiting.prompt, self.slots.read(prefill.slot, length))
        for slot in range(prefill.slot + 1, prefill.slot + waiting.request.n):
            self.slots.copy(prefill.slot, slot, length)

    def _sample(self, logits: torch.Tensor) -> None:
        """One more token for every running sample; finished samples leave."""
        settings = [r.owner.request.sampling for r in self._running]
        draws = [r.owner.random[r.index].random() for r in self._running]
        tokens, logprobs = pick(logits, settings, draws)
        finished: list[tuple[int, str]] = []
        for slot, running in enumerate(self._running):
            running.tokens.append(tokens[slot])
            running.logprobs.append(logprobs[slot])
            running.versions.append(self.version)
            finish = self._finish(running)
            if finish:
                finished.append((slot, finish))
        self.counts["decoded_tokens"] += len(self._running)
        for slot, finish in reversed(finished):
            self._leave(slot, finish)

    def _finish(self, running: Running) -> str:
        sampling = running.owner.request.sampling
        if running.tokens[-1] in self.end_tokens:
            return "stop"
        if sampling.stop:
            tail = running.tokens[-_STOP_TAIL:]
            text = self.tokenizer.decode(tail, skip_special_tokens=False)
            if any(stop in text for stop in sampling.stop):
                return "stop"
        return "length" if len(running.tokens) >= sampling.max_tokens else ""

    def _leave(self, slot: int, finish: Any) -> None:
        """Take a sample out of its slot: keep its keys and values, fill the slot from the end, answer when it was the last."""
        running = self._running[slot]
        context = running.context()
        if finish != "abort":
            if running.versions[0] == self.version:  # mixed keys and values must not enter the new version's cache
                self.cache.insert(context, self.slots.read(slot, len(context)))
                self._note(context)
            waiting = running.owner
            waiting.samples[running.index] = Sample(
                np.array(running.tokens, np.int32),
                np.array(running.logprobs, np.float32),
                np.array(running.versions, np.int32),
                finish,
            )
            samples = [sample for sample in waiting.samples if sample is not None]
            if len(samples) == len(waiting.samples):
                waiting.answer(GenerateResult(samples, len(waiting.prompt), waiting.cached))
        last = self._running.pop()
        if last is not running:
            self._running[slot] = last
            self.slots.copy(len(self._running), slot, last.position)

    def _abort(self, waiting: Waiting) -> None:
        if waiting in self._waiting:
            self._waiting.remove(waiting)
        for slot in reversed(range(len(self._running))):
            if self._running[slot].owner is waiting:
                self._leave(slot, "abort")

    def _score(self, request: ScoreRequest) -> ScoreResult:
        tokens = torch.tensor(request.tokens, dtype=torch.long, device=self.device)
        hidden = self.model.get_decoder()(input_ids=tokens[None], use_cache=False).last_hidden_state[0, :-1]
        logprobs = np.zeros(len(tokens), np.float32)
        for first in range(0, len(hidden), 256):
            rows = torch.log_softmax(self.model.get_output_embeddings()(hidden[first : first + 256]).float(), -1)
            taken = rows.gather(1, tokens[1 + first : 1 + first + len(rows), None])[:, 0]
            logprobs[1 + first : 1 + first + len(rows)] = taken.cpu().numpy()
        return ScoreResult(logprobs, self.version)

    def _swap(self, kind: str, path: Path, version: int) -> None:
        weights.apply(self.model, self.folder, kind, path)
        self.version = version
        self.cache = RadixCache(self.cache.budget)
        self._seen.clear()
