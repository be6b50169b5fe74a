"""The vllm engine against a scripted server: its requests, updates that fail at each of their steps,
and what it refuses. Against a real server: its guard. The contract holds it beside the others
(test_engine_contract.py)."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web

from coppice.actors.config import ActorsConfig, ServedConfig
from coppice.actors.engines.vllm import VLLMEngine
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import Constraint, GenerateRequest, LoadRequest, Sampling
from coppice.wire.published import Manifest, Memory
from tests.sglang_cpu.scripted import REQUEST, WAIT_S, Server, adapter, model, sampled, version

STEPS = [
    "/pause", "/reset_prefix_cache", "/update_weight_version", "/collective_rpc", "/weight_checker",
    "/resume",
]  # fmt: skip
GENERATE = "/inference/v1/generate"


class Scripted(Server):
    """A vLLM server, whose samples are the number of its weights."""

    def anew(self) -> None:
        super().anew()
        self.logprob, self.raw, self.checksum = -1.0, False, ""

    async def reply(self, path: str, body: dict[str, Any]) -> web.StreamResponse:
        match path:
            case "/resume":
                self.going.set()
            case "/collective_rpc":
                self.take(body["kwargs"]["weights_path"])
            case "/update_weight_version":
                self.named = body["new_version"]
            case "/v1/load_lora_adapter":
                self.adapters.add(body["lora_name"])
                return web.Response(text="Success: LoRA adapter added")
            case "/v1/unload_lora_adapter":
                self.adapters.remove(body["lora_name"])
                return web.Response(text="Success: LoRA adapter removed")
            case "/weight_checker":
                return web.json_response({"checksums": {"a": self.checksum or f"{self.weights}"}})
            case "/v1/models":
                return web.json_response({"data": [{"id": "base", "max_model_len": 400}]})
            case "/metrics":
                info = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="9"} 1'
                return web.Response(text=info)
            case "/inference/v1/generate":
                return await self.sample(body)
        return web.json_response({"weight_version": self.named})

    async def sample(self, body: dict[str, Any]) -> web.Response:
        await self.going.wait()
        if "@" in body["cache_salt"]:
            return web.json_response({"error": {"message": "cache_salt"}}, status=400)
        if "model" in body and body["model"] not in self.adapters:
            error = {"error": {"message": f"The model `{body['model']}` does not exist."}}
            return web.json_response(error, status=404)
        logprob = 0.0 if "top_k" in body["sampling_params"] and not self.raw else self.logprob
        if body["request_id"] != "coppice-probe":
            logprob = self.logprob
        one = {
            "token_ids": [self.weights], "logprobs": {"content": [{"logprob": logprob}]},
            "finish_reason": self.finish,
            "weight_versions": [{"version": self.named, "start": 0, "end": 1}],
        }  # fmt: skip
        usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
        choices = [one] * body["sampling_params"].get("n", 1)
        return web.json_response({"choices": choices, "usage": usage})


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Scripted]:
    made = Scripted()
    await made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture
async def engine(server: Scripted, tmp_path: Path) -> AsyncIterator[VLLMEngine]:
    made = connected(tmp_path, server)
    await made.start()
    server.calls.clear()
    yield made
    await made.close()


def connected(folder: Path, server: Scripted) -> VLLMEngine:
    vllm = ServedConfig(way="url", urls=[server.url], update_timeout_s=WAIT_S)
    config = ActorsConfig(engine="vllm", max_batch=8, max_context=512, vllm=vllm)
    return VLLMEngine(model(folder), config)


async def test_a_request_names_what_vllm_is_to_sample(engine: VLLMEngine, server: Scripted) -> None:
    form = Constraint("json_schema", '{"type": "object"}')
    sampling = Sampling(4, 0.5, 0.9, 7, stop=["a"], seed=3, constraint=form)
    result = await engine.generate(GenerateRequest(np.array([1, 2, 3], np.int32), 2, sampling))
    body = server.bodies[GENERATE]
    assert body["sampling_params"] == {
        "n": 2, "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "stop": ["a"],
        "seed": 3000009, "structured_outputs": {"json": form.text}, "logprobs": 0,
    }  # fmt: skip
    # vLLM takes no @ in a salt
    assert (body["token_ids"], body["cache_salt"]) == ([1, 2, 3], server.named.replace("@", "-"))
    assert [sample.logprobs.tolist() for sample in result.samples] == [[-1.0], [-1.0]]
    assert engine.longest == 400
    counters = engine.stats()
    assert (counters["prompt_tokens"], counters["cached_tokens"]) == (3, 2)
    assert counters["kv_capacity_tokens"] == 144


@pytest.mark.parametrize("step", STEPS)
async def test_an_update_that_fails_at_a_step_is_served_by_nobody_until_the_next(
    engine: VLLMEngine, server: Scripted, tmp_path: Path, step: str
) -> None:
    server.fails[step] = 500
    with pytest.raises(InfrastructureFault, match="injected"):
        await engine.load(version(tmp_path, 1))
    assert "/abort_requests" in server.calls or step == "/resume"
    assert "/resume" in server.calls[-1]
    with pytest.raises(InfrastructureFault, match="weights are unknown"):
        await sampled(engine)
    await engine.load(version(tmp_path, 2))
    assert await sampled(engine) == [2]


async def test_an_adapter_is_loaded_under_a_new_name_and_the_two_newest_stay(
    engine: VLLMEngine, server: Scripted, tmp_path: Path
) -> None:
    for number in (1, 2, 3):
        await engine.load(adapter(tmp_path, number))
        assert await sampled(engine) == [number]
        body = server.bodies[GENERATE]
        assert body["model"] == body["cache_salt"]
        assert body["model"].startswith(f"coppice-v{number}")
    assert len(server.adapters) == 2 and "/pause" not in server.calls
    server.adapters.clear()
    with pytest.raises(InfrastructureFault, match="lost adapter"):
        await sampled(engine)


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (Sampling(4, top_logprobs=3), "top_logprobs 3: expected 0"),
        (Sampling(4, top_p=0.9, support=True), "expected top_p 1"),
    ],
)
async def test_what_vllm_cannot_report_is_refused(
    engine: VLLMEngine, sampling: Sampling, said: str
) -> None:
    with pytest.raises(DataFault, match=said):
        await engine.generate(GenerateRequest(REQUEST.tokens, 1, sampling))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fails": {"/weight_info": 404}}, "VLLM_SERVER_DEV_MODE=1"),
        ({"fails": {GENERATE: 404}}, "--enable-scale-out"),
        ({"raw": True}, "before top-k"),
    ],
)
async def test_a_server_that_is_not_started_as_needed_is_refused_at_the_start(
    server: Scripted, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    vars(server).update(change)
    with pytest.raises(InfrastructureFault, match=said):
        await connected(tmp_path, server).start()


@pytest.mark.parametrize("change", [{"logprob": -9999.0}, {"finish": "error"}, {"finish": "abort"}])
async def test_a_sample_without_what_was_asked_for_is_refused(
    engine: VLLMEngine, server: Scripted, change: dict[str, Any]
) -> None:
    vars(server).update(change)
    with pytest.raises(InfrastructureFault, match=r"of vllm 0\.32 does not|aborted a request"):
        await sampled(engine)


async def test_weights_that_vllm_cannot_take_are_refused_and_the_old_ones_serve(
    engine: VLLMEngine, server: Scripted, tmp_path: Path
) -> None:
    memory = Memory("127.0.0.1:1", "token", "cpu")
    (tmp_path / "memory").mkdir()
    Manifest(1, "full", "d" * 64, False, memory).write(tmp_path / "memory")
    with pytest.raises(InfrastructureFault, match=r"learner\.publish"):
        await engine.load(LoadRequest(1, str(tmp_path / "memory"), "d" * 64))
    assert await sampled(engine) == [0]


async def test_a_tied_output_layer_on_a_cpu_takes_adapters_only(
    server: Scripted, tmp_path: Path
) -> None:
    # the checksum of nothing: vLLM has packed the layer's weights
    server.checksum = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    made = connected(tmp_path, server)
    await made.start()
    with pytest.raises(InfrastructureFault, match="tied to the embedding"):
        await made.load(version(tmp_path, 1))
    await made.load(adapter(tmp_path, 1))
    assert await sampled(made) == [1]
    await made.close()


async def test_a_server_of_an_actor_answers_nobody_without_its_key(vllm_server: Any) -> None:
    async with aiohttp.ClientSession(vllm_server.url) as session:
        for path in ("/collective_rpc", "/pause", GENERATE):
            async with session.post(path, json={"method": "reload_weights"}) as answer:
                assert answer.status == 401
        async with session.get("/health") as answer:
            assert answer.status == 200
