"""A gateway and a client of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest_asyncio

from coppice.actors.environments.agents.gateway import Gateway
from coppice.actors.serving.conversations import Conversation
from coppice.actors.serving.replies import Reply

HELLO = {"model": "gpt-any", "messages": [{"role": "user", "content": "hello"}]}


class Door:
    """A gateway with a session, and a client of it."""

    def __init__(self, gateway: Gateway, http: aiohttp.ClientSession):
        self.gateway, self.http, self.session = gateway, http, gateway.opened()

    @property
    def own(self) -> dict[str, str]:
        """The header with the session's key."""
        return {"Authorization": f"Bearer {self.session.key}"}

    async def post(self, path: str, body: Any, prefix: str = "", **headers: str) -> tuple[int, str]:
        """Post with the session's key, unless ``prefix`` or ``headers`` say another one. Returns
        the status and the text."""
        headers = headers if prefix or headers else self.own
        url = f"http://{self.gateway.host}:{self.gateway.port}{prefix}/v1/{path}"
        async with self.http.post(url, json=body, headers=headers) as response:
            return response.status, await response.text()

    async def refused(self, path: str, body: Any, **headers: str) -> tuple[int, str]:
        """The status and the message of a refusal."""
        status, text = await self.post(path, body, **headers)
        return status, json.loads(text)["error"]["message"]

    async def request(self) -> Conversation:
        """The oldest request that waits."""
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
        """What the client of a chat gets."""
        return json.loads((await self.turn(reply, "chat/completions", body, prefix, **headers))[1])


@pytest_asyncio.fixture
async def door() -> AsyncIterator[Door]:
    gateway = Gateway()
    await gateway.start()
    async with aiohttp.ClientSession() as http:
        yield Door(gateway, http)
    await gateway.close()
