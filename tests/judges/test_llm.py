"""The chat client: every question ends in a reply or a counted fault that names the cause."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from coppice.judges.llm import ChatClient, ChatEndpoint
from coppice.judges.slate import Slate, reply_form
from coppice.wire.faults import InfrastructureFault

Reply = Callable[[web.Request], Awaitable[web.Response]]


def chat(content: str) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """The URL of a real server."""
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def chat_server(reply: Reply, path: str = "POST /chat/completions") -> AsyncIterator[str]:
    """The URL of a real server that answers with ``reply``."""
    app, (method, below) = web.Application(), path.split()
    app.router.add_route(method, f"/v1{below}", reply)
    async with serving(app) as url:
        yield f"{url}/v1"


@asynccontextmanager
async def started(make: Callable[[str], Any], reply: Reply) -> AsyncIterator[Any]:
    """A started judge or client, which ``make`` made of the URL of such a server."""
    async with chat_server(reply) as url:
        made = make(url)
        await made.start()
        yield made
        await made.close()


def client(url: str, **settings: Any) -> ChatClient:
    return ChatClient(ChatEndpoint(url, "m", **settings))


HELLO = [{"role": "user", "content": "q"}]


@pytest.mark.parametrize("constrain", ["", "sglang", "vllm"])
async def test_a_form_is_in_the_words_of_the_server(constrain: Any) -> None:
    seen: dict[str, Any] = {}

    async def reply(request: web.Request) -> web.Response:
        seen.update(await request.json())
        return chat("a")

    fields = {"top_k": 3, "temperature": 0.5}
    settings: dict[str, Any] = {"constrain": constrain, "fields": fields}
    async with started(lambda url: Slate(ChatEndpoint(url, "m", **settings)), reply) as judge:
        assert await judge.reply("q") == ("a", "")
    regex = {"regex": reply_form(512)}
    words = {"": {}, "sglang": regex, "vllm": {"structured_outputs": regex}}
    usual = {"model": "m", "messages": HELLO, "max_tokens": 512}
    assert seen == usual | words[constrain] | fields


BODIES = [b"[]", b'{"choices": []}', b'{"choices": [{}]}', b"not json", b"7", b"", b"\xff"]


@pytest.mark.parametrize("body", [*BODIES, b'{"choices": [{"message": {"content": null}}]}'])
async def test_a_reply_that_is_not_the_protocol_is_final(body: bytes) -> None:
    async def reply(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    async with started(client, reply) as c:
        with pytest.raises(InfrastructureFault, match=r"not the chat protocol|no JSON"):
            await c.chat(HELLO, {})
        assert c.counts == {"requests": 1, "failures": 1}


async def test_a_cancelled_question_gives_its_place_back() -> None:
    entered, gate, calls = asyncio.Event(), asyncio.Event(), 0

    async def reply(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        if calls == 1:
            entered.set()
            await gate.wait()
        return chat("ok")

    async with started(partial(client, concurrency=1), reply) as c:
        first = asyncio.create_task(c.chat(HELLO, {}))
        await entered.wait()
        first.cancel()
        assert await asyncio.wait_for(c.chat(HELLO, {}), 5) == "ok"
        gate.set()  # a server waits a minute for open handlers when it is taken down
