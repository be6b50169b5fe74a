"""Decoding at batch 32: tokens per CPU second of the embedded engine over those of
``transformers.generate``, and over the physical limit.

Each of REQUESTS prompts is continued SAMPLES times by NEW sampled tokens in float32 on one thread.
Both sides prefill the prompts before the measurement. Rounds alternate after a short uncounted one,
and the ratio is the median. The limit of a step is the time of its matrix products at the measured
peak, or of reading its bytes at the measured bandwidth, whichever is longer. Times are CPU seconds
of this process, because other programs on the machine then slow neither side.
"""

import asyncio
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.local import LocalEngine
from coppice.research.benches import prefill as shape
from coppice.research.benches import result
from coppice.tools.defaults.models import DEFAULT
from coppice.wire.messages import GenerateRequest, Sampling

ROUNDS = 2
REQUESTS, SAMPLES, NEW = 8, 4, 48
INSTRUCTION = 100
PREFIX = (370, 430)
"""Lengths of the shortest and of the longest prompt in tokens."""


_BUFFER = 2**26
"""float32 numbers in the streamed buffer: 256 MiB, more than any cache holds."""
_SIDE = 1536
"""Rows and columns of the multiplied matrices: enough to reach the peak, few enough to repeat the
product quickly."""


def _prompts(vocabulary: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    common = shape.words(rng, vocabulary, INSTRUCTION)
    own = rng.integers(PREFIX[0] - INSTRUCTION, PREFIX[1] - INSTRUCTION + 1, REQUESTS)
    return [np.concatenate([common, shape.words(rng, vocabulary, int(count))]) for count in own]


class _Plain:
    """``generate`` with prompts that the constructor has prefilled."""

    def __init__(self, folder: Path, prompts: list[np.ndarray]):
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        longest = max(map(len, prompts))
        self.ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        self.mask = torch.zeros_like(self.ids)
        for row, prompt in enumerate(prompts):
            self.ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
            self.mask[row, longest - len(prompt) :] = 1
        places = (self.mask.cumsum(-1) - 1).clamp_min(0)
        self.cache = DynamicCache(config=self.model.config)
        self.model(
            input_ids=self.ids[:, :-1],
            attention_mask=self.mask[:, :-1],
            position_ids=places[:, :-1],
            past_key_values=self.cache,
            logits_to_keep=1,
        )
        self.cache.batch_repeat_interleave(SAMPLES)

    def decode(self, new: int) -> float:
        """Return the tokens per CPU second of ``new`` steps."""
        cache = copy.deepcopy(self.cache)
        start = time.process_time()
        sampled = self.model.generate(
            input_ids=self.ids.repeat_interleave(SAMPLES, 0),
            attention_mask=self.mask.repeat_interleave(SAMPLES, 0),
            past_key_values=cache,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
        )[:, self.ids.shape[1] :]
        return sampled.numel() / (time.process_time() - start)


async def _ours(
    folder: Path, prompts: list[np.ndarray], rounds: int, between: Any
) -> tuple[list[float], dict[str, Any]]:
    """Return the tokens per CPU second of each round, and the limits. ``between`` runs after each
    round. Before the first round, the prompts enter the cache and every row gets its memory."""
    batch = REQUESTS * SAMPLES
    engine = LocalEngine(
        str(folder),
        ActorsConfig(dtype="float32", max_batch=batch, kv_cache_gib=2.0, max_context=1024),
    )
    await engine.start()
    engine.end_tokens = frozenset()
    first = Sampling(NEW, stop=[""])  # each sample ends with its first token
    await asyncio.gather(
        *(engine.generate(GenerateRequest(prompt, SAMPLES, first)) for prompt in prompts)
    )
    speeds = []
    for number in range(rounds):
        requests = [
            GenerateRequest(p, SAMPLES, Sampling(NEW, seed=100 * number + i))
            for i, p in enumerate(prompts)
        ]
        start = time.process_time()
        results = await asyncio.gather(*(engine.generate(request) for request in requests))
        sampled = sum(len(sample.tokens) for result in results for sample in result.samples)
        speeds.append(sampled / (time.process_time() - start))
        between()
    limit = _limit(engine, prompts)
    await engine.close()
    return speeds, limit


def _limit(engine: LocalEngine, prompts: list[np.ndarray]) -> dict[str, Any]:
    """Return the bytes and operations that the middle step needs at least, and the tokens per
    second if it did nothing else."""
    batch, middle = REQUESTS * SAMPLES, NEW // 2
    embedded = engine.model.get_input_embeddings().weight
    head = engine.model.get_output_embeddings().weight
    parameters = sum(p.numel() for p in engine.model.parameters())
    weights = parameters if head is embedded else parameters - embedded.numel()
    prefixes = sum(map(len, prompts))
    moved = 4 * weights + engine.batch.memory.token.nbytes * (prefixes + batch * middle)
    settings = engine.model.config
    width = settings.num_attention_heads * engine.batch.memory.token.shape[-1]
    attended = SAMPLES * prefixes + batch * middle
    operations = 2 * weights * batch + 4 * settings.num_hidden_layers * width * attended
    read, peak = bandwidth(), matrix_peak()
    seconds = max(moved / read, operations / peak)
    return {
        "bytes_per_step": moved,
        "bandwidth_gb_s": read / 1e9,
        "operations_per_step": operations,
        "matrix_gflop_s": peak / 1e9,
        "bandwidth_limit_tokens_s": batch / (moved / read),
        "compute_limit_tokens_s": batch / (operations / peak),
        "limit_tokens_s": batch / seconds,
    }


def cpu_s(work: Callable[[], object], times: int = 5) -> float:
    """Run ``work`` ``times`` times and return the least CPU seconds."""
    spent = []
    for _ in range(times):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return min(spent)


def bandwidth() -> float:
    """Return the bytes per second that this process's compute threads read from memory."""
    buffer = torch.ones(_BUFFER)
    return buffer.nbytes / cpu_s(buffer.sum)


def matrix_peak() -> float:
    """Return the float32 operations per second of a large matrix product (a multiplication and an
    addition are two)."""
    a, b = torch.rand(_SIDE, _SIDE), torch.rand(_SIDE, _SIDE)
    return 2 * _SIDE**3 / cpu_s(lambda: a @ b)


def run(model: str = DEFAULT) -> dict[str, Any]:
    """Return the tokens per CPU second of both sides, their ratio, and our share of the limit."""
    folder = shape.model_folder(model)
    torch.set_num_threads(1)
    with torch.no_grad():
        settings = AutoModelForCausalLM.from_pretrained(folder).config
        prompts = _prompts(settings.vocab_size)
        plain_side = _Plain(folder, prompts)
        plain_side.decode(2)
        plain: list[float] = []
        ours, limit = asyncio.run(
            _ours(folder, prompts, ROUNDS, lambda: plain.append(plain_side.decode(NEW)))
        )
    ratio = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
    more = {"ours_tokens_s": ours, "generate_tokens_s": plain} | limit
    more["share_of_limit"] = statistics.median(ours) / limit["limit_tokens_s"]
    return result("decode tokens/s at batch 32, engine / generate", ratio, 2.0, "higher", **more)
