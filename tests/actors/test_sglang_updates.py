"""An update of SGLang that fails at each of its steps: what the engine serves afterwards, and that
generation always goes on.

The server is scripted: a real one cannot be made to fail at a chosen step. What a real one does is
in test_sglang_weights.py.
"""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from coppice.actors.config import ActorsConfig, SGLangConfig
from coppice.actors.engines import sglang, sglang_weights
from coppice.actors.engines.sglang_api import Facts
from coppice.wire import digest
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import GenerateRequest, LoadRequest, Sampling
from coppice.wire.published import Manifest

REQUEST = GenerateRequest(np.array([1, 2, 3], np.int32), 1, Sampling(4))
STEPS = [
    "/pause_generation",
    "/update_weight_version",
    "/update_weights_from_disk",
    "/weights_checker",
]


class Scripted:
    """Server and way in one: answers like SGLang, fails where ``fails`` says, ``once`` for each
    entry."""

    name, elastic = "scripted", False

    def __init__(self) -> None:
        self.servers = [self]
        self.weights, self.version, self.paused = "base", "0", False
        self.fails: dict[str, BaseException] = {}
        self.calls: list[str] = []
        self.finish = "length"
        self.aborted: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.let_go = asyncio.Event()
        self.held = False

    async def start(self) -> None: ...

    async def facts(self) -> Facts:
        return Facts(1000, 1000, 260, "cuda", "float32", 1, self.version)

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        await (self.let_go.wait() if self.held else asyncio.sleep(0.05))  # on its way
        if "/generate" in self.fails:
            raise self.fails.pop("/generate")
        while self.paused:
            await asyncio.sleep(0.01)
        meta = {"weight_version": self.version, "prompt_tokens": 3, "cached_tokens": 0}
        meta |= {"finish_reason": {"type": self.finish}, "output_token_logprobs": [[-1.0, 1, None]]}
        return {"output_ids": [1], "meta_info": meta}

    async def abort(self, names: list[str]) -> None:
        self.aborted += names

    async def died(self) -> str:
        return ""

    async def close(self) -> None: ...

    async def call(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.calls.append(path)
        if path == "/pause_generation":
            self.paused = True
        if path == "/continue_generation":
            self.paused = False
        if path == "/update_weights_from_disk":
            self.weights = digest.safetensors_file(Path(body["model_path"]) / "model.safetensors")
        if path in self.fails:
            raise self.fails.pop(path)
        if path == "/update_weight_version":
            self.version = body["new_version"]
        return (
            {"per_engine_checksum": self.weights, "ranks": []} if path == "/weights_checker" else {}
        )


def version(folder: Path, number: int) -> LoadRequest:
    """A published version of a model of one tensor."""
    place = folder / f"v{number}"
    place.mkdir(exist_ok=True)
    save_file({"a": torch.full((4,), float(number))}, place / "model.safetensors")
    proof = digest.safetensors_file(place / "model.safetensors")
    Manifest(number, "full", proof).write(place)
    return LoadRequest(number, str(place), proof)


def adapter(folder: Path, number: int) -> LoadRequest:
    """A published adapter, which only a real SGLang could read."""
    place = folder / f"a{number}"
    place.mkdir()
    save_file({"a": torch.full((4,), float(number))}, place / "adapter_model.safetensors")
    proof = digest.safetensors_file(place / "adapter_model.safetensors")
    Manifest(number, "lora", proof).write(place)
    return LoadRequest(number, str(place), proof)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    made = Scripted()
    monkeypatch.setattr(sglang, "ways", lambda *_: made)
    return made


async def started(
    tmp_path: Path, settings: SGLangConfig = SGLangConfig(update_timeout_s=5)
) -> sglang.SGLangEngine:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    save_file({"a": torch.zeros(4)}, base / "model.safetensors")
    config = ActorsConfig(max_batch=8, max_context=512, sglang=settings)
    made = sglang.SGLangEngine(str(base), config)
    await made.start()
    await made.load(version(tmp_path, 1))
    return made


@pytest.mark.parametrize("step", [*STEPS, "/continue_generation"])
@pytest.mark.parametrize(
    "error", [InfrastructureFault("injected"), KeyError("buckets"), asyncio.CancelledError()]
)
async def test_a_failed_update_serves_nothing_until_one_succeeds(
    server: Scripted, tmp_path: Path, step: str, error: BaseException
) -> None:
    engine = await started(tmp_path)
    server.fails = {step: error}
    with pytest.raises((InfrastructureFault, asyncio.CancelledError)):
        await engine.load(version(tmp_path, 2))
    assert "/continue_generation" in server.calls[server.calls.index("/pause_generation") :]
    with pytest.raises(InfrastructureFault, match="weights are unknown"):
        await engine.generate(REQUEST)
    server.paused = False  # where it was the going on that failed
    await engine.load(version(tmp_path, 2))
    assert (await engine.generate(REQUEST)).samples[0].versions.tolist() == [2]


@pytest.mark.parametrize("step", STEPS[2:])
async def test_a_request_that_was_on_its_way_does_not_answer_with_half_an_update(
    server: Scripted, tmp_path: Path, step: str
) -> None:
    engine = await started(tmp_path)
    server.fails = {step: InfrastructureFault("injected")}
    server.held = True
    running = asyncio.create_task(engine.generate(REQUEST))
    while not server.bodies:
        await asyncio.sleep(0)
    with pytest.raises(InfrastructureFault, match="injected"):
        await engine.load(version(tmp_path, 2))
    server.let_go.set()
    with pytest.raises(InfrastructureFault, match="failed"):
        await running


class Held:
    """Calls of ``path`` stand still from where the server has taken them until ``release``."""

    def __init__(self, server: Scripted, path: str):
        self.path, self.answer = path, server.call
        self.reached, self.release = asyncio.Event(), asyncio.Event()
        server.call = self.call  # pyright: ignore[reportAttributeAccessIssue]

    async def call(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        answer = await self.answer(path, body, timeout_s)
        if path == self.path:
            self.reached.set()
            await self.release.wait()
        return answer


async def test_a_cancelled_update_leaves_no_server_paused(server: Scripted, tmp_path: Path) -> None:
    engine = await started(tmp_path)
    pausing = Held(server, "/pause_generation")
    task = asyncio.create_task(engine.load(version(tmp_path, 2)))
    await pausing.reached.wait()
    assert server.paused
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not server.paused


async def test_an_action_that_was_cut_off_is_no_sample(server: Scripted, tmp_path: Path) -> None:
    engine = await started(tmp_path)
    server.finish = "abort"
    with pytest.raises(InfrastructureFault, match="aborted"):
        await engine.generate(REQUEST)


async def test_a_server_that_somebody_started_anew_is_noticed(
    server: Scripted, tmp_path: Path
) -> None:
    engine = await started(tmp_path)
    server.version = "default"
    with pytest.raises(InfrastructureFault, match="'default', expected '1@"):
        await engine.generate(REQUEST)


async def test_a_new_actor_takes_no_weights_of_an_update_that_was_cut_off(
    server: Scripted, tmp_path: Path
) -> None:
    server.version = "moving-1"
    (tmp_path / "base").mkdir()
    engine = sglang.SGLangEngine(str(tmp_path / "base"), ActorsConfig(max_batch=8, max_context=512))
    await engine.start()
    with pytest.raises(InfrastructureFault, match="moving-1"):
        await engine.generate(REQUEST)


@pytest.mark.parametrize(
    "error",
    [InfrastructureFault("no answer within 1800 s"), TimeoutError(), asyncio.CancelledError()],
)
async def test_a_request_that_nobody_waits_for_any_more_is_aborted(
    server: Scripted, tmp_path: Path, error: BaseException
) -> None:
    engine = await started(tmp_path)
    server.fails = {"/generate": error}
    with pytest.raises(type(error)):
        await engine.generate(REQUEST)
    assert server.aborted == [server.bodies[-1]["rid"]]


async def test_requests_go_on_while_a_version_is_verified(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await started(tmp_path)
    verifying, verified = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(*_: Any) -> None:
        loop.call_soon_threadsafe(verifying.set)
        verified.wait(30)

    monkeypatch.setattr(sglang_weights, "_verify", slow)
    update = asyncio.create_task(engine.load(version(tmp_path, 2)))
    await verifying.wait()
    try:
        assert (await asyncio.wait_for(engine.generate(REQUEST), 10)).samples[
            0
        ].versions.tolist() == [1]
    finally:
        verified.set()
    await update
    assert (await engine.generate(REQUEST)).samples[0].versions.tolist() == [2]


async def test_an_adapter_comes_into_force_without_a_pause_and_the_oldest_goes_after_it(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await started(tmp_path)
    monkeypatch.setattr(sglang_weights, "_verify", lambda *_: None)
    for number in (2, 3):
        await engine.load(adapter(tmp_path, number))
    server.calls.clear()
    loading, unloading = Held(server, "/load_lora_adapter"), Held(server, "/unload_lora_adapter")
    update = asyncio.create_task(engine.load(adapter(tmp_path, 4)))
    await loading.reached.wait()
    assert (await engine.generate(REQUEST)).samples[0].versions.tolist() == [3]
    loading.release.set()
    await unloading.reached.wait()
    assert (await engine.generate(REQUEST)).samples[0].versions.tolist() == [4]
    unloading.release.set()
    await update
    assert server.calls == ["/load_lora_adapter", "/weights_checker", "/unload_lora_adapter"]


async def test_an_adapter_on_other_base_weights_is_noticed(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await started(tmp_path)
    monkeypatch.setattr(sglang_weights, "_verify", lambda *_: None)
    was, server.weights = server.weights, "of another model"
    with pytest.raises(InfrastructureFault, match="other base weights"):
        await engine.load(adapter(tmp_path, 2))
    with pytest.raises(InfrastructureFault, match="weights are unknown"):
        await engine.generate(REQUEST)
    server.weights = was
    await engine.load(adapter(tmp_path, 3))
    assert (await engine.generate(REQUEST)).samples[0].versions.tolist() == [3]


async def test_two_servers_of_one_engine_with_different_weights_are_noticed(
    server: Scripted, tmp_path: Path
) -> None:
    engine = await started(tmp_path)
    server.servers.append(Scripted())
    server.weights = "of another model"
    with pytest.raises(InfrastructureFault, match="different weights"):
        await engine.weights.start()


async def test_no_adapter_goes_onto_whole_weights_of_a_run_before(
    server: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.version = "7"
    (tmp_path / "base").mkdir()
    engine = sglang.SGLangEngine(str(tmp_path / "base"), ActorsConfig(max_batch=8, max_context=512))
    await engine.start()
    monkeypatch.setattr(sglang_weights, "_verify", lambda *_: None)
    with pytest.raises(InfrastructureFault, match="weight version 7 from before"):
        await engine.load(adapter(tmp_path, 1))
    assert "/load_lora_adapter" not in server.calls
