"""Environments of OpenEnv: their class in this process, or a server of theirs over its WebSocket.

data.environment = "openenv" with data.options.environment and .action ("package.module:Class"),
where ``pip install openenv`` and the environment's own package are; or data.environment =
"openenv_server" with data.options.url, which needs neither. The policy writes an action as a JSON
object of its fields, or as bare text where the action has one field. It sees the observation's
fields as JSON.
"""

import asyncio
import contextlib
import inspect
import json
from typing import Any

import aiohttp
import msgspec

from coppice.actors.environments.base import Action, Task, Tools, Transition
from coppice.actors.environments.others.mutable import Live, Mutable, Played, Turned
from coppice.common.numbers import Count, Positive
from coppice.common.options import imported
from coppice.wire.faults import DataFault, InfrastructureFault

LARGEST = 4 << 20
"""The most bytes of a server's answer."""
FULL_S = 0.2
"""Seconds between two requests to a server that has no place free."""
_OWN = ("done", "reward", "metadata")
"""Fields that every observation has."""


def _fields(text: str, field: str) -> str | None:
    """Return an action in a reply as a JSON object. field: of an action that has one, which may be
    written bare."""
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
    return json.dumps(
        {name: value for name, value in observation.items() if name not in _OWN}, ensure_ascii=False
    )


class OpenEnv(Mutable):
    """environment, action: "module:Class" of an environment and of its actions. rules: what the
    policy is told. field: as in ``_fields``.

    An action that the environment refuses with a ValueError ends the episode with what it has
    earned. Anything else that the environment raises is a DataFault, which sets its task aside. An
    environment whose ``reset`` takes no seed draws from the process's random state, which the seed
    sets."""

    name = "openenv"

    def __init__(
        self, environment: str, action: str, rules: str, field: str = "", horizon: Count = 100
    ):
        super().__init__(horizon)
        self._make, self._action = (
            imported(f"data.options = {place!r}", place) for place in (environment, action)
        )
        self.rules, self.field = rules, field

    def begin(self, seed: int) -> tuple[Any, str]:
        try:
            environment = self._make()
            seeded = {"seed": seed} if _takes_seed(environment.reset) else {}
            return environment, _shown(environment.reset(**seeded).model_dump(mode="json"))
        except Exception as error:
            raise self._fault(error, f"the episode of seed {seed} cannot begin") from error

    def turn(self, environment: Any, action: str) -> Turned:
        try:
            observation = environment.step(self._action(**json.loads(action)))
            return _turned(
                observation.model_dump(mode="json"), observation.reward, observation.done
            )
        except ValueError:  # pydantic's ValidationError is one too
            raise
        except Exception as error:
            raise self._fault(error, f"the action {action[:200]} fails") from error

    def _fault(self, error: Exception, said: str) -> DataFault:
        return DataFault(
            f"OpenEnv environment {self._make.__name__}: {said}: {type(error).__name__}: {error}"
        )

    def allowed(self, text: str) -> str | None:
        return _fields(text, self.field)


def _takes_seed(reset: Any) -> bool:
    parameters = inspect.signature(reset).parameters
    return "seed" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


class OpenEnvServer(Mutable):
    """url: of a server, "ws://host:port". rules, field: as in ``OpenEnv``. timeout_s: for an answer
    of the server. A session cannot be copied, so siblings are played from the beginning in sessions
    of their own. sessions: that are kept for states to come. A server allows one session at a time
    unless its max_concurrent_envs says more; where it is full, a kept session makes way, or a step
    waits for its place.

    The server does not tell an action that its environment refuses from a mistake of the
    environment: both end the episode with what it has earned.
    """

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

    async def step(self, state: Played, action: Action, tools: Tools) -> Transition:
        """Play the action. A session that was kept may have gone since; then a new one plays the
        episode again."""
        kept = (state.seed, state.actions) in self._cache
        try:
            return await super().step(state, action, tools)
        except InfrastructureFault:
            if not kept:
                raise
            return await super().step(state, action, tools)

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

    async def close(self) -> None:
        """Close all sessions."""
        while self._cache:
            self.forget(self._cache.popitem()[1])
        await asyncio.gather(*self._closing)

    async def _session(self, seed: int) -> tuple[Live, str]:
        loop = asyncio.get_running_loop()
        until = loop.time() + self.timeout_s
        while True:
            live = Live(seed)
            live.environment = _Session(self.url, self.timeout_s)
            try:
                return live, _shown(
                    (await self._ask(live, {"type": "reset", "data": {"seed": seed}}))[
                        "observation"
                    ]
                )
            except Full:
                if loop.time() > until:
                    raise
            except ValueError as error:
                raise DataFault(
                    f"OpenEnv server {self.url}: the episode of seed {seed} cannot begin: {error}"
                ) from None
            if self._cache:
                self.forget(self._cache.popitem(last=False)[1])
            await asyncio.sleep(FULL_S)

    async def _ask(self, live: Live, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return await live.environment.ask(message)
        except BaseException:
            # also when the caller is cancelled: nobody knows what the session has played
            self.forget(live)
            raise


class Full(InfrastructureFault):
    """A server that has no place for a session."""


class _Session:
    """A connection with an episode of its own. Raises InfrastructureFault where the server does not
    answer, Full where it has no place, and ValueError for a message that it, or its environment,
    refuses."""

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
                    self._socket = await self._client.ws_connect(
                        f"{self.url}/ws", max_msg_size=LARGEST
                    )
                # a server without a place says so and hangs up
                with contextlib.suppress(ConnectionResetError):
                    await self._socket.send_json(message)
                answer = await self._socket.receive_json()
                kind, data = answer["type"], answer["data"]
        except (
            aiohttp.ClientError,
            TimeoutError,
            TypeError,
            ValueError,
            KeyError,
            ConnectionError,
        ) as error:
            raise InfrastructureFault(
                f"OpenEnv server {self.url}: {type(error).__name__}: {error}"
            ) from None
        if kind == "observation":
            return data
        code = data.get("code") if kind == "error" else None
        if code in ("VALIDATION_ERROR", "EXECUTION_ERROR"):
            raise ValueError(data.get("message"))
        if code == "CAPACITY_REACHED":
            raise Full(
                f"OpenEnv server {self.url} is full: {data.get('message')}; give it a greater max_concurrent_envs"
            )
        raise InfrastructureFault(f"OpenEnv server {self.url} answered {kind}: {data}")

    async def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            await self._socket.close()
        if self._client is not None:
            await self._client.close()
