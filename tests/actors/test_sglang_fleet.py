"""Servers that join, leave, die and start anew behind a router during a run, in every order with
the updates of weights.

Router and servers are scripted, over real HTTP: real ones cannot be made to fail at a chosen step.
The router answers as sglang-router 0.3.2 does. What the real ones do is in
tests/sglang_cpu/router_compare.py.
"""

import asyncio
import contextlib
import gc
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from aiohttp import ClientError, ClientSession, web
from safetensors.torch import load_file, save_file

from coppice.actors.config import ActorsConfig, SGLangConfig
from coppice.actors.engines import sglang, sglang_transport, sglang_weights
from coppice.learner.model.weight_server import Snapshot, WeightServer
from coppice.wire.faults import DataFault
from coppice.wire.messages import GenerateRequest, GenerateResult, LoadRequest, Sampling
from coppice.wire.published import Manifest
from tests.actors.test_sglang_updates import REQUEST, STEPS, adapter, version

WAIT_S = 60.0
"""Seconds after which a test that waits for an event has failed."""


class Site:
    """A web application on a port of its own, which ``start`` and ``stop`` open and close like a
    process that starts and dies."""

    def __init__(self) -> None:
        self.port = 0
        self.runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self.answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError


class Server(Site):
    """A scripted SGLang server. Its samples are the number of the weights that it holds: 0 is the
    base model."""

    def __init__(self, number: int = 0, tensors: str = "a") -> None:
        super().__init__()
        self.number, self.tensors = number, tensors
        self.calls: list[str] = []
        self.anew()
        self.flushed: list[bool] = []
        self.fails: set[str] = set()
        self.dies: set[str] = set()
        self.at: dict[str, Callable[[], Any]] = {}
        """What to wait for in a call."""

    def anew(self) -> None:
        """Forget everything, as a process that starts."""
        self.weights, self.named, self.adapters = self.number, "default", set[str]()
        self.going = asyncio.Event()
        self.going.set()

    def hold(self, path: str) -> tuple[asyncio.Event, asyncio.Event]:
        """Have calls of a path wait: return the events that one has come, and that they go on."""
        reached, release = asyncio.Event(), asyncio.Event()

        async def held() -> None:
            reached.set()
            await release.wait()

        self.at[path] = held
        return reached, release

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path, body = request.path, await request.json() if request.can_read_body else {}
        self.calls.append(path)
        self.flushed += [body["flush_cache"]] if "flush_cache" in body else []
        if path in self.dies:
            self.dies.clear()
            assert request.transport is not None
            request.transport.abort()
            self.gone = asyncio.create_task(self.stop())
            await asyncio.Event().wait()  # until the end of the connection cancels this
        if path in self.at:
            await self.at[path]()
        if path in self.fails:
            self.fails.discard(path)
            return web.json_response({"success": False, "message": "injected"}, status=400)
        match path:
            case "/pause_generation":
                self.going.clear()
            case "/continue_generation":
                self.going.set()
            case "/update_weights_from_disk":
                self.weights = int(
                    load_file(Path(body["model_path"]) / "model.safetensors")["a"][0]
                )
            case "/update_weight_version":
                self.named = body["new_version"]
            case "/load_lora_adapter":
                self.adapters.add(body["lora_name"])
            case "/generate":
                return await self.sample(body)
            case "/weights_checker":
                ranks = [{"checksums": {self.tensors: f"{self.weights}"}}]
                return web.json_response(
                    {"per_engine_checksum": f"of {self.weights} {self.tensors}", "ranks": ranks}
                )
            case "/workers":
                return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(
            {"max_total_num_tokens": 1000, "device": "cuda", "weight_version": self.named}
        )

    async def sample(self, body: dict[str, Any]) -> web.Response:
        await self.going.wait()
        if body.get("lora_path") and body["lora_path"] not in self.adapters:
            return web.json_response(
                {"error": {"message": "adapter has never been loaded"}}, status=400
            )
        meta: dict[str, Any] = {"weight_version": self.named, "prompt_tokens": 3}
        meta |= {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 1, None]]}
        return web.json_response({"output_ids": [self.weights], "meta_info": meta})


