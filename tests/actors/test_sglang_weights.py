"""How weights reach SGLang: the choice of the transport, and a broadcast out of the learner's
memory into a real server."""

import contextlib
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from coppice.actors.config import ActorsConfig, SGLangConfig
from coppice.actors.engines.served_weights import choose
from coppice.actors.engines.servers import Facts
from coppice.actors.engines.sglang import SGLangEngine
from coppice.actors.engines.sglang_api import SGLangHttp, linear_layers
from coppice.learner.model.publish import sums
from coppice.learner.model.weight_server import WeightServer, grouped
from coppice.wire.digest import total
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import GenerateRequest, LoadRequest, Sampling
from coppice.wire.published import Manifest, Memory
from tests.actors.test_engine_contract import near
from tests.actors.test_local_engine import full_logprobs, ids, noised, reference
from tests.sglang_cpu.shared import Shared as Server
from tests.sglang_cpu.shared import config

CUDA, CPU = Facts(device="cuda"), Facts(device="cpu")


async def test_weights_out_of_the_learners_memory(
    sglang_server: Server, llama: Path, tmp_path: Path
) -> None:
    if torch.cuda.device_count() == 1:
        pytest.skip("a broadcast between GPUs needs two")
    engine = sglang_server.engine()
    await engine.start()
    _, model = noised(tmp_path, llama, 7)
    # where a learner beside GPU servers holds them
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {name: p.detach().to(device) for name, p in model.named_parameters()}
    proof, giver, folder = total(sums(tensors)), WeightServer(timeout_s=60.0), tmp_path / "m7"
    folder.mkdir()
    parts = [{n: tensors[n] for n in names} for names in grouped(tensors, 20_000)]
    with contextlib.closing(giver):
        memory = giver.offer(7, parts)
        Manifest(7, "full", proof, False, memory).write(folder)
        assert (await engine.load(LoadRequest(7, str(folder), proof))).proof
    result = await engine.generate(GenerateRequest(ids(1, 20), 1, Sampling(6)))
    assert {v for sample in result.samples for v in sample.versions.tolist()} == {7}
    for sample in result.samples:
        assert near(engine, full_logprobs(model, ids(1, 20), sample.tokens), sample.logprobs)
    await engine.close()


def test_the_rendezvous_listens_on_its_host_alone_and_ends() -> None:
    giver = WeightServer(timeout_s=5.0)
    port = int(giver.address.rpartition(":")[2])
    open_ = [c for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    assert [c.laddr.ip for c in open_ if c.laddr.port == port] == ["127.0.0.1"]
    giver.close()


def test_a_server_is_started_for_the_layers_that_the_learner_trains(llama: Path) -> None:
    from peft import LoraConfig, get_peft_model

    # as learner/model/model.py
    adapted: Any = get_peft_model(reference(llama), LoraConfig(target_modules="all-linear"))
    names = (name for name, _ in adapted.named_parameters() if "lora_A" in name)
    assert set(linear_layers(llama)) == {name.split(".lora_A")[0].split(".")[-1] for name in names}
    given = {"enable_lora": True, "lora_target_modules": ["q_proj"]}
    settings = ActorsConfig(sglang=SGLangConfig(arguments=given))
    assert SGLangHttp.arguments(str(llama), settings, 1, "").items() >= given.items()
    assert "lora_target_modules" not in SGLangHttp.arguments(str(llama), ActorsConfig(), 1, "")


@pytest.mark.parametrize(
    ("manifest", "facts", "expected"),
    [
        ({"kind": "lora"}, CUDA, "adapter"),
        ({}, CUDA, "disk"),
        ({"memory": Memory("s", "cuda")}, CUDA, "distributed"),
        ({"memory": Memory("s", "cpu")}, CUDA, "disk"),
        ({"memory": Memory("s", "cpu"), "file": False}, CPU, "distributed"),
    ],
)
def test_the_transport_follows_from_what_is_published(
    manifest: dict[str, Any], facts: Facts, expected: str
) -> None:
    made = Manifest(**({"version": 1, "kind": "full", "digest": "d"} | manifest))
    assert choose(made, facts, "auto") == expected
    refused: list[tuple[Any, Any]] = [("disk", {"file": False}), ("distributed", {"memory": None})]
    for wanted, missing in refused:
        other: Any = Manifest(**({"version": 1, "kind": "full", "digest": "d"} | missing))
        with pytest.raises(InfrastructureFault, match=r"learner\.publish"):
            choose(other, facts, wanted)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        ({"tp_size": 2}, {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}),
        ({"disable_overlap_schedule": False}, {}),
    ],
    ids=["two ranks", "overlap"],
)
async def test_samples_and_updates_of_a_server_as_on_gpus_are_exact(
    llama: Path, tmp_path: Path, arguments: dict[str, Any], variables: dict[str, str]
) -> None:
    settings = config(arguments=arguments, environment=variables)
    actors = ActorsConfig(max_batch=8, max_context=512, prefill_tokens=256, sglang=settings)
    engine = SGLangEngine(str(llama), actors)
    await engine.start()
    model = reference(llama)
    for version in range(3):
        if version:
            update, model = noised(tmp_path, llama, version)
            await engine.load(update)
        prompt = ids(version, 40)
        result = await engine.generate(GenerateRequest(prompt, 3, Sampling(12, seed=version)))
        for sample in result.samples:
            assert near(engine, full_logprobs(model, prompt, sample.tokens), sample.logprobs)
        assert {v for sample in result.samples for v in sample.versions.tolist()} == {version}
    await engine.close()
