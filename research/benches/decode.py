"""Decoding at batch 32: tokens per CPU second of the embedded engine over those of
``transformers.generate``.

Each of REQUESTS prompts is continued SAMPLES times by NEW sampled tokens in float32 on one thread.
Both sides prefill the prompts before the measurement. Rounds alternate after a short uncounted one,
and the ratio is the median. Times are CPU seconds of this process, because other programs on the
machine then slow neither side.
"""

import asyncio
import copy
import statistics
import time
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
            input_ids=self.ids[:, :-1], attention_mask=self.mask[:, :-1],
            position_ids=places[:, :-1], past_key_values=self.cache, logits_to_keep=1,
        )  # fmt: skip
        self.cache.batch_repeat_interleave(SAMPLES)

    def decode(self, new: int) -> float:
        """Return the tokens per CPU second of ``new`` steps."""
        cache = copy.deepcopy(self.cache)
        start = time.process_time()
        sampled = self.model.generate(
            input_ids=self.ids.repeat_interleave(SAMPLES, 0),
            attention_mask=self.mask.repeat_interleave(SAMPLES, 0), past_key_values=cache,
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new,
            min_new_tokens=new, pad_token_id=0,
        )[:, self.ids.shape[1] :]  # fmt: skip
        return sampled.numel() / (time.process_time() - start)


async def _ours(folder: Path, prompts: list[np.ndarray], between: Any) -> list[float]:
    """Return the tokens per CPU second of each round. ``between`` runs after each round. Before the
    first round, the prompts enter the cache and every row gets its memory."""
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
    for number in range(ROUNDS):
        requests = [
            GenerateRequest(p, SAMPLES, Sampling(NEW, seed=100 * number + i))
            for i, p in enumerate(prompts)
        ]
        start = time.process_time()
        results = await asyncio.gather(*(engine.generate(request) for request in requests))
        sampled = sum(len(sample.tokens) for result in results for sample in result.samples)
        speeds.append(sampled / (time.process_time() - start))
        between()
    await engine.close()
    return speeds


def run(model: str = DEFAULT) -> dict[str, Any]:
    """Return the tokens per CPU second of both sides and their ratio."""
    folder = shape.model_folder(model)
    torch.set_num_threads(1)
    with torch.no_grad():
        settings = AutoModelForCausalLM.from_pretrained(folder).config
        prompts = _prompts(settings.vocab_size)
        plain_side = _Plain(folder, prompts)
        plain_side.decode(2)
        plain: list[float] = []
        between = lambda: plain.append(plain_side.decode(NEW))  # noqa: E731
        ours = asyncio.run(_ours(folder, prompts, between))
    ratio = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
    more = {"ours_tokens_s": ours, "generate_tokens_s": plain}
    return result("decode tokens/s at batch 32, engine / generate", ratio, 2.0, "higher", **more)
