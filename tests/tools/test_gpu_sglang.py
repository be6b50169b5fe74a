"""The GPU benchmark of SGLang, run small on the CPU server: its counts are what the shape of the trees implies."""

from pathlib import Path

import pytest

from tests.actors.test_engine_contract import restore
from tests.sglang_cpu.shared import Shared
from tools.benches import gpu_sglang

WORK = gpu_sglang.Work(questions=3, steps=2, candidates=2, instruction=40, question=8, observation=12, action=6)


async def test_it_counts_tokens_and_times_each_transport(llama: Path, tmp_path: Path, sglang_server: Shared) -> None:
    engine = sglang_server.engine()
    await engine.start()
    await restore(engine, llama, tmp_path)
    found = await gpu_sglang.measure(engine, llama, WORK, "cpu")
    await engine.close()
    assert found["ideal_prefill_tokens"] == 40 + 3 * (8 + 13)
    # SGLang computes a prompt's last token again for each sample; three questions at once may each compute what they share.
    assert found["prefilled_tokens"] <= found["ideal_with_last_tokens"] + 2 * 40
    assert found["prefilled_tokens"] >= found["ideal_with_last_tokens"] == pytest.approx(103 + 12)
    assert found["ratio"] > 0
    chain, samples = (
        found["mc_pr"],
        WORK.steps * (1 + engine.config.max_batch),
    )  # each step's action and its continuations
    assert chain["ideal_with_last_tokens"] == chain["ideal_prefill_tokens"] + samples
    assert chain["ideal_with_last_tokens"] <= chain["prefilled_tokens"]
    assert 40 + 8 < chain["ideal_prefill_tokens"] <= 40 + 8 + 12 + 6  # the one chain, whatever branches from it
    assert set(found["update_s"]) == {"disk", "tensor", "distributed"}
    assert min(found["update_s"].values()) > 0
