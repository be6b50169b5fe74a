"""The HTTP client: every call ends in the decoded answer or in a classified fault that names the
URL and the cause."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from coppice.common.http import LONGEST_WAIT_S, JsonClient, pause_s, retry_after
from coppice.wire.faults import DataFault, Fault, InfrastructureFault
from tests.judges.test_llm import serving

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def client(reply: Reply, **settings: Any) -> AsyncIterator[JsonClient]:
    """A started client of a real server that answers every path with ``reply``."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", reply)
    async with serving(app) as url:
        made = JsonClient(url, backoff_s=settings.pop("backoff_s", 1e-3), **settings)
        await made.start()
        yield made
        await made.close()


def answers(*statuses: int, **more: Any) -> Reply:
    """One status a call, the last for ever."""
    left = list(statuses)

    async def reply(request: web.Request) -> web.Response:
        status = left.pop(0) if len(left) > 1 else left[0]
        options = {"body": str(status).encode(), **more}
        return web.Response(status=status, **options)

    return reply


async def test_a_post_carries_its_body_and_a_get_none() -> None:
    seen: list[Any] = []

    async def reply(request: web.Request) -> web.Response:
        seen.append((request.method, request.path, await request.read(), request.content_type))
        return web.json_response({"answer": "é"})

    async with client(reply) as c:
        assert await c.post("/v1/do", {"a": [1, "ü"]}) == {"answer": "é"}
        assert await c.get("/v1/look") == {"answer": "é"}
    assert seen == [
        ("POST", "/v1/do", '{"a":[1,"ü"]}'.encode(), "application/json"),
        ("GET", "/v1/look", b"", "application/json"),
    ]


async def test_half_a_surrogate_pair_is_replaced_and_a_pair_is_kept() -> None:
    async with client(answers(200, body=b'{"a": "cut \\ud83d", "b": "\\ud83d\\ude00"}')) as c:
        assert await c.get("/x") == {"a": "cut ?", "b": "\U0001f600"}


@pytest.mark.parametrize("body", [b"", b"ok.", b'{"a": "\xff"}', b"[" * 100_000])
async def test_an_answer_that_cannot_be_decoded_is_a_fault(body: bytes) -> None:
    async with client(answers(200, body=body)) as c:
        with pytest.raises(InfrastructureFault, match="/x answered no JSON"):
            await c.get("/x")
        assert c.counts == {"requests": 1, "failures": 1}


@pytest.mark.parametrize("status", [408, 429, 503])
async def test_what_may_work_later_is_tried_again(status: int) -> None:
    async with client(answers(status, 200)) as c:
        assert await c.post("/x", {}) == 200
        assert c.counts == {"requests": 2, "retries": 1}
    async with client(answers(status), attempts=3) as c:
        for attempts in (3, 1):
            with pytest.raises(InfrastructureFault, match=rf"HTTP {status}.*{attempts} attempts"):
                await c.post("/x", {}, attempts=attempts)
        assert c.counts == {"requests": 4, "retries": 2, "failures": 2}


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_refused_request_is_a_data_fault_at_once(status: int) -> None:
    async with client(answers(status)) as c:
        with pytest.raises(DataFault, match=f"127.0.0.1:.*/x refused.*HTTP {status}"):
            await c.post("/x", {})
        assert c.counts == {"requests": 1, "failures": 1}


REFUSALS: list[tuple[int, dict[str, Any], str]] = [
    (401, {}, "wants an API key"),
    (401, {"api_key_env": "TEST_HTTP_KEY"}, "key in TEST_HTTP_KEY right"),
    (404, {}, "does the server's URL end"),
    (404, {"remedies": {404: "look elsewhere"}}, "look elsewhere"),
    (308, {}, "it moved to /elsewhere"),
]


@pytest.mark.parametrize(("status", "settings", "remedy"), REFUSALS)
async def test_another_refusal_is_final_and_says_what_to_change(
    monkeypatch: pytest.MonkeyPatch, status: int, settings: dict[str, Any], remedy: str
) -> None:
    monkeypatch.setenv("TEST_HTTP_KEY", "s3cret")
    async with client(answers(status, headers={"Location": "/elsewhere"}), **settings) as c:
        with pytest.raises(InfrastructureFault, match=remedy):
            await c.post("/x", {})
        assert c.counts["requests"] == 1


