"""Weights into a real SGLang server by each transport, out of the learner's real giver; and what
happens when an update fails."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from coppice.actors.config import ActorsConfig, SGLangConfig
from coppice.actors.engines import sglang_transport as transport
from coppice.actors.engines.sglang import SGLangEngine
from coppice.actors.engines.sglang_api import Facts, arguments, linear_layers
from coppice.learner.model.publish import fingerprint
from coppice.learner.model.weight_server import Snapshot, WeightServer
from coppice.wire import digest
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import GenerateRequest, GenerateResult, LoadRequest, Sampling
from coppice.wire.published import Manifest, Memory
from tests.actors.test_engine_contract import restore
from tests.actors.test_local_engine import (
    GREATEST_DIFFERENCE,
    ids,
    reference,
    version_folder,
    worst,
)
from tests.sglang_cpu.shared import Shared as Server

CUDA, CPU = Facts(device="cuda"), Facts(device="cpu")


@pytest_asyncio.fixture
async def engine(sglang_server: Server, llama: Path, tmp_path: Path) -> AsyncIterator[SGLangEngine]:
    """On the session's server, with the base weights."""
    made = sglang_server.engine()
    await made.start()
    await restore(made, llama, tmp_path)
    yield made
    await made.close()


def test_the_rendezvous_listens_on_its_host_alone_and_ends() -> None:
    giver = WeightServer(timeout_s=5.0)
    port = int(giver.address.rpartition(":")[2])
    found = [
        c
        for c in psutil.Process().net_connections()
        if c.status == "LISTEN" and c.laddr.port == port
    ]
    assert [c.laddr.ip for c in found] == ["127.0.0.1"]
    giver.close()


def in_memory(
    tmp_path: Path, giver: WeightServer, version: int, tensors: dict[str, Any], bucket_bytes: int
) -> LoadRequest:
    """A version that only the giver holds."""
    folder = tmp_path / f"m{version}"
    folder.mkdir()
    proof = fingerprint(tensors)
    memory = giver.offer(Snapshot(version, tensors, bucket_bytes))
    Manifest(version, "full", proof, False, memory).write(folder)
    return LoadRequest(version, str(folder), proof)


def judge(result: GenerateResult, prompt: np.ndarray, model: Any, version: int) -> None:
    """All samples are of ``version``, whose log-probabilities are those of ``model``."""
    assert {v for sample in result.samples for v in sample.versions.tolist()} == {version}
    assert worst(model, [(prompt, result)]) < GREATEST_DIFFERENCE


@pytest.mark.parametrize("wanted", ["tensor", "distributed"])
async def test_weights_out_of_the_learners_memory(
    engine: SGLangEngine, llama: Path, tmp_path: Path, wanted: transport.Transport
) -> None:
    if wanted == "distributed" and torch.cuda.device_count() == 1:
        pytest.skip("a broadcast between GPUs needs two")
    _, _, model = version_folder(tmp_path, llama, 7)
    # where a learner beside GPU servers holds them
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {name: p.detach().to(device) for name, p in model.named_parameters()}
    giver = WeightServer(timeout_s=60.0)
    try:
        # The rendezvous is on a CPU, where "auto" would take the tensors: the test names its
        # transport.
        engine.weights.config = msgspec.structs.replace(engine.weights.config, weights=wanted)
        loaded = await engine.load(in_memory(tmp_path, giver, 7, tensors, bucket_bytes=20_000))
    finally:
        giver.close()
    assert loaded.proof
    result = await engine.generate(GenerateRequest(ids(1, 20), 1, Sampling(6)))
    judge(result, ids(1, 20), model, 7)
    assert engine.counts["loaded_bytes"] >= sum(t.nbytes for t in tensors.values())


async def test_an_update_in_place_keeps_no_cache_for_the_next_version(
    engine: SGLangEngine, llama: Path, tmp_path: Path
) -> None:
    """Its entries stay on the server, under the salt of the version that computed them."""
    engine.weights.config = msgspec.structs.replace(engine.weights.config, pause="in_place")
    request = GenerateRequest(ids(5, 40), 2, Sampling(6))
    await engine.generate(request)
    assert (await engine.generate(request)).cached_tokens == 39
    folder, proof, model = version_folder(tmp_path, llama, 7)
    await engine.load(LoadRequest(7, str(folder), proof))
    result = await engine.generate(request)
    assert result.cached_tokens == 0
    judge(result, request.tokens, model, 7)


