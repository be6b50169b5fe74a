"""A speaker is a worker: it replies in text through a real dispatcher, and what its endpoint does
wrong is a fault of the call."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from coppice.judges.serve import built_in_service, make_worker
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import SpeakRequest
from tests.judges.test_llm import Reply, chat, chat_server, started
from tests.judges.test_serve import serving
from tests.services import Bench

ASKED = SpeakRequest([{"role": "user", "content": "Hello?"}], 7, 0.25, ["\n"], 2**40 + 5)


@asynccontextmanager
async def served(folder: Path, reply: Reply) -> AsyncIterator[Bench]:
    """A dispatcher with the built-in speaker of such a server."""
    async with chat_server(reply) as url:
        endpoint = {"url": url, "model": "m", "backoff_s": 1e-3}
        async with serving(folder, make_worker("chat", {"endpoint": endpoint})) as b:
            yield b


async def spoken(b: Bench) -> str:
    result: Any = await b.dispatcher.call("speaker.chat", ASKED, deadline=10)
    return result.text


async def test_the_request_reaches_the_endpoint_and_its_reply_comes_back(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    async def reply(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return chat("Good day.") if len(seen) > 1 else web.Response(status=503)

    async with served(tmp_path, reply) as b:
        assert await spoken(b) == "Good day."
    expected = {"model": "m", "messages": ASKED.messages, "max_tokens": 7, "temperature": 0.25}
    expected |= {"stop": ["\n"], "seed": 5}
    assert seen == [expected, expected]  # a busy server is asked again


async def test_a_refused_request_is_a_data_fault_that_names_the_cause(tmp_path: Path) -> None:
    async def reply(request: web.Request) -> web.Response:
        return web.Response(status=400, text="the messages are too long")

    async with served(tmp_path, reply) as b:
        with pytest.raises(DataFault, match="too long"):
            await spoken(b)


async def test_a_reply_that_does_not_come_in_time_is_a_fault_with_its_limit() -> None:
    async def reply(request: web.Request) -> web.Response:
        await asyncio.sleep(60)  # longer than the speaker's patience
        return chat("late")

    def speaker(url: str) -> Any:
        return make_worker("chat", {"endpoint": {"url": url, "model": "m", "patience_s": 0.05}})

    async with started(speaker, reply) as made:
        with pytest.raises(InfrastructureFault, match=r"0\.05 s \(patience_s\)"):
            await made.speak(ASKED)


def test_a_plug_in_names_its_own_service() -> None:
    services = [built_in_service(name) for name in ("chat", "frozen", "my:Echo")]
    assert services == ["speaker.chat", "speaker.frozen", ""]
    endpoint = {"url": "http://127.0.0.1/v1", "model": "m"}
    assert make_worker("frozen", {"endpoint": endpoint}).service == "speaker.frozen"
