"""A server for tests of OpenEnv's protocol: ``python openenv_counter.py KIND PORT CAPACITY``, where
KIND is openenv (the library's own server) or stand-in.

The stand-in answers as OpenEnv 0.10 does, so that the protocol is tested without it; the same tests
run over both.
"""

import random
import sys
from typing import Any


class Counter:
    """Adds up numbers, and draws one of its own each time."""

    def __init__(self) -> None:
        self.total, self.rng = 0, random.Random()

    def reset(self, seed: int) -> dict[str, Any]:
        if seed == 13:
            raise RuntimeError("no episode of this seed")
        self.total, self.rng = seed, random.Random(seed)
        return {"total": self.total, "drawn": 0}

    def step(self, number: int) -> dict[str, Any]:
        if number < 0:
            raise RuntimeError("only upwards")
        self.total += number
        return {"total": self.total, "drawn": self.rng.randrange(100)}


def classes(environment: Any, action: Any, observation: Any) -> tuple[Any, Any, Any]:
    """The counter as an environment of OpenEnv, with its action and observation. Their bases are
    OpenEnv's own, or have their shape."""

    class Add(action):
        number: int

    class Seen(observation):
        total: int
        drawn: int

    class Counting(environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.counter = Counter()

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
            return Seen(**self.counter.reset(seed or 0), done=False, reward=0.0)

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            seen = self.counter.step(action.number)
            return Seen(**seen, done=action.number == 9, reward=action.number / 10)

        @property
        def state(self) -> Any:
            return {"total": self.counter.total}

    return Counting, Add, Seen


def openenv(port: int, capacity: int) -> None:
    """Serve with OpenEnv."""
    import uvicorn  # pyright: ignore[reportMissingImports]
    from openenv.core.env_server import http_server, interfaces, types  # pyright: ignore

    bases = classes(interfaces.Environment, types.Action, types.Observation)
    app = http_server.create_app(*bases, max_concurrent_envs=capacity)
    uvicorn.run(app, port=port, log_level="warning")


def stand_in(port: int, capacity: int) -> None:
    """Serve what OpenEnv serves at /ws, without it."""
    from aiohttp import web

    free = [capacity]

    def refused(message: str, code: str) -> dict[str, Any]:
        return {"type": "error", "data": {"message": message, "code": code}}

    def answer(counter: Counter, message: dict[str, Any]) -> dict[str, Any]:
        reset, given = message["type"] == "reset", message["data"]
        if not reset and (set(given) != {"number"} or not isinstance(given["number"], int)):
            return refused("Invalid message", "VALIDATION_ERROR")
        try:
            seen = counter.reset(given["seed"]) if reset else counter.step(given["number"])
        except RuntimeError as error:
            return refused(str(error), "EXECUTION_ERROR")
        reward, done = (0.0, False) if reset else (given["number"] / 10, given["number"] == 9)
        data = {"observation": seen, "reward": reward, "done": done}
        return {"type": "observation", "data": data}

    async def session(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if free[0] == 0:
            await socket.send_json(refused("no room", "CAPACITY_REACHED"))
            await socket.close()
            return socket
        free[0] -= 1
        try:
            counter = Counter()
            async for message in socket:
                await socket.send_json(answer(counter, message.json()))
        finally:
            free[0] += 1
        return socket

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/ws", session), web.get("/health", health)])
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    {"openenv": openenv, "stand-in": stand_in}[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))