class Router(Site):
    """A scripted router. It sends to its servers in turn, to the newest alone after ``newest``, and
    tries no other when one fails."""

    def __init__(self, *servers: Server):
        super().__init__()
        self.turns = itertools.count()
        self.here: dict[str, Server] = {}
        self.newest = False
        self.removed: list[str] = []
        for server in servers:
            self.add(server)

    def add(self, server: Server) -> None:
        self.here[f"id-{len(self.here) + len(self.removed)}-{server.port}"] = server

    def remove(self, server: Server) -> None:
        self.here = {key: one for key, one in self.here.items() if one is not server}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "DELETE":
            number = request.path.rpartition("/")[2]
            self.removed.append(self.here.pop(number).url)
            return web.json_response({"status": "accepted"}, status=202)
        match request.path:
            case "/workers":
                workers = [
                    {"id": key, "url": one.url, "is_healthy": True}
                    for key, one in self.here.items()
                ]
                return web.json_response({"workers": workers, "total": len(workers)})
            case "/generate" if self.here:
                servers = list(self.here.values())
                chosen = servers[-1 if self.newest else next(self.turns) % len(servers)]
                with contextlib.suppress(ClientError):
                    async with (
                        ClientSession() as session,
                        session.post(chosen.url + "/generate", data=await request.read()) as answer,
                    ):
                        return web.Response(body=await answer.read(), status=answer.status)
                return web.json_response({"error": "request failed"}, status=500)
            case "/generate":
                return web.json_response({"error": "no_available_workers"}, status=503)
            case "/health":
                return web.Response(text="OK")
        return web.Response(status=404)


