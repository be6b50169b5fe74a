"""Environments of OpenEnv: their class in this process, or a server of theirs over its WebSocket.

data.environment = "openenv" with data.options.environment and .action ("package.module:Class"), where ``pip install openenv`` and the environment's
own package are; or data.environment = "openenv_server" with data.options.url, which needs neither. The policy writes an action as a JSON object
of its fields, or as bare text where the action has one field. It sees the observation's fields as JSON.
"""

import asyncio
import json
from typing import Any

import aiohttp
import msgspec

from actors.environments.base import Task, Tools
from actors.environments.others.mutable import Live, Mutable, Played, Turned
from wire.faults import InfrastructureFault
from wire.numbers import Count, Positive
from wire.options import imported

LARGEST = 4 << 20
"""The most bytes of a server's answer."""
_OWN = ("done", "reward", "metadata")
"""Fields that every observation has."""


def _fields(text: str, field: str) -> str | None:
    """Return an action in a reply as a JSON object. field: of an action that has one, which may be written bare."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text.strip()
    if not isinstance(value, dict):
        value = {field: value} if field and value != "" else None
    return None if value is None else json.dumps(value, sort_keys=True)


def _turned(observation: dict[str, Any], reward: float | None, done: bool) -> Turned:
    return Turned(_shown(observation), float(reward or 0.0), done)


def _shown(observation: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in observation.items() if name not in _OWN}, ensure_ascii=False)


class OpenEnv(Mutable):
    """environment, action: "module:Class" of an environment and of its actions. rules: what the policy is told. field: as in ``_fields``."""

    name = "openenv"

    def __init__(self, environment: str, action: str, rules: str, field: str = "", horizon: Count = 100):
        super().__init__(horizon)
        self._make, self._action = (imported(f"data.options = {place!r}", place) for place in (environment, action))
        self.rules, self.field = rules, field

    def begin(self, seed: int) -> tuple[Any, str]:
        environment = self._make()
        return environment, _shown(environment.reset(seed=seed).model_dump(mode="json"))

    def turn(self, environment: Any, action: str) -> Turned:
        observation = environment.step(self._action(**json.loads(action)))  # pydantic's ValidationError is a ValueError
        return _turned(observation.model_dump(mode="json"), observation.reward, observation.done)

    def allowed(self, text: str) -> str | None:
        return _fields(text, self.field)


class OpenEnvServer(Mutable):
    """url: of a server, "ws://host:port". rules, field: as in ``OpenEnv``. timeout_s: for an answer of the server. A session cannot be copied, so
    siblings are played from the beginning in sessions of their own. sessions: that are kept for states to come; the server must allow these and one for
    each step under way (max_concurrent_envs)."""

    name = "openenv_server"
    copies = False

    def __init__(
        self,
        url: str,
        rules: str,
        field: str = "",
        horizon: Count = 100,
        timeout_s: Positive = 60.0,
        sessions: Count = 16,
    ):
        super().__init__(horizon, sessions)
        self.url, self.rules, self.field, self.timeout_s = url.rstrip("/"), rules, field, timeout_s
        self._closing: set[asyncio.Task[None]] = set()

    def initial(self, task: Task) -> Played:
        """Return the state before the server is asked."""
        return Played(task.seed, "")

    async def open(self, state: Played, tools: Tools) -> Played:
        """Return the state of a new session."""
        live, seen = await self._session(state.seed)
        first = msgspec.structs.replace(state, seen=seen)
        self.keep(first, live)
        return first

    async def began(self, seed: int) -> Live:
        return (await self._session(seed))[0]

    async def played(self, live: Live, action: str) -> Turned:
        self.turns += 1
        answer = await self._ask(live, {"type": "step", "data": json.loads(action)})
        return _turned(answer["observation"], answer.get("reward"), bool(answer.get("done")))

    def allowed(self, text: str) -> str | None:
        return _fields(text, self.field)

    def forget(self, live: Live) -> None:
        """Close the session, which frees its place on the server."""
        closing = asyncio.get_running_loop().create_task(live.environment.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _session(self, seed: int) -> tuple[Live, str]:
        live = Live(seed)
        live.environment = _Session(self.url, self.timeout_s)
        answer = await self._ask(live, {"type": "reset", "data": {"seed": seed}})
        return live, _shown(answer["observation"])

    async def _ask(self, live: Live, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return await live.environment.ask(message)
        except BaseException:
            self.forget(live)  # also when the caller is cancelled: nobody knows what the session has played
            raise


class _Session:
    """A connection with an episode of its own. Raises InfrastructureFault where the server does not answer, and ValueError for an action that it refuses."""

    def __init__(self, url: str, timeout_s: float):
        self.url, self.timeout_s = url, timeout_s
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the data of the answer."""
        try:
            async with asyncio.timeout(self.timeout_s):
                if self._socket is None:
                    self._client = aiohttp.ClientSession()
                    self._socket = await self._client.ws_connect(f"{self.url}/ws", max_msg_size=LARGEST)
                await self._socket.send_json(message)
                answer = await self._socket.receive_json()
                kind, data = answer["type"], answer["data"]
        except (aiohttp.ClientError, TimeoutError, TypeError, ValueError, KeyError, ConnectionError) as error:
            raise InfrastructureFault(f"OpenEnv server {self.url}: {type(error).__name__}: {error}") from None
        if kind == "observation":
            return data
        if kind == "error" and data.get("code") == "VALIDATION_ERROR":
            raise ValueError(data.get("message"))
        raise InfrastructureFault(f"OpenEnv server {self.url} answered {kind}: {data}")

    async def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            await self._socket.close()
        if self._client is not None:
            await self._client.close()
