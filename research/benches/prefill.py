"""Prefill tokens that the engine computes over the ideal, in which each distinct prefix is
prefilled once per policy version.

The work is SLATE-shaped: questions under one instruction, and steps of k candidates. Other
benchmarks use its model, engine and words too.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.local import LocalEngine
from coppice.common.concurrency import gather
from coppice.research.benches import result
from coppice.tools.defaults.models import DEFAULT, ensure_model
from coppice.tools.defaults.settings import cache_folder
from coppice.wire.messages import GenerateRequest, GenerateResult, Sampling


class TreeShape(msgspec.Struct, frozen=True):
    """SLATE trees: their number, steps and candidates, and the tokens of each part."""

    questions: int
    steps: int
    candidates: int
    instruction: int
    question: int
    observation: int
    action: int


SHAPE = TreeShape(6, 3, 5, instruction=120, question=30, observation=60, action=32)


def model_folder(name: str = DEFAULT) -> Path:
    """Return the folder of a model by a name that ``tools.defaults.models`` knows."""
    return ensure_model(name, cache_folder())


async def engine(folder: Path) -> LocalEngine:
    """Return a started float32 engine with room for every candidate of two waves."""
    batch = SHAPE.questions * SHAPE.candidates
    config = ActorsConfig(dtype="float32", max_batch=batch, max_context=1024)
    started = LocalEngine(str(folder), config)
    await started.start()
    return started


def random_copy(folder: Path, **changes: Any) -> Path:
    """Save float32 random weights of the default model's shape with its tokenizer. changes: values
    of its config, such as fewer layers."""
    source = model_folder()
    config: Any = AutoConfig.from_pretrained(source)
    if "num_hidden_layers" in changes:
        config.layer_types = None
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def words(rng: np.random.Generator, vocabulary: int, count: int) -> np.ndarray:
    """Return token ids, int32 [count], as in a text: above the single bytes and special tokens of
    most vocabularies."""
    return rng.integers(min(1000, vocabulary // 4), min(40000, vocabulary), count).astype(np.int32)


async def grow_trees(
    generate: Callable[[GenerateRequest], Awaitable[GenerateResult]], vocabulary: int,
    shape: TreeShape,
) -> None:  # fmt: skip
    """Grow trees of random words under one instruction, all concurrently. In each tree, a step
    begins when the step before is done."""
    draw = partial(words, np.random.default_rng(0), vocabulary)
    instruction = draw(shape.instruction)

    async def grow(prefix: np.ndarray, number: int) -> None:
        for step in range(shape.steps):
            sampling = Sampling(shape.action, 1.0, seed=1000 * number + step)
            result = await generate(GenerateRequest(prefix, shape.candidates, sampling))
            tokens = result.samples[0].tokens
            prefix = np.concatenate([prefix, tokens, draw(shape.observation)])

    prefixes = [np.concatenate([instruction, draw(shape.question)]) for _ in range(shape.questions)]
    await gather(grow(prefix, number) for number, prefix in enumerate(prefixes))


async def _measure(model: str) -> dict[str, Any]:
    started = await engine(model_folder(model))
    await grow_trees(started.generate, started.model.config.vocab_size, SHAPE)
    await started.close()
    counts = started.counts
    ratio = counts["prefilled_tokens"] / counts["ideal_prefill_tokens"]
    keys = ("prompt_tokens", "prefilled_tokens", "ideal_prefill_tokens", "decoded_tokens")
    more = {key: counts[key] for key in keys}
    return result("prefill tokens computed / ideal (SLATE trees)", ratio, 1.02, "lower", **more)


def run(model: str = DEFAULT) -> dict[str, Any]:
    """Return counts of tokens and their ratio. Nothing depends on time."""
    return asyncio.run(_measure(model))
