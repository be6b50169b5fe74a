"""Engines that share the learner's GPUs: their turns, against a real SGLang server and a scripted
one that refuses what a real one dies of."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from coppice.common.turns import Turns
from coppice.wire.messages import GenerateRequest, Sampling
from tests.actors.test_local_engine import TOLERANCE, full_logprobs, ids


async def test_a_real_server_releases_its_memory_in_the_middle_of_a_request(
    sglang_server: Any, llama: Path, tmp_path: Path
) -> None:
    made = sglang_server.engine()
    made.turns, learner = Turns(tmp_path), Turns(tmp_path)
    await made.start()
    prompt = ids(0, 8)
    running = asyncio.create_task(made.generate(GenerateRequest(prompt, 2, Sampling(300))))
    for _ in range(3):
        while not made.stats()["running"]:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(learner.take)
        waiting = asyncio.create_task(made.generate(GenerateRequest(prompt, 1, Sampling(4))))
        assert not running.done()
        learner.give()
        await waiting
    for sample in (await running).samples:
        assert len(sample.tokens) == 300 and not sample.versions.any()
        expected = full_logprobs(llama, prompt, sample.tokens)
        assert np.abs(sample.logprobs - expected).max() < TOLERANCE
    await made.close()
