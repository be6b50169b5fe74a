"""An engine on servers by URL that cannot start leaves nothing open behind it."""

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from coppice.actors.config import ActorsConfig, SGLangConfig
from coppice.actors.engines.sglang import SGLangEngine
from coppice.wire.faults import InfrastructureFault

KEY = "COPPICE_TEST_WRONG_KEY"


@pytest_asyncio.fixture
async def locked() -> AsyncIterator[str]:
    """The URL of a server that answers every request with 401."""

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": "Unauthorized"}, status=401)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def refused(url: str) -> list[str]:
    """What the event loop and the interpreter have to say about what a failed start left behind."""
    said: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: said.append(str(context["message"]))
    )
    settings = SGLangConfig(way="url", urls=[url], api_key_env=KEY)
    engine: Any = SGLangEngine("no model folder", ActorsConfig(sglang=settings))
    gc.collect()  # what other tests of this process have left
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        with pytest.raises(InfrastructureFault, match=r"does not answer /health"):
            await engine.start()
        del engine
        await asyncio.sleep(0)  # transports close in the loop's next round
        gc.collect()
    return said + [str(one.message) for one in warned if issubclass(one.category, ResourceWarning)]


@pytest.mark.parametrize("answers", [False, True])
async def test_a_failed_start_leaves_no_session_open(
    locked: str, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """No server there, or one that refuses the key."""
    monkeypatch.setenv(KEY, "wrong")
    url = locked if answers else "http://127.0.0.1:9"
    assert await refused(url) == []


async def test_a_model_that_cannot_be_read_leaves_no_session_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A start that fails after the connections are there is closed by the engine."""
    settings = SGLangConfig(way="url", urls=["http://127.0.0.1:9"])
    engine = SGLangEngine("no model folder", ActorsConfig(sglang=settings))
    way: Any = engine.way
    monkeypatch.setattr(way, "_connect", lambda _: way.front.start())
    with pytest.raises(InfrastructureFault):
        await engine.start()
    assert way.front.client._session.closed
