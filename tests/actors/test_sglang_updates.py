"""Updates of a scripted SGLang server that fail at each of their steps: what the engine serves
afterwards, and that generation always goes on."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import torch

from coppice.actors.engines.sglang import SGLangEngine
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import GenerateRequest, LoadRequest, Sampling
from coppice.wire.published import Manifest, Memory
from tests.sglang_cpu import scripted
from tests.sglang_cpu.scripted import (
    REQUEST,
    STEPS,
    Server,
    adapter,
    changes,
    engine,
    giving,
    in_memory,
    published,
    sampled,
    version,
    whole,
)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    await made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture
async def updated(server: Server, tmp_path: Path) -> AsyncIterator[SGLangEngine]:
    """An engine that holds version 1."""
    made = engine(tmp_path, server.url)
    await made.start()
    await made.load(version(tmp_path, 1))
    server.calls.clear()
    yield made
    await made.close()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_a_failed_update_serves_nothing_until_one_succeeds(
    server: Server, updated: SGLangEngine, tmp_path: Path, step: str, how: str
) -> None:
    if how == "fails":
        server.fails[step] = 400
        with pytest.raises(InfrastructureFault, match="injected"):
            await updated.load(version(tmp_path, 2))
    else:
        reached, release = server.hold(step)
        update = asyncio.create_task(updated.load(version(tmp_path, 2)))
        await reached.wait()
        update.cancel()
        release.set()
        await asyncio.gather(update, return_exceptions=True)
        assert update.cancelled() and server.going.is_set()
    with pytest.raises(InfrastructureFault, match="weights are unknown"):
        await updated.generate(REQUEST)
    server.going.set()  # where it was the going on that failed
    await updated.load(version(tmp_path, 2))
    assert await sampled(updated) == [2]


@pytest.mark.parametrize("step", STEPS[2:4])
async def test_a_request_that_was_on_its_way_does_not_answer_with_half_an_update(
    server: Server, updated: SGLangEngine, tmp_path: Path, step: str
) -> None:
    reached, release = server.hold("/generate")
    running = asyncio.create_task(updated.generate(REQUEST))
    await reached.wait()
    server.fails[step] = 400
    with pytest.raises(InfrastructureFault, match="injected"):
        await updated.load(version(tmp_path, 2))
    release.set()
    with pytest.raises(InfrastructureFault, match="failed"):
        await running


@pytest.mark.parametrize(
    ("state", "said"), [({"finish": "abort"}, "aborted"), ({"named": "default"}, "'default', exp")]
)
async def test_a_sample_that_was_cut_off_or_is_of_a_server_started_anew_is_refused(
    server: Server, updated: SGLangEngine, state: dict[str, str], said: str
) -> None:
    vars(server).update(state)
    with pytest.raises(InfrastructureFault, match=said):
        await updated.generate(REQUEST)


async def test_a_new_actor_takes_no_weights_of_an_update_that_was_cut_off(
    server: Server, tmp_path: Path
) -> None:
    server.named = "moving-1"
    made = engine(tmp_path, server.url)
    await made.start()
    with pytest.raises(InfrastructureFault, match="moving-1"):
        await made.generate(REQUEST)
    with pytest.raises(InfrastructureFault, match="weight version moving-1 from before"):
        await made.load(adapter(tmp_path, 1))
    assert "/load_lora_adapter" not in server.calls
    await made.close()


async def test_the_most_probable_tokens_are_asked_of_the_embedded_engine(tmp_path: Path) -> None:
    made = engine(tmp_path, "http://127.0.0.1:1")
    with pytest.raises(DataFault, match=r"top_logprobs 3: expected 0 .* ask the embedded engine"):
        await made.generate(GenerateRequest(REQUEST.tokens, 1, Sampling(2, top_logprobs=3)))


@pytest.mark.parametrize("status", [500, 400, 0])
async def test_a_request_that_nobody_waits_for_any_more_is_aborted(
    server: Server, updated: SGLangEngine, status: int
) -> None:
    reached, release = server.hold("/generate")
    server.fails["/generate"] = status
    running = asyncio.create_task(updated.generate(REQUEST))
    await reached.wait()
    (release.set if status else running.cancel)()
    with pytest.raises((InfrastructureFault, DataFault, asyncio.CancelledError)):
        await running
    assert server.bodies["/abort_request"]["rid"] == server.bodies["/generate"]["rid"]


async def test_an_adapter_comes_into_force_without_a_pause_and_the_oldest_goes_after_it(
    server: Server, updated: SGLangEngine, tmp_path: Path
) -> None:
    for number in (2, 3):
        await updated.load(adapter(tmp_path, number))
    server.calls.clear()
    loading, loaded = server.hold("/load_lora_adapter")
    unloading, unloaded = server.hold("/unload_lora_adapter")
    update = asyncio.create_task(updated.load(adapter(tmp_path, 4)))
    await loading.wait()
    assert await sampled(updated) == [3]
    loaded.set()
    await unloading.wait()
    assert await sampled(updated) == [4]
    unloaded.set()
    await update
    steps = [path for path in server.calls if path != "/generate"]
    assert steps == ["/load_lora_adapter", "/weights_checker", "/unload_lora_adapter"]


async def test_an_adapter_on_other_base_weights_is_noticed(
    server: Server, updated: SGLangEngine, tmp_path: Path
) -> None:
    server.weights = 99
    with pytest.raises(InfrastructureFault, match="other base weights"):
        await updated.load(adapter(tmp_path, 2))
    with pytest.raises(InfrastructureFault, match="weights are unknown"):
        await updated.generate(REQUEST)
    server.weights = 1
    await updated.load(adapter(tmp_path, 3))
    assert await sampled(updated) == [3]


async def test_an_update_that_changes_nothing_is_noticed(
    server: Server, updated: SGLangEngine, tmp_path: Path
) -> None:
    first = version(tmp_path, 1)
    await updated.load(first)  # the digest says so: nothing was to change
    other = published(tmp_path, 2, "full", whole(1) | {"c.weight": torch.zeros(4, 4)})
    with pytest.raises(InfrastructureFault, match="those from before version 2"):
        await updated.load(other)


async def test_changes_reach_sglang_as_whole_weights(server: Server, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    requests = changes(tmp_path / "weights", 4)
    follower = engine(tmp_path, server.url)
    await follower.start()
    for request in requests[:2]:
        await follower.load(request)
        assert await sampled(follower) == [request.version] and server.weights == request.version
    await follower.close()
    late = engine(tmp_path, server.url)
    await late.start()
    for request in requests[2:]:
        await late.load(request)
        assert await sampled(late) == [request.version] and server.weights == request.version
    await late.close()


@pytest.mark.parametrize("name", ["a.weight", "z.weight"])
async def test_weights_of_another_model_are_refused_before_sglang_sees_them(
    server: Server, updated: SGLangEngine, tmp_path: Path, name: str
) -> None:
    """SGLang would end its process over a wrong shape, and take no notice of an unknown name."""
    other = published(tmp_path, 2, "full", whole(2) | {name: torch.zeros(5)})
    with pytest.raises(InfrastructureFault, match=name):
        await updated.load(other)
    assert not server.calls and await sampled(updated) == [1]


async def test_a_version_that_the_learner_no_longer_gives_is_refused(
    server: Server, updated: SGLangEngine, tmp_path: Path
) -> None:
    with giving() as giver:
        old, _, _ = (in_memory(tmp_path, giver, number) for number in (2, 3, 4))
        with pytest.raises(InfrastructureFault, match="asked for version 2, gives 3, 4"):
            await updated.load(old)
    assert "/pause_generation" not in server.calls and await sampled(updated) == [1]


async def test_a_broadcast_of_names_that_the_model_has_not_is_refused(
    server: Server, updated: SGLangEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted, "TENSORS", ("a.weight", "experts.gate_up_proj"))
    refused = pytest.raises(InfrastructureFault, match=r"experts\.gate_up_proj .*no such tensor")
    with giving() as giver, refused:
        await updated.load(in_memory(tmp_path, giver, 2))
    assert "/pause_generation" not in server.calls and await sampled(updated) == [1]


@pytest.mark.second
async def test_a_learner_that_is_gone_is_an_error_within_the_timeout(
    server: Server, tmp_path: Path
) -> None:
    made = engine(tmp_path, server.url, update_timeout_s=2.0)
    await made.start()
    Manifest(7, "full", "d" * 64, False, Memory("127.0.0.1:1", "cpu")).write(tmp_path)
    with pytest.raises(InfrastructureFault, match="rendezvous"):
        await asyncio.wait_for(made.load(LoadRequest(7, str(tmp_path), "d" * 64)), 60)
    await made.close()


@pytest.mark.second
@pytest.mark.parametrize("answers", [False, True])
async def test_a_server_that_is_not_there_or_refuses_the_key_fails_the_start(
    server: Server, tmp_path: Path, answers: bool
) -> None:
    server.fails["/health"] = 401
    made: Any = engine(tmp_path, server.url if answers else "http://127.0.0.1:9")
    with pytest.raises(InfrastructureFault, match="does not answer /health"):
        await made.start()
    await made.close()


async def test_experts_are_told_from_the_first_position_asked_for(updated: SGLangEngine) -> None:
    sampling = msgspec.structs.replace(REQUEST.sampling, experts_from=1)
    (sample,) = (
        await updated.generate(msgspec.structs.replace(REQUEST, sampling=sampling))
    ).samples
    assert sample.experts is not None
    assert sample.experts.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (await updated.generate(REQUEST)).samples[0].experts is None
