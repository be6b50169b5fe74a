"""The chat client: every question ends in a reply or a fault that names the endpoint and the cause,
and both are counted."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from coppice.judges.llm import ChatClient, ChatEndpoint
from coppice.wire.faults import InfrastructureFault

Reply = Callable[[web.Request], Awaitable[web.Response]]


def chat(content: str) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})


@asynccontextmanager
async def client(reply: Reply, **settings: Any) -> AsyncIterator[ChatClient]:
    """A started client of a real server that answers with ``reply``."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made = ChatClient(
        ChatEndpoint(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "m", **settings)
    )
    await made.start()
    try:
        yield made
    finally:
        await made.close()
        await runner.cleanup()


async def test_the_request_is_one_user_message_with_the_settings_of_the_endpoint() -> None:
    seen: dict[str, Any] = {}

    async def reply(request: web.Request) -> web.Response:
        seen.update(await request.json())
        return chat("fine")

    async with client(reply, max_tokens=7) as c:
        assert await c.ask("How many?") == "fine"
    assert seen == {
        "model": "m",
        "messages": [{"role": "user", "content": "How many?"}],
        "temperature": 0.0,
        "max_tokens": 7,
    }


@pytest.mark.parametrize(
    ("constrain", "field"),
    [("", {}), ("sglang", {"regex": "a|b"}), ("vllm", {"structured_outputs": {"regex": "a|b"}})],
)
async def test_a_form_is_asked_for_in_the_words_of_the_server(
    constrain: str, field: dict[str, Any]
) -> None:
    seen: dict[str, Any] = {}

    async def reply(request: web.Request) -> web.Response:
        seen.update(await request.json())
        return chat("a")

    async with client(reply, constrain=constrain, fields={"top_k": 3, "temperature": 0.5}) as c:
        await c.ask("q", "a|b")
        assert {name: seen[name] for name in set(seen) - {"model", "messages", "max_tokens"}} == (
            field | {"top_k": 3, "temperature": 0.5}
        )
        seen.clear()
        await c.ask("q")
        assert not {"regex", "structured_outputs"} & set(seen)


async def test_a_limit_is_waited_for_as_long_as_the_server_asks() -> None:
    calls: list[float] = []

    async def reply(request: web.Request) -> web.Response:
        calls.append(asyncio.get_running_loop().time())
        return (
            web.Response(status=429, headers={"Retry-After": "0.2"})
            if len(calls) == 1
            else chat("second")
        )

    async with client(reply, backoff_s=1e-3) as c:
        assert await c.ask("q") == "second"
    assert calls[1] - calls[0] >= 0.2


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_or_broken_server_is_asked_again(status: int) -> None:
    calls = 0

    async def reply(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        return web.Response(status=status) if calls == 1 else chat("second")

    async with client(reply, attempts=2, backoff_s=1e-3) as c:
        assert await c.ask("q") == "second"
        assert c.counts == {"requests": 2, "retries": 1}


async def test_after_the_last_attempt_the_fault_names_the_endpoint_and_the_cause() -> None:
    async def reply(request: web.Request) -> web.Response:
        return web.Response(status=500, text="out of memory")

    async with client(reply, attempts=2, backoff_s=1e-3) as c:
        with pytest.raises(InfrastructureFault, match=r"127\.0\.0\.1.*HTTP 500: out of memory"):
            await c.ask("q")
        assert c.counts == {"requests": 2, "retries": 1, "failures": 1}


@pytest.mark.parametrize("body", [b"[]", b'{"choices": []}', b'{"choices": [{}]}', b"not json", b"7", b"",
                                  b"\xff", b'{"choices": [{"message": {"content": null}}]}'])  # fmt: skip
async def test_a_reply_that_is_not_the_protocol_is_final(body: bytes) -> None:
    async def reply(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    async with client(reply) as c:
        with pytest.raises(InfrastructureFault, match=r"not the chat protocol|no JSON"):
            await c.ask("q")
        assert c.counts == {"requests": 1, "failures": 1}


async def test_a_server_that_is_not_there_is_a_fault() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    c = ChatClient(ChatEndpoint(f"http://127.0.0.1:{port}/v1", "m", attempts=1))
    await c.start()
    with pytest.raises(InfrastructureFault, match=f"127.0.0.1:{port}"):
        await c.ask("q")
    await c.close()


async def test_no_more_requests_are_open_than_the_endpoint_allows() -> None:
    open_now, most = 0, 0
    full = asyncio.Event()

    async def reply(request: web.Request) -> web.Response:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        if open_now == 3:
            full.set()
        await full.wait()
        open_now -= 1
        return chat("ok")

    async with client(reply, concurrency=3) as c:
        assert await asyncio.gather(*(c.ask(str(i)) for i in range(9))) == ["ok"] * 9
    assert most == 3


async def test_a_cancelled_question_gives_its_place_back() -> None:
    entered, gate, calls = asyncio.Event(), asyncio.Event(), 0

    async def reply(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        if calls == 1:
            entered.set()
            await gate.wait()
        return chat("ok")

    async with client(reply, concurrency=1) as c:
        first = asyncio.create_task(c.ask("never answered"))
        await entered.wait()
        first.cancel()
        assert await asyncio.wait_for(c.ask("q"), 5) == "ok"
        gate.set()  # a server waits a minute for open handlers when it is taken down


async def test_the_key_travels_as_a_bearer_token_from_the_named_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def reply(request: web.Request) -> web.Response:
        return chat(request.headers.get("Authorization", "none"))

    monkeypatch.setenv("TEST_JUDGE_KEY", "s3cret")
    async with client(reply, api_key_env="TEST_JUDGE_KEY") as c:
        assert await c.ask("q") == "Bearer s3cret"
    async with client(reply) as c:
        assert await c.ask("q") == "none"


async def test_a_missing_key_is_refused_at_the_start_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TEST_JUDGE_KEY", raising=False)
    with pytest.raises(ValueError, match="TEST_JUDGE_KEY"):
        await ChatClient(
            ChatEndpoint("http://127.0.0.1:1/v1", "m", api_key_env="TEST_JUDGE_KEY")
        ).start()
