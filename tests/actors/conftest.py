"""Embedded engines, and a gateway with a client of it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.local import LocalEngine
from coppice.actors.environments.agents.gateway import Gateway
from coppice.actors.environments.others.other_python import OtherPython
from coppice.actors.serving.conversations import Conversation
from coppice.actors.serving.replies import Reply

Local = Callable[..., Awaitable[LocalEngine]]
HELLO = {"model": "gpt-any", "messages": [{"role": "user", "content": "hello"}]}


class Door:
    def __init__(self, gateway: Gateway, http: aiohttp.ClientSession):
        self.gateway, self.http, self.session = gateway, http, gateway.opened()

    @property
    def own(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.session.key}"}

    async def post(self, path: str, body: Any, prefix: str = "", **headers: str) -> tuple[int, str]:
        """Post with the session's key, unless ``prefix`` or ``headers`` say another one. Returns
        the status and the text."""
        headers = headers if prefix or headers else self.own
        url = f"http://127.0.0.1:{self.gateway.port}{prefix}/v1/{path}"
        async with self.http.post(url, json=body, headers=headers) as response:
            return response.status, await response.text()

    async def refused(self, path: str, body: Any, **headers: str) -> tuple[int, str]:
        status, text = await self.post(path, body, **headers)
        return status, json.loads(text)["error"]["message"]

    async def request(self) -> Conversation:
        while not self.session.waiting:
            await self.session.news.wait()
        return next(iter(self.session.waiting.values()))

    async def turn(
        self, reply: Reply, path: str, body: Any, prefix: str = "", **headers: str
    ) -> tuple[Conversation, str]:
        """Ask, answer with ``reply``; return the request and what the client gets."""
        asking = asyncio.create_task(self.post(path, body, prefix, **headers))
        request = await self.request()
        self.session.answer(request, reply)
        status, text = await asking
        assert status == 200
        return request, text

    async def chat(self, reply: Reply, body: Any = HELLO, prefix: str = "", **headers: str) -> Any:
        return json.loads((await self.turn(reply, "chat/completions", body, prefix, **headers))[1])


@pytest_asyncio.fixture
async def local(llama: Path) -> AsyncIterator[Local]:
    """Starts embedded engines, of the tiny Llama if no other folder is given."""
    made: list[LocalEngine] = []

    async def start(folder: Path = llama, **settings: Any) -> LocalEngine:
        settings = {"dtype": "float32", "max_context": 256, **settings}
        made.append(LocalEngine(str(folder), ActorsConfig(**settings)))
        await made[-1].start()
        return made[-1]

    yield start
    for engine in made:
        await engine.close()


@pytest_asyncio.fixture
async def other(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Any]]:
    """Makes games of another Python, ``tests.drawn_game:Drawn`` if no other is named, and ends
    their processes."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    made: list[OtherPython] = []

    def make(game: str = "tests.drawn_game:Drawn", **options: Any) -> Any:
        made.append(OtherPython(game, **options))
        return made[-1]

    yield make
    for environment in made:
        await environment.close()


async def begun(environment: Any, seed: int = 7, tools: Any = None) -> Any:
    return await environment.open(environment.initial(environment.task(seed)), tools)


async def played(environment: Any, state: Any, *actions: str, tools: Any = None) -> Any:
    """The last transition of actions, or of whole replies, which begin with "<"."""
    transition: Any = None
    for action in actions:
        reply = action if action.startswith("<") else f"<action>{action}</action>"
        transition = await environment.step(state, environment.read(state, reply), tools)
        state = transition.state
    return transition


def openenv(name: str = "Counting", field: str = "number", action: str = "Add") -> dict[str, Any]:
    pytest.importorskip("pydantic")
    shape = "tests.openenv_shape"
    return {"environment": f"{shape}:{name}", "action": f"{shape}:{action}", "field": field}


@pytest_asyncio.fixture
async def door() -> AsyncIterator[Door]:
    gateway = Gateway()
    await gateway.start()
    async with aiohttp.ClientSession() as http:
        yield Door(gateway, http)
    await gateway.close()
