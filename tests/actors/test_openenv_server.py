"""OpenEnv over its WebSocket: sessions, a full server, refusals, and connections that break.
COPPICE_OPENENV_PYTHON names a Python with openenv."""

import asyncio
import gc
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from coppice.actors.environments.others.openenv import OpenEnvFull, OpenEnvServer
from coppice.wire.faults import DataFault, InfrastructureFault

COUNTER = Path(__file__).parents[1] / "openenv_counter.py"


class Server:
    """A process that serves, at the same place after a restart."""

    def __init__(self, kind: str, python: str, capacity: int):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = [python, str(COUNTER), kind, str(self.port), str(capacity)]
        self.environments: list[OpenEnvServer] = []
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(*self.command)
        async with aiohttp.ClientSession() as client:
            while True:
                assert self._process.returncode is None, "the server has ended"
                try:
                    async with client.get(f"http://127.0.0.1:{self.port}/health"):
                        return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.05)

    async def stop(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    def environment(self, **options: Any) -> Any:
        url = f"ws://127.0.0.1:{self.port}"
        self.environments.append(OpenEnvServer(url, "You add.", field="number", **options))
        return self.environments[-1]


@pytest_asyncio.fixture(params=["stand-in", "openenv"])
async def serve(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[int], Any]]:
    """Starts servers of a capacity."""
    own = os.environ.get("COPPICE_OPENENV_PYTHON")
    python = own if request.param == "openenv" else sys.executable
    if python is None:
        pytest.skip("COPPICE_OPENENV_PYTHON names no Python")
    servers: list[Server] = []

    async def start(capacity: int) -> Server:
        servers.append(Server(request.param, python, capacity))
        await servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        for environment in server.environments:
            await environment.close()
        await server.stop()


NO_TOOLS: Any = None


async def opened(environment: Any, seed: int = 7) -> Any:
    return await environment.open(environment.initial(environment.task(seed)), NO_TOOLS)


async def played(environment: Any, state: Any, *numbers: Any) -> Any:
    """Play numbers one after the other. Returns the last transition."""
    transition: Any = None
    for number in numbers:
        text = f"<action>{json.dumps(number)}</action>"
        transition = await environment.step(state, environment.read(state, text), NO_TOOLS)
        state = transition.state
    return transition


async def test_an_episode_is_played_in_a_session_of_its_own(serve: Callable[[int], Any]) -> None:
    server = await serve(8)
    environment = server.environment()
    first, second = await opened(environment), await opened(environment, 8)
    assert json.loads(first.seen) == {"total": 7, "drawn": 0}
    one = await played(environment, first, 1)
    await played(environment, second, 5)
    two = await played(environment, one.state, 2)
    assert (json.loads(two.observation)["total"], two.reward, two.done) == (10, 0.2, False)
    last = await played(environment, two.state, {"number": 9})
    assert (last.done, last.outcome, last.measures) == (True, pytest.approx(1.2), {"success": 1.0})
    assert environment.turns == 4, "no action was played twice"


async def test_siblings_are_played_again_and_see_the_same(
    serve: Callable[[int], Any], recwarn: pytest.WarningsRecorder
) -> None:
    server = await serve(8)
    environment = server.environment()
    state = (await played(environment, await opened(environment), 1, 2)).state
    siblings = [await played(environment, state, number) for number in (3, 3, 4)]
    assert siblings[0] == siblings[1] != siblings[2]
    gc.collect()
    # where two siblings stand in the same state, one session is kept and the other is closed
    assert not [one for one in recwarn.list if issubclass(one.category, ResourceWarning)]
    assert await played(server.environment(), state, 3) == siblings[0], "another process"


@pytest.mark.parametrize("action", [-1, {"number": "many"}, {"number": 1, "more": 2}])
async def test_what_the_server_refuses_ends_the_episode_with_what_it_earned(
    serve: Callable[[int], Any], action: Any
) -> None:
    environment = (await serve(8)).environment()
    first = await played(environment, await opened(environment), 5)
    last = await played(environment, first.state, action)
    assert (last.done, last.outcome, last.measures) == (True, 0.5, {"success": 0.0})


async def test_an_episode_that_cannot_begin_is_a_fault_of_its_task(
    serve: Callable[[int], Any],
) -> None:
    with pytest.raises(DataFault, match="seed 13 cannot begin: no episode of this seed"):
        await opened((await serve(8)).environment(), 13)


async def test_on_a_full_server_kept_sessions_make_way(serve: Callable[[int], Any]) -> None:
    environment = (await serve(1)).environment()
    states = [await opened(environment, seed) for seed in (1, 2, 3)]
    ends = await asyncio.gather(*(played(environment, state, 4, 5) for state in states))
    assert [json.loads(end.observation)["total"] for end in ends] == [10, 11, 12]


async def test_on_a_server_that_stays_full_a_step_is_told_the_remedy(
    serve: Callable[[int], Any],
) -> None:
    server = await serve(1)
    await opened(server.environment())
    with pytest.raises(OpenEnvFull, match="max_concurrent_envs"):
        await opened(server.environment(timeout_s=2.0))


async def test_an_episode_goes_on_in_a_new_session_when_the_server_has_been_away(
    serve: Callable[[int], Any],
) -> None:
    server = await serve(8)
    environment = server.environment()
    state = (await played(environment, await opened(environment), 1, 2)).state
    expected = await played(server.environment(), state, 3)
    await server.stop()
    await server.start()
    assert await played(environment, state, 3) == expected
    await server.stop()
    with pytest.raises(InfrastructureFault, match=str(server.port)):
        await played(environment, state, 3)
    await server.start()
    assert await played(environment, state, 3) == expected


async def test_a_cancelled_step_leaves_nothing_behind(serve: Callable[[int], Any]) -> None:
    environment = (await serve(8)).environment()
    state = (await played(environment, await opened(environment), 1)).state
    expected = await played(environment, state, 2)
    for ticks in (1, 3, 9):
        step = asyncio.create_task(played(environment, state, 2))
        for _ in range(ticks):
            await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        assert await played(environment, state, 2) == expected
