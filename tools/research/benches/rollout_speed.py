"""SLATE rollout tokens/s of the embedded engine against plain batched ``transformers.generate`` on the same trees.

Both sides sample CANDIDATES continuations of ACTION tokens at each of STEPS steps of QUESTIONS trees, in float32 on one thread. The
plain side batches all questions of a step, expands each prompt to its candidates and keeps no cache between steps. Rounds alternate,
and the ratio is the median.
"""

import asyncio
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tools.defaults.models import DEFAULT
from tools.research.benches import slate_shape as shape

ROUNDS = 2


def _plain(model: Any, seed: int) -> int:
    """Grow the same trees with ``generate``, each step as one batch of equal lengths, and return the number of sampled tokens."""
    rng = np.random.default_rng(seed)
    prefixes = shape.prompts(rng, model.config.vocab_size)
    sampled = 0
    for _ in range(shape.STEPS):
        ids = torch.tensor(np.stack(prefixes), dtype=torch.long)
        sampled_ids = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=shape.CANDIDATES,
            max_new_tokens=shape.ACTION,
            min_new_tokens=shape.ACTION,
            pad_token_id=0,
        )[:, ids.shape[1] :]
        sampled += sampled_ids.numel()
        chosen = sampled_ids[:: shape.CANDIDATES].numpy()
        observations = [shape.words(rng, model.config.vocab_size, shape.OBSERVATION) for _ in prefixes]
        prefixes = [np.concatenate(parts) for parts in zip(prefixes, chosen, observations, strict=True)]
    return sampled


async def _ours(folder: Any, seed: int) -> float:
    engine = await shape.engine(folder)
    start = time.perf_counter()
    sampled = await shape.trees(engine, seed)
    spent = time.perf_counter() - start
    await engine.close()
    return sampled / spent


def run(model: str = DEFAULT) -> dict[str, Any]:
    """Return the tokens per second of both sides and their ratio."""
    folder = shape.model_folder(model)
    torch.set_num_threads(1)
    plain_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours, plain = [], []
    for seed in range(ROUNDS):
        ours.append(asyncio.run(_ours(folder, seed)))
        torch.set_num_threads(1)
        start = time.perf_counter()
        with torch.no_grad():
            sampled = _plain(plain_model, seed)
        plain.append(sampled / (time.perf_counter() - start))
    ratio = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
    row = {"name": "rollout tokens/s, embedded engine / generate", "ratio": ratio, "goal": 1.3, "better": "higher"}
    return row | {"ours_tokens_s": ours, "generate_tokens_s": plain}
