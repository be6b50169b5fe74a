"""Engines that share the learner's GPUs: their turns, against a real SGLang server and a scripted
one that refuses what a real one dies of."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coppice.common.turns import Turns
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import Constraint, GenerateRequest, Sampling
from tests.actors.test_local_engine import TOLERANCE, ids, reference, worst
from tests.sglang_cpu.scripted import REQUEST, Server, engine, version


async def test_a_real_server_releases_its_memory_in_the_middle_of_a_request(
    sglang_server: Any, llama: Path, tmp_path: Path
) -> None:
    made, learner, prompt = sglang_server.engine(), Turns(tmp_path), ids(0, 8)
    made.turns = Turns(tmp_path)
    await made.start()
    running = asyncio.create_task(made.generate(GenerateRequest(prompt, 8, Sampling(400))))
    for _ in range(3):
        while not made.stats()["running"]:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(learner.take)
        waiting = asyncio.create_task(made.generate(GenerateRequest(prompt, 1, Sampling(4))))
        assert not running.done()
        learner.give()
        await waiting
    done = await running
    assert not any(sample.versions.any() for sample in done.samples)
    assert worst(reference(llama), (prompt, done)) < TOLERANCE
    await made.close()


async def test_an_update_waits_for_the_turn_and_lost_weights_end_the_engine(tmp_path: Path) -> None:
    server, learner = Server(), Turns(tmp_path)
    await server.start()
    made = engine(tmp_path, server.url)
    made.turns = Turns(tmp_path)
    await made.start()
    await asyncio.to_thread(learner.take)
    update = asyncio.create_task(made.load(version(tmp_path, 1)))
    await asyncio.sleep(0)
    assert not server.holds and not update.done()
    learner.give()
    assert (await update).version == 1
    pattern = Sampling(2, constraint=Constraint("regex", "a"))
    with pytest.raises(DataFault, match="a constraint with"):
        await made.generate(msgspec.structs.replace(REQUEST, sampling=pattern))
    server.at["/resume_memory_occupation"] = lambda: asyncio.sleep(0, setattr(server, "weights", 7))
    await asyncio.to_thread(learner.take)
    learner.give()
    with pytest.raises(InfrastructureFault, match="holds other base weights"):
        await asyncio.wait_for(made.died(), 60)
    assert server.fatal == []
    await made.close()
    await server.stop()
