"""SLATE-shaped engine work shared by the engine benchmarks: questions under one instruction, steps of k candidates."""

import argparse
import asyncio
from pathlib import Path

import numpy as np

from actors.config import ActorsConfig
from actors.engines.local import LocalEngine
from tools.defaults.models import DEFAULT, ensure_model
from tools.defaults.settings import cache_folder
from wire.messages import GenerateRequest, Sampling

QUESTIONS, STEPS, CANDIDATES = 6, 3, 5
INSTRUCTION, QUESTION, OBSERVATION, ACTION = 120, 30, 60, 32
"""Tokens."""


def model_folder(name: str = DEFAULT) -> Path:
    """The folder of a model by the names ``tools.defaults.models`` knows."""
    return ensure_model(name, cache_folder())


def model_argument() -> str:
    """``--model`` of a benchmark run by itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=DEFAULT, help="name, folder or hub id (default %(default)s)")
    return parser.parse_args().model


async def engine(folder: Path) -> LocalEngine:
    """A started float32 engine with room for every candidate of two waves."""
    made = LocalEngine(str(folder), ActorsConfig(dtype="float32", max_batch=QUESTIONS * CANDIDATES, max_context=1024))
    await made.start()
    return made


def words(rng: np.random.Generator, vocabulary: int, count: int) -> np.ndarray:
    """Token ids int32 [count] as a text has them: beyond the single bytes and special tokens of most vocabularies."""
    return rng.integers(min(1000, vocabulary // 4), min(40000, vocabulary), count).astype(np.int32)


def prompts(rng: np.random.Generator, vocabulary: int) -> list[np.ndarray]:
    """First prefixes: a common instruction, then a question each."""
    common = words(rng, vocabulary, INSTRUCTION)
    return [np.concatenate([common, words(rng, vocabulary, QUESTION)]) for _ in range(QUESTIONS)]


async def trees(made: LocalEngine, seed: int = 0) -> int:
    """Grow QUESTIONS trees of STEPS steps concurrently; returns the tokens sampled."""
    rng = np.random.default_rng(seed)
    vocabulary = made.model.config.vocab_size

    async def grow(prefix: np.ndarray, number: int) -> int:
        sampled = 0
        for step in range(STEPS):
            sampling = Sampling(ACTION, 1.0, seed=1000 * number + step)
            result = await made.generate(GenerateRequest(prefix, CANDIDATES, sampling))
            sampled += sum(len(sample.tokens) for sample in result.samples)
            observation = words(rng, vocabulary, OBSERVATION)
            prefix = np.concatenate([prefix, result.samples[0].tokens, observation])
        return sampled

    return sum(await asyncio.gather(*(grow(prefix, i) for i, prefix in enumerate(prompts(rng, vocabulary)))))
