"""Scripted SGLang servers and a router over real HTTP: real ones cannot be made to fail at a chosen
step. The router answers as sglang-router 0.3.2 does."""

import asyncio
import base64
import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import ClientError, ClientSession, web
from safetensors.torch import load_file, save_file

from coppice.actors.config import ActorsConfig, SGLangConfig
from coppice.actors.engines.base import Engine
from coppice.actors.engines.sglang import SGLangEngine
from coppice.common.deltas import Delta
from coppice.learner.model.weight_server import WeightServer
from coppice.wire import digest
from coppice.wire.messages import GenerateRequest, LoadRequest, Sampling
from coppice.wire.published import FILES, Manifest, following

REQUEST = GenerateRequest(np.array([1, 2, 3], np.int32), 1, Sampling(4))
STEPS = [
    "/pause_generation", "/update_weight_version", "/update_weights_from_disk", "/weights_checker",
    "/continue_generation",
]  # fmt: skip
WAIT_S = 60.0
TENSORS = ("a.weight", "b.weight", "c.weight")


def published(
    folder: Path, number: int, kind: Any, tensors: dict[str, torch.Tensor]
) -> LoadRequest:
    place = folder / f"{kind}{number}"
    place.mkdir(exist_ok=True)
    save_file(tensors, place / FILES[kind])
    proof = digest.safetensors_file(place / FILES[kind])
    Manifest(number, kind, proof).write(place)
    return LoadRequest(number, str(place), proof)


def whole(number: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((4, 4), float(number)) for name in TENSORS}


def version(folder: Path, number: int) -> LoadRequest:
    """Whole weights, all of them ``number``."""
    return published(folder, number, "full", whole(number))


def changes(folder: Path, count: int) -> list[LoadRequest]:
    """Versions from 1, all weights of each its number: the first whole, the others changes."""
    requests = list[LoadRequest]()
    for number in range(1, count + 1):
        place = folder / f"v{number:06d}"
        place.mkdir()
        new, previous, delta = {n: t.bfloat16() for n, t in whole(number).items()}, None, Delta()
        if requests:
            for name, one in new.items():
                delta.add(name, (one - 1).flatten(), one.flatten(), 0)
            delta.write(place / "delta-00000.safetensors")
            previous = requests[-1].version, requests[-1].digest
            proof = following(previous[1], place)
        else:
            save_file(new, place / FILES["full"])
            proof = digest.safetensors_file(place / FILES["full"])
        Manifest(number, "full", proof, previous=previous).write(place)
        requests.append(LoadRequest(number, str(place), proof))
    return requests


def adapter(folder: Path, number: int) -> LoadRequest:
    name = "base_model.model.a.lora_{}.weight"
    pair = {name.format("A"): torch.ones(1, 4), name.format("B"): torch.full((4, 1), float(number))}
    request = published(folder, number, "lora", pair)
    settings = Path(request.path) / "adapter_config.json"
    settings.write_text(json.dumps({"r": 1, "lora_alpha": 1}))
    return request


@contextlib.contextmanager
def giving() -> Iterator[WeightServer]:
    """A learner's server of weights. Its broadcasts wait in vain for a scripted server, and must
    end before the interpreter does."""
    before, made = set(threading.enumerate()), WeightServer(timeout_s=1.0)
    try:
        yield made
    finally:
        made.close()
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith("weights"):
                thread.join(WAIT_S)


def in_memory(folder: Path, giver: WeightServer, number: int) -> LoadRequest:
    """Whole weights that only the giver holds, in three buckets."""
    place = folder / f"m{number}"
    place.mkdir()
    tensors = whole(number)
    memory = giver.offer(number, [{name: tensors[name]} for name in tensors])
    Manifest(number, "full", "d" * 64, False, memory).write(place)
    return LoadRequest(number, str(place), "d" * 64)


def model(folder: Path) -> str:
    base = folder / "base"
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text("{}")
    save_file(whole(0), base / FILES["full"])
    return str(base)


def engine(folder: Path, url: str, **settings: Any) -> SGLangEngine:
    """An engine, not started, on a server or router at this URL."""
    sglang = SGLangConfig(**{"way": "url", "urls": [url], "update_timeout_s": WAIT_S} | settings)
    return SGLangEngine(model(folder), ActorsConfig(max_batch=8, max_context=512, sglang=sglang))


