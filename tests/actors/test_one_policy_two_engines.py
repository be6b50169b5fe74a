"""The embedded engine and SGLang serve the same policy: the same greedy tokens, and
log-probabilities within a stated bound."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from coppice.actors.engines.base import Engine
from coppice.wire.messages import GenerateRequest, LoadRequest, Sampling
from tests.actors.conftest import Local
from tests.actors.test_engine_contract import adapter_folder, restore
from tests.actors.test_local_engine import GREATEST_DIFFERENCE, ids, version_folder
from tests.sglang_cpu.shared import Shared

UPDATES = 10


@pytest_asyncio.fixture
async def pair(
    local: Local, llama: Path, tmp_path: Path, sglang_server: Shared
) -> AsyncIterator[tuple[Engine, Engine]]:
    """Both engines with the base weights."""
    sglang = sglang_server.engine()
    await sglang.start()
    await restore(sglang, llama, tmp_path)
    yield await local(), sglang
    await sglang.close()


async def compare(pair: tuple[Engine, Engine], version: int) -> np.ndarray:
    """Both engines on the same prompts; returns the log-probabilities of the last sample, which
    tell versions apart."""
    last = np.zeros(0)
    for seed in range(3):
        request = GenerateRequest(ids(seed, 15 + 20 * seed), 1, Sampling(12, temperature=0.0))
        ours, theirs = [(await engine.generate(request)).samples[0] for engine in pair]
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert np.abs(ours.logprobs - theirs.logprobs).max() < GREATEST_DIFFERENCE
        assert set(ours.versions.tolist()) == set(theirs.versions.tolist()) == {version}
        last = ours.logprobs
    return last


@pytest.mark.parametrize("kind", ["all weights", "an adapter"])
async def test_before_and_after_ten_updates(
    pair: tuple[Engine, Engine], llama: Path, tmp_path: Path, kind: str
) -> None:
    before, source = await compare(pair, 0), llama
    for version in range(1, UPDATES + 1):
        if kind == "an adapter":
            folder, proof, _ = adapter_folder(tmp_path, llama, version)
        else:
            place, source_of_next = tmp_path / f"from{version}", tmp_path / f"source{version}"
            folder, proof, model = version_folder(place, source, version, noise=0.05)
            model.save_pretrained(source_of_next)
            source = source_of_next
        for engine in pair:
            await engine.load(LoadRequest(version, str(folder), proof))
    assert np.abs(before - await compare(pair, UPDATES)).max() > 100 * GREATEST_DIFFERENCE