async def test_a_call_may_have_a_patience_of_its_own() -> None:
    async def reply(request: web.Request) -> web.Response:
        await asyncio.sleep(0.2)
        return web.json_response(1)

    async with client(reply, timeout_s=0.05, attempts=1) as c:
        with pytest.raises(InfrastructureFault, match=r"no reply within 0\.05 s"):
            await c.get("/slow")
        assert await c.get("/slow", timeout_s=60) == 1


async def test_a_connection_that_breaks_is_made_anew() -> None:
    whole = [True, False]

    async def reply(request: web.Request) -> web.Response:
        if whole.pop():
            return web.json_response("whole")
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with client(reply) as c:
        assert await c.post("/x", {}) == "whole"


async def test_a_server_that_is_not_there_and_an_address_that_is_none_are_faults() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = f"127.0.0.1:{probe.getsockname()[1]}"
    for url, said in ((f"http://{free}", f"{free}/x: Client"), ("http://", "is no URL")):
        c = JsonClient(url, attempts=1)
        await c.start()
        with pytest.raises(InfrastructureFault, match=said):
            await c.get("/x")
        await c.close()


async def test_the_key_is_a_bearer_token_and_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_HTTP_KEY", " s3cret\n")
    seen: list[str] = []

    async def reply(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        told, status = f"no {seen[-1]}", int(request.path[1:])
        return web.Response(status=status, text=told, headers={"Location": f"/?{seen[-1]}"})

    async with client(reply, api_key_env="TEST_HTTP_KEY", attempts=1) as c:
        for status in (503, 400, 307, 403):
            with pytest.raises(Fault, match=r"Bearer \(the key\)") as caught:
                await c.get(f"/{status}")
            assert "s3cret" not in str(caught.value)
    assert seen == ["Bearer s3cret"] * 4


async def test_no_more_requests_are_open_than_allowed_and_a_pause_takes_no_place() -> None:
    open_now, most, limited = 0, 0, asyncio.Event()

    async def reply(request: web.Request) -> web.Response:
        nonlocal open_now, most
        if request.path == "/limited" and not limited.is_set():
            limited.set()
            return web.Response(status=429, headers={"Retry-After": "0.3"})
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0)
        open_now -= 1
        return web.json_response(request.path)

    async with client(reply, concurrency=1) as c:
        waiting = asyncio.create_task(c.get("/limited"))
        await limited.wait()
        paths = [f"/{i}" for i in range(5)]
        assert await asyncio.gather(*map(c.get, paths)) == paths
        assert not waiting.done()
        assert await waiting == "/limited"
    assert most == 1


def test_a_client_that_is_started_again_serves_another_event_loop() -> None:
    async def three(calls: JsonClient) -> list[Any]:
        app = web.Application()
        app.router.add_get("/x", answers(200, body=b"1"))
        async with serving(app) as url:
            calls.url = url
            await calls.start()
            try:
                return await asyncio.gather(*(calls.get("/x") for _ in range(3)))
            finally:
                await calls.close()

    calls = JsonClient("http://h", concurrency=1)
    assert [asyncio.run(three(calls)) for _ in range(2)] == [[1, 1, 1]] * 2


async def test_no_key_and_a_key_in_the_url_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_HTTP_KEY", raising=False)
    with pytest.raises(ValueError, match=r"TEST_HTTP_KEY is empty.*http://h"):
        await JsonClient("http://h", api_key_env="TEST_HTTP_KEY").start()
    none: dict[str, Any]
    for none in ({"attempts": 0}, {"concurrency": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            JsonClient("http://h", **none)
    with pytest.raises(ValueError, match=r"http://h:1/v1.*without a user") as caught:
        JsonClient("http://me:s3cret@h:1/v1")
    assert "s3cret" not in str(caught.value)


def test_retry_after_is_a_number_of_seconds() -> None:
    headers = ("7", "0.3", "", "soon", "-3", "nan", "Thu, 01 Jan 1970 00:01:00 GMT")
    assert [*map(retry_after, headers)] == [7.0, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0]


@given(st.integers(1, 40), st.floats(0, 1e6), st.floats(0, 1, exclude_max=True))
def test_a_pause_has_its_bounds_and_grows(attempt: int, asked: float, chance: float) -> None:
    pause = pause_s(attempt, 0.5, asked, chance)
    assert min(asked, LONGEST_WAIT_S) <= pause <= LONGEST_WAIT_S
    assert pause_s(attempt + 1, 0.5, asked, chance) >= pause
