"""SLATE-shaped engine work shared by the engine benchmarks: questions under one instruction, steps of k candidates."""

import asyncio
from pathlib import Path

import numpy as np

from actors.config import ActorsConfig
from actors.engines.local import LocalEngine
from tools.assets import cache_folder
from tools.model import DEFAULT, ensure_model
from wire.messages import GenerateRequest, Sampling

QUESTIONS, STEPS, CANDIDATES = 6, 3, 5
INSTRUCTION, QUESTION, OBSERVATION, ACTION = 120, 30, 60, 32
"""Tokens."""


def model_folder() -> Path:
    """The default model."""
    return ensure_model(DEFAULT, cache_folder())


async def engine(folder: Path) -> LocalEngine:
    """A started float32 engine with room for every candidate of two waves."""
    made = LocalEngine(str(folder), ActorsConfig(dtype="float32", max_batch=QUESTIONS * CANDIDATES, max_context=1024))
    await made.start()
    return made


def prompts(rng: np.random.Generator) -> list[np.ndarray]:
    """First prefixes: a common instruction, then a question each."""
    common = rng.integers(1000, 40000, INSTRUCTION)
    return [np.concatenate([common, rng.integers(1000, 40000, QUESTION)]).astype(np.int32) for _ in range(QUESTIONS)]


async def trees(made: LocalEngine, seed: int = 0) -> int:
    """Grow QUESTIONS trees of STEPS steps concurrently; returns the tokens sampled."""
    rng = np.random.default_rng(seed)

    async def grow(prefix: np.ndarray, number: int) -> int:
        sampled = 0
        for step in range(STEPS):
            sampling = Sampling(ACTION, 1.0, seed=1000 * number + step)
            result = await made.generate(GenerateRequest(prefix, CANDIDATES, sampling))
            sampled += sum(len(sample.tokens) for sample in result.samples)
            observation = rng.integers(1000, 40000, OBSERVATION).astype(np.int32)
            prefix = np.concatenate([prefix, result.samples[0].tokens, observation])
        return sampled

    return sum(await asyncio.gather(*(grow(prefix, i) for i, prefix in enumerate(prompts(rng)))))
