"""SGLang inside a process of its own: drives one engine through what the actors ask of it and
writes what it answered.

``python inside.py PLAN.json ANSWERS.json``, in the environment of the CPU server.
``tests.actors.test_sglang_inside`` writes the plan and judges the answers.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from coppice.actors.config import ActorsConfig, SGLangConfig
from coppice.actors.engines.sglang import SGLangEngine
from coppice.common import loop
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import GenerateRequest, GenerateResult, LoadRequest, Sampling

ACROSS = 2
"""Samples of the generation that an update falls into."""
BEFORE = 3
"""Tokens that each of them has, at least, when the update begins."""


class Patient(SGLangEngine):
    """Mixes versions for certain: samples do not end before all their tokens are there, and
    ``sampling`` tells when some are."""

    def _bodies(self, request: GenerateRequest) -> list[dict[str, Any]]:
        bodies = super()._bodies(request)
        for body in bodies if request.n == ACROSS else []:
            body["sampling_params"]["ignore_eos"] = True
        return bodies

    async def sampling(self, held: int) -> None:
        """Wait until SGLang holds so many tokens of running requests."""
        way: Any = self.way
        while True:
            (load,) = await way._engine.tokenizer_manager.get_loads()
            if load.num_total_tokens >= held:
                return
            await asyncio.sleep(0.01)


def told(result: GenerateResult) -> dict[str, Any]:
    """A result as JSON."""
    samples = [
        {
            "tokens": s.tokens.tolist(),
            "logprobs": s.logprobs.tolist(),
            "versions": s.versions.tolist(),
            "finish": s.finish,
        }
        for s in result.samples
    ]
    return {"cached": result.cached_tokens, "samples": samples}


async def drive(plan: dict[str, Any], path: Path) -> None:
    """Write the answers to ``path``; then a child of the engine is killed, and SGLang must end this
    process."""
    sglang = SGLangConfig(way="inside", arguments=plan["arguments"], update_timeout_s=60.0)
    engine = Patient(
        plan["model"], ActorsConfig(max_batch=8, max_context=512, prefill_tokens=256, sglang=sglang)
    )
    answers: dict[str, Any] = {}
    await engine.start()
    prompt, other = (np.array(plan[name], np.int32) for name in ("prompt", "other"))

    async def generate(
        tokens: np.ndarray, n: int, most: int, temperature: float = 1.0
    ) -> dict[str, Any]:
        return told(
            await engine.generate(
                GenerateRequest(tokens, n, Sampling(most, temperature=temperature))
            )
        )

    async def load(name: str) -> str:
        version, folder, digest = plan[name]
        return (await engine.load(LoadRequest(version, folder, digest))).proof

    answers["greedy"] = await generate(prompt, 1, 8, temperature=0.0)
    answers["four"] = await generate(other, 4, 6)
    answers["again"] = await generate(other, 4, 6)
    try:
        await engine.way.generate({"input_ids": [1, 2], "sampling_params": {"temperature": -1.0}})
    except DataFault as fault:
        answers["data_fault"] = str(fault)

    running = asyncio.create_task(generate(other, 4, 400))
    await engine.sampling(4 * (len(other) + BEFORE))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    answers["cancelled"] = running.cancelled()
    answers["room"] = len((await generate(prompt, 8, 2))["samples"])

    running = asyncio.create_task(generate(other, ACROSS, 400))
    await engine.sampling(ACROSS * (len(other) + BEFORE))
    answers["proofs"] = [await load("full")]
    answers["across"] = await running
    answers["full"] = await generate(prompt, 2, 6)
    try:
        await load("wrong")
    except InfrastructureFault as fault:
        answers["refused"] = str(fault)
    for name in ("memory", "base", "adapter"):
        answers["proofs"].append(await load(name))
        answers[name] = await generate(prompt, 2, 6)
    answers["stats"] = engine.stats()
    path.write_text(json.dumps(answers))

    os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    # SGLang ends this process long before, where the worker does not because ``died`` returned
    await asyncio.sleep(60)


if __name__ == "__main__":
    loop.run(drive(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])))