class Fleet:
    """A router, servers, and an engine that has loaded version 1."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.servers: list[Server] = []
        self.router = Router()
        self.engine: sglang.SGLangEngine = None  # pyright: ignore[reportAttributeAccessIssue]

    async def opened(self, count: int = 2) -> None:
        await self.router.start()
        for _ in range(count):
            await self.joins(Server())
        base = self.folder / "base"
        base.mkdir()
        (base / "config.json").write_text("{}")
        save_file({"a": torch.zeros(4)}, base / "model.safetensors")
        settings = SGLangConfig(way="url", urls=[self.router.url], update_timeout_s=WAIT_S)
        self.engine = sglang.SGLangEngine(
            str(base), ActorsConfig(max_batch=8, max_context=512, sglang=settings)
        )
        await self.engine.start()

    async def joins(self, server: Server) -> Server:
        await server.start()
        self.servers.append(server)
        self.router.add(server)
        return server

    async def load(self, number: int) -> None:
        await self.engine.load(version(self.folder, number))

    async def until(self, true: Callable[[], Any]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not true():
                await asyncio.sleep(0.01)

    async def with_all(self, count: int) -> None:
        """Wait until ``count`` servers take part."""
        await self.until(lambda: len(self.engine.way.servers) == count)

    async def sampled(self, *expected: int, n: int = 4) -> None:
        """All of some samples are of these weights, and bear their numbers as versions."""
        results: list[GenerateResult] = [
            await self.engine.generate(GenerateRequest(REQUEST.tokens, n, REQUEST.sampling))
            for _ in range(2)
        ]
        samples = [
            (int(s.tokens[0]), int(s.versions[0])) for result in results for s in result.samples
        ]
        assert set(samples) == {(number, number) for number in expected}

    async def closed(self) -> None:
        if self.engine is not None:
            await self.engine.close()
        for site in (*self.servers, self.router):
            await site.stop()


@pytest_asyncio.fixture
async def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(sglang, "LOOK_S", 0.05)
    made = Fleet(tmp_path)
    await made.opened()
    await made.load(1)
    yield made
    await made.closed()


async def test_no_sample_of_a_server_that_joins_is_taken_before_it_holds_the_version(
    fleet: Fleet,
) -> None:
    third = Server()
    reached, release = third.hold("/update_weights_from_disk")
    await fleet.joins(third)
    fleet.router.newest = True  # everything goes to the one that is not ready
    there = asyncio.create_task(fleet.sampled(1))
    await asyncio.wait_for(reached.wait(), WAIT_S)
    fleet.router.newest = False
    fleet.router.here = dict(reversed(fleet.router.here.items()))
    fleet.router.turns = itertools.cycle([1, 2])  # pyright: ignore[reportAttributeAccessIssue]
    await asyncio.wait_for(fleet.sampled(1), WAIT_S)  # the others go on meanwhile
    assert not there.done()
    fleet.router.here = dict(reversed(fleet.router.here.items()))
    fleet.router.newest = True
    release.set()
    await asyncio.wait_for(there, WAIT_S)
    await fleet.with_all(3)
    assert third.weights == 1 and third.named == fleet.servers[0].named
    assert fleet.servers[0].calls.count("/pause_generation") == 1  # for version 1 alone
    await fleet.until(lambda: fleet.engine.stats()["kv_capacity_tokens"] == 3000)
    await fleet.load(2)
    await fleet.sampled(2)
    assert [server.weights for server in fleet.servers] == [2, 2, 2]


async def test_a_sample_of_weights_with_an_equal_number_from_elsewhere_is_not_taken(
    fleet: Fleet,
) -> None:
    fleet.engine._following.cancel()  # pyright: ignore[reportOptionalMemberAccess]
    for name in ("1", "1@another", "7", "default"):
        fleet.servers[0].named, fleet.servers[0].weights = name, 99
        await fleet.sampled(1)
    assert fleet.engine.counts["asked_again"] >= 4


async def test_a_server_that_joins_during_an_update_gets_the_new_version(fleet: Fleet) -> None:
    reached, release = fleet.servers[1].hold("/update_weights_from_disk")
    update = asyncio.create_task(fleet.load(2))
    await reached.wait()
    third = await fleet.joins(Server())
    fleet.router.newest = True
    asking = asyncio.create_task(fleet.sampled(2))
    release.set()
    await update
    await asking
    await fleet.with_all(3)
    assert third.weights == 2


@pytest.mark.parametrize("chosen", ["disk", "tensor"])
async def test_what_a_joining_server_has_cached_goes_also_where_updates_keep_caches(
    fleet: Fleet, chosen: Any
) -> None:
    giver = WeightServer(timeout_s=5.0)
    third = Server()
    try:
        fleet.engine.weights.config = SGLangConfig(
            weights=chosen, pause="in_place", update_timeout_s=WAIT_S
        )
        for server in (*fleet.servers, third):

            async def taken(server: Server = server) -> None:
                server.weights = 2

            server.at["/update_weights_from_tensor"] = taken
            server.flushed.clear()
        await fleet.engine.load(
            version(fleet.folder, 2) if chosen == "disk" else in_memory(fleet, giver, 2)
        )
        await fleet.joins(third)
        await fleet.with_all(3)
        assert not any(fleet.servers[0].flushed) and third.flushed[-1]
    finally:
        giver.close()


async def test_a_server_that_leaves_takes_no_further_part(fleet: Fleet) -> None:
    first = fleet.servers[0]
    fleet.router.remove(first)
    await fleet.with_all(1)
    first.calls.clear()
    await fleet.load(2)
    await fleet.sampled(2)
    assert first.weights == 1 and not first.calls
    assert fleet.engine.stats()["kv_capacity_tokens"] == 1000
    fleet.router.add(first)
    await fleet.with_all(2)
    assert first.weights == 2
    await fleet.sampled(2)


@pytest.mark.parametrize("step", [*STEPS, "/continue_generation"])
@pytest.mark.parametrize("ends", ["fails", "dies"])
async def test_a_server_that_fails_or_dies_in_an_update_does_not_fail_it(
    fleet: Fleet, step: str, ends: str
) -> None:
    first, second = fleet.servers
    getattr(first, ends).add(step)
    await fleet.load(2)
    assert second.weights == 2 and second.going.is_set()
    if ends == "dies":
        await first.gone
        await fleet.sampled(2)
        first.anew()
        await first.start()
    fleet.router.newest = False
    await fleet.sampled(2)
    await fleet.with_all(2)
    assert first.weights == 2 and first.named == second.named and first.going.is_set()
    assert not fleet.router.removed
    await fleet.load(3)
    await fleet.sampled(3)


async def test_an_engine_that_ends_closes_the_connection_to_a_server_that_it_has_let_go(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(sglang, "LOOK_S", 1e6)
    fleet.engine._look_now.set()
    # the update waits for this look, which is the last
    await fleet.until(lambda: not fleet.engine._look_now.is_set())
    fleet.servers[0].fails.add("/pause_generation")
    await fleet.load(2)
    assert len(fleet.engine.way.servers) == 1
    await fleet.engine.close()
    fleet.engine = None  # pyright: ignore[reportAttributeAccessIssue]
    gc.collect()
    assert not [told for told in recwarn.list if issubclass(told.category, ResourceWarning)]


async def test_a_server_that_starts_anew_between_updates_is_brought_back(fleet: Fleet) -> None:
    fleet.servers[0].anew()
    await fleet.sampled(1)
    await fleet.until(lambda: fleet.servers[0].weights == 1)


async def test_a_server_of_another_model_is_taken_out_of_the_router(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    other = await fleet.joins(Server(99, tensors="b"))
    fleet.router.newest = True
    await fleet.sampled(1)
    assert fleet.router.removed == [other.url]
    assert "/pause_generation" not in other.calls and other.weights == 99
    assert "serves another model" in caplog.text and "was taken out of the router" in caplog.text


async def test_before_the_first_update_a_server_must_hold_the_models_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "LOOK_S", 0.05)
    fleet = Fleet(tmp_path)
    try:
        await fleet.opened()
        good = await fleet.joins(Server())
        await fleet.with_all(3)
        assert good.named == fleet.servers[0].named
        other = await fleet.joins(Server(99))
        fleet.router.newest = True
        await fleet.sampled(0)
        assert fleet.router.removed == [other.url]
    finally:
        await fleet.closed()


async def test_a_run_waits_for_the_first_server_behind_its_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path)
    starting = asyncio.create_task(fleet.opened(0))
    await fleet.until(lambda: fleet.engine is not None)
    await fleet.joins(Server())
    await asyncio.wait_for(starting, WAIT_S)
    await fleet.sampled(0)
    await fleet.closed()


async def test_requests_outlast_a_router_that_starts_anew(fleet: Fleet) -> None:
    await fleet.router.stop()
    asking = asyncio.create_task(fleet.sampled(1))
    await fleet.until(lambda: fleet.engine.counts["asked_again"] >= 4)
    await fleet.router.start()
    await asking


async def test_what_a_dying_server_computed_is_asked_again_elsewhere(fleet: Fleet) -> None:
    first = fleet.servers[0]
    first.going.clear()
    asking = asyncio.create_task(fleet.sampled(1))
    await fleet.until(lambda: "/generate" in first.calls)
    await first.stop()
    await asking
    await fleet.with_all(1)


async def test_an_adapter_reaches_a_server_that_joins(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_weights, "_verify", lambda *_: None)
    await fleet.engine.load(adapter(fleet.folder, 2))
    third = await fleet.joins(Server())
    fleet.router.newest = True
    result = await fleet.engine.generate(REQUEST)
    assert result.samples[0].versions.tolist() == [2]
    await fleet.with_all(3)
    assert third.adapters == fleet.servers[0].adapters and third.weights == 1
    third.fails.add("/load_lora_adapter")
    await fleet.engine.load(adapter(fleet.folder, 3))
    assert (await fleet.engine.generate(REQUEST)).samples[0].versions.tolist() == [3]
    await fleet.with_all(3)
    assert fleet.servers[0].adapters == third.adapters
    assert not fleet.router.removed


async def test_a_version_that_can_no_longer_be_had_leaves_a_joining_server_out_until_the_next(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    giver = WeightServer(timeout_s=5.0)
    fleet.engine.weights.config = SGLangConfig(weights="tensor", update_timeout_s=5.0)
    request = in_memory(fleet, giver, 2)
    for server in fleet.servers:

        async def taken(server: Server = server) -> None:
            server.weights = 2

        server.at["/end_weight_update"] = taken
    await fleet.engine.load(request)
    giver.close()
    third = await fleet.joins(Server())
    await fleet.until(lambda: "stays out until the next version" in caplog.text)
    assert not fleet.router.removed and third.weights == 0 and third.going.is_set()
    fleet.engine.weights.config = SGLangConfig(update_timeout_s=5.0)
    for server in fleet.servers:
        server.at.clear()
    await fleet.load(3)
    await fleet.sampled(3)
    await fleet.with_all(3)
    assert third.weights == 3


def in_memory(fleet: Fleet, giver: WeightServer, number: int) -> LoadRequest:
    """A version that only the giver holds, in three buckets."""
    tensors = {name: torch.full((4,), float(number)) for name in ("a", "b", "c")}
    folder = fleet.folder / f"m{number}"
    folder.mkdir()
    memory = giver.offer(Snapshot(number, tensors, bucket_bytes=16))
    Manifest(number, "full", "d" * 64, False, memory).write(folder)
    return LoadRequest(number, str(folder), "d" * 64)


@pytest.mark.parametrize("chosen", ["disk", "tensor", "distributed"])
async def test_weights_reach_all_servers_side_by_side_and_bucket_by_bucket(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, chosen: Any
) -> None:
    """Each server waits in every bucket for the other, and each ask for the other ask, so that
    nothing could be done one after the other."""
    path = f"/update_weights_from_{chosen}"
    together = asyncio.Barrier(2)
    asks = threading.Barrier(2, timeout=WAIT_S)
    ask = sglang_transport.Rendezvous.ask

    def asked(talk: sglang_transport.Rendezvous, request: dict[str, Any]) -> dict[str, Any]:
        asks.wait()
        return ask(talk, request)

    async def moved(server: Server) -> None:
        await asyncio.wait_for(together.wait(), WAIT_S)
        server.weights = 2

    monkeypatch.setattr(sglang_transport.Rendezvous, "ask", asked)
    for server in fleet.servers:
        server.at[path] = lambda server=server: moved(server)
        server.calls.clear()
    giver = WeightServer(timeout_s=1.0)
    try:
        fleet.engine.weights.config = SGLangConfig(weights=chosen, update_timeout_s=WAIT_S)
        request = version(fleet.folder, 2) if chosen == "disk" else in_memory(fleet, giver, 2)
        await fleet.engine.load(request)
    finally:
        giver.close()
    for server in fleet.servers:
        assert server.calls.count(path) == (1 if chosen == "disk" else 3)
    await fleet.sampled(2)


async def test_behind_a_router_cut_distributions_are_refused(fleet: Fleet) -> None:
    with pytest.raises(DataFault, match="top_p = 1"):
        await fleet.engine.generate(
            GenerateRequest(np.array([1, 2], np.int32), 1, Sampling(4, top_p=0.5))
        )