async def test_an_update_that_changes_nothing_is_noticed(
    engine: SGLangEngine, llama: Path, tmp_path: Path
) -> None:
    folder, proof, _ = version_folder(tmp_path, llama, 8)
    await engine.load(LoadRequest(8, str(folder), proof))
    same = tmp_path / "same"
    same.mkdir()
    (same / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    Manifest(9, "full", proof).write(same)
    await engine.load(LoadRequest(9, str(same), proof))  # the digest says so: nothing was to change
    engine.weights._whole = LoadRequest(8, str(folder), "of other weights")
    with pytest.raises(InfrastructureFault, match="those from before"):
        await engine.load(LoadRequest(9, str(same), proof))
    with pytest.raises(InfrastructureFault, match="weights are unknown"):
        await engine.generate(GenerateRequest(ids(2, 8), 1, Sampling(2)))
    (tmp_path / "again").mkdir()
    await restore(engine, llama, tmp_path / "again")
    assert (await engine.generate(GenerateRequest(ids(2, 8), 1, Sampling(2)))).samples


@pytest.mark.parametrize("name", ["model.norm.weight", "model.zzz.weight"])
async def test_weights_of_another_model_are_refused_before_sglang_sees_them(
    engine: SGLangEngine, llama: Path, tmp_path: Path, name: str
) -> None:
    """It would end its process over a wrong shape, and take no notice of an unknown name."""
    folder = tmp_path / "other"
    folder.mkdir()
    tensors = {n: p.detach().clone() for n, p in reference(llama).named_parameters()} | {
        name: torch.zeros(5)
    }
    save_file(tensors, folder / "model.safetensors")
    proof = digest.safetensors_file(folder / "model.safetensors")
    Manifest(9, "full", proof).write(folder)
    with pytest.raises(InfrastructureFault, match=name):
        await engine.load(LoadRequest(9, str(folder), proof))
    (sample,) = (await engine.generate(GenerateRequest(ids(2, 8), 1, Sampling(2)))).samples
    assert set(sample.versions.tolist()) == {0}


async def test_a_version_the_learner_no_longer_gives_is_an_error_that_says_so(
    engine: SGLangEngine, llama: Path, tmp_path: Path
) -> None:
    tensors = {name: p.detach() * 1.01 for name, p in reference(llama).named_parameters()}
    giver = WeightServer(timeout_s=10.0)
    try:
        engine.weights.config = msgspec.structs.replace(engine.weights.config, weights="tensor")
        old = in_memory(tmp_path, giver, 7, tensors, 20_000)
        giver.offer(Snapshot(8, tensors))
        await engine.load(old)  # the version before the newest is still given
        giver.offer(Snapshot(9, tensors))
        with pytest.raises(InfrastructureFault, match="asked for version 7, gives 8, 9"):
            await engine.load(old)
        # nothing was touched
        assert (await engine.generate(GenerateRequest(ids(2, 8), 1, Sampling(2)))).samples
    finally:
        giver.close()


async def test_a_learner_that_is_gone_is_an_error_within_the_timeout(
    engine: SGLangEngine, tmp_path: Path
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    Manifest(7, "full", "d" * 64, False, Memory("127.0.0.1:1", "here", "cpu")).write(folder)
    engine.weights.config = msgspec.structs.replace(
        engine.weights.config, weights="tensor", update_timeout_s=2.0
    )
    with pytest.raises(InfrastructureFault, match="rendezvous"):
        await asyncio.wait_for(engine.load(LoadRequest(7, str(folder), "d" * 64)), 60)


def test_a_server_is_started_for_the_layers_that_the_learner_trains(llama: Path) -> None:
    from peft import LoraConfig, get_peft_model

    # as learner/model/model.py
    adapted: Any = get_peft_model(reference(llama), LoraConfig(target_modules="all-linear"))
    trained = {
        name.split(".lora_A")[0].split(".")[-1]
        for name, _ in adapted.named_parameters()
        if "lora_A" in name
    }
    assert set(linear_layers(llama)) == trained
    given = {"enable_lora": True, "lora_target_modules": ["q_proj"]}
    assert (
        arguments(str(llama), ActorsConfig(sglang=SGLangConfig(arguments=given))).items()
        >= given.items()
    )
    assert "lora_target_modules" not in arguments(str(llama), ActorsConfig())


@pytest.mark.parametrize(
    ("manifest", "facts", "host", "gpus", "expected"),
    [
        ({"kind": "lora"}, CUDA, "h", {"0"}, "adapter"),
        ({}, CUDA, "h", {"0"}, "disk"),
        ({"memory": Memory("s", "h", "cuda", "0")}, CUDA, "h", {"0"}, "tensor"),
        ({"memory": Memory("s", "h", "cuda", "0")}, CUDA, "h", {"1"}, "distributed"),
        ({"memory": Memory("s", "h", "cuda", "0")}, CUDA, "", set(), "distributed"),
        ({"memory": Memory("s", "h", "cpu")}, CUDA, "h", {"0"}, "disk"),
        ({"memory": Memory("s", "h", "cpu"), "file": False}, CPU, "h", set(), "tensor"),
        ({"memory": Memory("s", "h", "cpu"), "file": False}, CPU, "g", set(), "distributed"),
    ],
)
def test_the_transport_follows_from_where_the_processes_are(
    manifest: dict[str, Any], facts: Facts, host: str, gpus: set[str], expected: str
) -> None:
    made = Manifest(**({"version": 1, "kind": "full", "digest": "d"} | manifest))
    assert transport.choose(made, facts, SGLangConfig(), host, frozenset(gpus)) == expected


@pytest.mark.parametrize(
    ("wanted", "manifest"),
    [
        ("disk", Manifest(1, "full", "d", False, Memory("s", "h", "cpu"))),
        ("tensor", Manifest(1, "full", "d")),
    ],
)
def test_a_transport_that_cannot_be_had_is_refused_with_the_remedy(
    wanted: transport.Transport, manifest: Manifest
) -> None:
    config = SGLangConfig(weights=wanted)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InfrastructureFault, match=r"learner\.publish"):
        transport.choose(manifest, Facts(), config, "h", frozenset())
