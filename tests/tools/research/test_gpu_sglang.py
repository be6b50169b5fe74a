"""The GPU benchmarks of SGLang, run small: their counts are what the shapes imply."""

import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from coppice.research.benches import gpu_sglang, weight_update
from coppice.research.benches.gpu_sglang import COMPACT, SGLangServer, WantedSample
from coppice.research.benches.prefill import TreeShape
from coppice.wire.messages import GenerateRequest, Sampling
from tests.actors.test_engine_contract import restore
from tests.sglang_cpu.shared import SITE, VARIABLES, Shared

pytestmark = pytest.mark.slow

TREES = TreeShape(3, 2, 2, instruction=40, question=8, observation=12, action=6)
WORK = gpu_sglang.TreeWork(TREES, games=1, continuations=3, move=3, prompt=COMPACT)
ADAPTER_RANK = 8
"""The most that the session's server takes."""


@pytest.fixture
def server(sglang_server: Shared, llama: Path, tmp_path: Path) -> SGLangServer:
    """The session's server, and an interpreter that can run sglang.bench_serving."""
    key = os.environ[sglang_server.key]
    if torch.cuda.is_available():
        return SGLangServer(
            sglang_server.url, key, llama, os.environ.get("COPPICE_SGLANG_PYTHON", sys.executable)
        )
    # sglang.bench_serving imports it for a data set of pictures; the CPU environment is without.
    (tmp_path / "datasets.py").write_text("load_dataset = None\n")
    variables = VARIABLES | {"PYTHONPATH": f"{SITE}{os.pathsep}{tmp_path}"}
    return SGLangServer(sglang_server.url, key, llama, sglang_server.way.config.python, variables)


async def test_it_counts_tokens_and_compares_with_bench_serving(
    llama: Path, tmp_path: Path, sglang_server: Shared, server: SGLangServer
) -> None:
    engine = sglang_server.engine()
    await engine.start()
    await restore(engine, llama, tmp_path)
    found = await gpu_sglang.measure(engine, server, WORK)
    await engine.close()
    trees, games = found["slate"], found["mc_pr"]
    assert trees["ideal_prefill_tokens"] == 40 + 3 * (8 + 13)
    assert trees["prompt_tokens"] >= 2 * 3 * (48 + 48 + 13)
    # SGLang computes a prompt's last token again for each sample; three questions at once may each
    # compute what they share.
    assert trees["ideal_with_last_tokens"] == 103 + 12 == 115
    assert 115 <= trees["prefilled_tokens"] <= 115 + 2 * 40
    assert 0 < trees["hit_share"] <= trees["ideal_hit_share"] < 1
    assert min(trees["ratio"], trees["ratio_at_once"]) > 0
    # Three to five states of one game, three continuations from each to the end of the game.
    assert 3 * 3 + 3 < games["samples"] <= 5 + 3 * (5 + 4 + 3 + 2 + 1)
    assert games["prefilled_tokens"] < games["prompt_tokens"] / 2


async def test_it_times_each_transport_and_the_server_then_samples_from_the_last(
    llama: Path, tmp_path: Path, sglang_server: Shared
) -> None:
    engine = sglang_server.engine()
    await engine.start()
    await restore(engine, llama, tmp_path)
    device, transports = "cuda:0" if torch.cuda.is_available() else "cpu", weight_update.possible()
    found = await weight_update.updates(engine, llama, device, transports, ADAPTER_RANK)
    assert tuple(found) == transports
    assert {"disk", "adapter"} <= set(found)
    assert min(found.values()) > 0
    request = GenerateRequest(np.arange(5, dtype=np.int32), 1, Sampling(3))
    (sample,) = (await engine.generate(request)).samples
    assert set(sample.versions.tolist()) == {len(found)}
    await engine.close()


def scripted(folder: Path, code: str) -> SGLangServer:
    """An interpreter whose sglang.bench_serving is ``code``, on no server; ``path("--x")`` is the
    path that its argument --x names."""
    package = folder / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    head = "import json, sys, time\npath = lambda name: sys.argv[sys.argv.index(name) + 1]\n"
    (package / "bench_serving.py").write_text(head + code)
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_text("{}")
    return SGLangServer(
        "http://127.0.0.1:9", "secret-key", folder, sys.executable, {"PYTHONPATH": str(folder)}
    )


ANSWER = """
found = {"output_throughput": 12.5, "errors": ["", ""], "input_lens": [3, 2]}
found |= {"output_lens": [4, 5]} | CHANGES
open(path("--output-file"), "w").write(json.dumps(found))
"""


def answers(changes: str) -> str:
    return ANSWER.replace("CHANGES", changes)


TWO = [WantedSample(np.array([1, 2, 3], np.int32), 4), WantedSample(np.array([1, 2], np.int32), 5)]


async def test_its_requests_carry_the_token_ids(tmp_path: Path) -> None:
    copy = f"open('{tmp_path}/seen', 'w').write(open(path('--dataset-path')).read())"
    made = scripted(tmp_path, copy + answers("{}"))
    assert await gpu_sglang.bench_serving(made, TWO) == 12.5
    rows = [msgspec.json.decode(line) for line in (tmp_path / "seen").read_bytes().splitlines()]
    assert [(row["input_ids"], row["max_tokens"]) for row in rows] == [([1, 2, 3], 4), ([1, 2], 5)]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print('key secret-key'); sys.exit(3)", r"status 3\):\n.*key \(key\)"),
        (answers('{"errors": ["", "Bad: x"]}'), "1 of 2 requests failed, the first: Bad: x"),
        (answers('{"output_lens": [4, 1]}'), r"sampled tokens \[4, 1\].."),
    ],
)
async def test_a_failed_baseline_says_so(tmp_path: Path, code: str, told: str) -> None:
    with pytest.raises(RuntimeError, match=told) as raised:
        await gpu_sglang.bench_serving(scripted(tmp_path, code), TWO)
    assert "secret-key" not in str(raised.value)