async def sampled(engine: Engine) -> list[int]:
    """The versions of the one sample that the engine gives."""
    (sample,) = (await asyncio.wait_for(engine.generate(REQUEST), 30)).samples
    return sample.versions.tolist()


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
    """A server. Its samples are the number of the weights that it holds: 0 is the base model."""

    def __init__(self, number: int = 0, tensors: str = "a") -> None:
        super().__init__()
        self.number, self.tensors = number, tensors
        self.calls: list[str] = []
        self.bodies: dict[str, dict[str, Any]] = {}
        self.anew()
        self.finish = "length"
        self.fails: dict[str, int] = {}
        self.dies: set[str] = set()
        self.at: dict[str, Callable[[], Any]] = {}

    def anew(self) -> None:
        self.weights, self.named, self.adapters = self.number, "default", set[str]()
        self.going = asyncio.Event()
        self.going.set()
        self.holds, self.fatal = True, list[str]()

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
        self.bodies[path] = body
        if path in self.dies:
            self.dies.clear()
            assert request.transport is not None
            request.transport.abort()
            self.gone = asyncio.create_task(self.stop())
            await asyncio.Event().wait()  # until the end of the connection cancels this
        if path in ("/pause_generation", "/pause"):
            self.going.clear()
        if path in self.at:
            await self.at[path]()
        if status := self.fails.pop(path, 0):
            return web.json_response({"success": False, "message": "injected"}, status=status)
        return await self.reply(path, body)

    async def reply(self, path: str, body: dict[str, Any]) -> web.StreamResponse:
        needed = path.startswith(("/release", "/weights_checker", "/update_weights_from"))
        if not self.holds and (needed or path == "/continue_generation"):
            self.fatal.append(path)
        match path:
            case "/release_memory_occupation" | "/resume_memory_occupation":
                self.occupy(path.startswith("/resume"))
            case "/continue_generation":
                self.going.set()
            case "/update_weights_from_disk":
                self.take(body["model_path"])
            case "/update_weight_version":
                self.named = body["new_version"]
            case "/load_lora_adapter":
                self.adapters.add(body["lora_name"])
            case "/generate":
                return await self.sample(body)
            case "/weights_checker":
                ranks = [{"checksums": {self.tensors: f"{self.weights}"}}]
                checksum = f"of {self.weights} {self.tensors}"
                return web.json_response({"per_engine_checksum": checksum, "ranks": ranks})
            case "/workers":
                return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(
            {"max_total_num_tokens": 1000, "device": "cuda", "weight_version": self.named}
        )

    def occupy(self, holds: bool) -> None:
        """Release or take memory. A real server dies of an assertion where this one is wrong."""
        if holds == self.holds or (not holds and self.going.is_set()):
            self.fatal.append(f"memory {self.holds} -> {holds}")
        self.holds = holds

    def take(self, folder: str) -> None:
        tensors = load_file(Path(folder) / FILES["full"])
        self.weights = int(tensors["a.weight"][0, 0])

    async def sample(self, body: dict[str, Any]) -> web.Response:
        await self.going.wait()
        if body.get("lora_path") and body["lora_path"] not in self.adapters:
            error = {"error": {"message": "adapter has never been loaded"}}
            return web.json_response(error, status=400)
        meta: dict[str, Any] = {"weight_version": self.named, "prompt_tokens": 3}
        meta |= {"finish_reason": {"type": self.finish}, "output_token_logprobs": [[-1.0, 1, None]]}
        if body.get("return_routed_experts"):
            rows = meta["prompt_tokens"] - body["routed_experts_start_len"]
            experts = np.arange(rows * 4, dtype=np.int32).tobytes()
            meta["routed_experts"] = base64.b64encode(experts).decode()
        return web.json_response({"output_ids": [self.weights], "meta_info": meta})


class Router(Site):
    """A router. It sends to its servers in turn, to the newest alone after ``newest``, and tries no
    other when one fails."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = itertools.count()
        self.here: dict[str, Server] = {}
        self.newest = False
        self.removed: list[str] = []

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
                workers = [{"id": key, "url": one.url} for key, one in self.here.items()]
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
