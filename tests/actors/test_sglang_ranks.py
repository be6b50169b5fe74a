"""A real SGLang server as a GPU run starts it: with two ranks, and with its overlap scheduler."""

from pathlib import Path
from typing import Any

import pytest

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.sglang import SGLangEngine
from coppice.wire.messages import GenerateRequest, LoadRequest, Sampling
from tests.actors.test_local_engine import (
    GREATEST_DIFFERENCE,
    ids,
    reference,
    version_folder,
    worst,
)
from tests.sglang_cpu.shared import config

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.long]


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        ({"tp_size": 2}, {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}),
        ({"disable_overlap_schedule": False}, {}),
    ],
    ids=["two ranks", "overlap"],
)
async def test_samples_and_updates_are_exact(
    llama: Path, tmp_path: Path, arguments: dict[str, Any], variables: dict[str, str]
) -> None:
    settings = config(arguments=arguments, environment=variables)
    actors = ActorsConfig(max_batch=8, max_context=512, prefill_tokens=256, sglang=settings)
    engine = SGLangEngine(str(llama), actors)
    await engine.start()
    model = reference(llama)
    for version in range(3):
        if version:
            folder, proof, model = version_folder(tmp_path, llama, version)
            await engine.load(LoadRequest(version, str(folder), proof))
        prompt = ids(version, 40)
        result = await engine.generate(GenerateRequest(prompt, 3, Sampling(12, seed=version)))
        assert worst(model, (prompt, result)) < GREATEST_DIFFERENCE
        assert {v for sample in result.samples for v in sample.versions.tolist()} == {version}
    await engine.close()
