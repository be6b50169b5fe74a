"""The embedded engine and SGLang serve the same policy: the same greedy tokens, and
log-probabilities within a stated bound."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest_asyncio

from coppice.actors.engines.base import Engine
from coppice.wire.messages import GenerateRequest, Sampling
from tests.actors.conftest import Local
from tests.actors.test_engine_contract import near, restore, rounds
from tests.actors.test_local_engine import TOLERANCE, ids, noised
from tests.sglang_cpu.shared import Shared


@pytest_asyncio.fixture
async def pair(
    local: Local, llama: Path, tmp_path: Path, sglang_server: Shared
) -> AsyncIterator[tuple[Engine, Engine]]:
    sglang = sglang_server.engine()
    await sglang.start()
    await restore(sglang, llama, tmp_path)
    yield await local(), sglang
    await sglang.close()


async def compare(pair: tuple[Engine, Engine], version: int) -> np.ndarray:
    """Both engines on the same prompts; returns the last sample's log-probabilities."""
    last = np.zeros(0)
    for seed in range(3):
        request = GenerateRequest(ids(seed, 15 + 20 * seed), 1, Sampling(12, temperature=0.0))
        ours, theirs = [(await engine.generate(request)).samples[0] for engine in pair]
        if not rounds(pair[1]):
            assert ours.tokens.tolist() == theirs.tokens.tolist()
        least = min(len(ours.tokens), len(theirs.tokens))
        equal = ours.tokens[:least] == theirs.tokens[:least]
        same = int(np.cumprod(equal).sum())  # up to a choice that rounding decides
        assert same
        assert near(pair[1], ours.logprobs[:same], theirs.logprobs[:same])
        assert set(ours.versions.tolist()) == set(theirs.versions.tolist()) == {version}
        last = ours.logprobs
    return last


async def test_before_and_after_ten_updates(
    pair: tuple[Engine, Engine], llama: Path, tmp_path: Path
) -> None:
    before, source = await compare(pair, 0), llama
    for version in range(1, 11):
        update, model = noised(tmp_path, source, version, noise=0.05)
        source = tmp_path / f"source{version}"
        model.save_pretrained(source)
        for engine in pair:
            await engine.load(update)
    assert np.abs(before - await compare(pair, 10)).max() > 100 * TOLERANCE
