"""Environments of OpenEnv: their class in this process, or a server of theirs over its WebSocket
(docs/environments.md). Actions are JSON objects of their fields, observations are seen as JSON."""

import asyncio
import collections
import contextlib
import inspect
import json
from typing import Any

import aiohttp

from coppice.actors.environments.others.in_other_python.worker import ActionRefused, Turned
from coppice.actors.environments.others.in_process import InThisPython
from coppice.actors.environments.others.mutable import Mutable
from coppice.common.numbers import Count, Positive
from coppice.common.options import imported
from coppice.wire.faults import DataFault, InfrastructureFault

LARGEST = 4 << 20
"""The most bytes of a server's answer."""
FULL_S = 0.2
"""Seconds between two requests to a server that has no place free."""


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


def _turned(observation: dict[str, Any], reward: float | None = None, done: Any = False) -> Turned:
    shown = dict(observation)
    for name in ("done", "reward", "metadata"):  # of every observation
        shown.pop(name, None)
    return Turned(json.dumps(shown, ensure_ascii=False), float(reward or 0.0), bool(done))


class OpenEnv(InThisPython):
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

    def begin(self, seed: int) -> tuple[Any, Turned]:
        try:
            game = self._make()
            options = inspect.signature(game.reset).parameters.values()
            takes_seed = any(one.name == "seed" or one.kind is one.VAR_KEYWORD for one in options)
            seeded = {"seed": seed} if takes_seed else {}
            return game, _turned(game.reset(**seeded).model_dump(mode="json"))
        except Exception as error:
            raise self._fault(error, f"the episode of seed {seed} cannot begin") from error

    def turn(self, game: Any, action: str) -> Turned:
        try:
            seen = game.step(self._action(**json.loads(action)))
            return _turned(seen.model_dump(mode="json"), seen.reward, seen.done)
        except ValueError:  # pydantic's ValidationError is one too
            raise
        except Exception as error:
            raise self._fault(error, f"the action {action[:200]} fails") from error

    def _fault(self, error: Exception, said: str) -> DataFault:
        reason = f"{said}: {type(error).__name__}: {error}"
        return DataFault(f"OpenEnv environment {self._make.__name__}: {reason}")

    def allowed(self, text: str) -> str | None:
        return _fields(text, self.field)


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

    def __init__(
        self,
        url: str,
        rules: str,
        field: str = "",
        horizon: Count = 100,
        timeout_s: Positive = 60.0,
        sessions: Count = 16,
    ):
        super().__init__(horizon)
        self.url, self.rules, self.field, self.timeout_s = url.rstrip("/"), rules, field, timeout_s
        self.kept, self.turns = sessions, 0
        self._sessions = collections.OrderedDict[tuple[int, tuple[str, ...]], _Session]()

    def allowed(self, text: str) -> str | None:
        return _fields(text, self.field)

    async def ask(self, seed: int, actions: tuple[str, ...], action: str | None) -> Turned:
        """Play an action in the session that stands there, or in a new one that plays the episode
        again."""
        session = self._sessions.pop((seed, actions), None)
        if session is not None and action is not None:
            with contextlib.suppress(InfrastructureFault):  # it may have gone since
                return await self._act(session, seed, actions, action)
        elif session is not None:
            await session.close()
        session, shown = await self._begin(seed)
        for earlier in actions:
            shown = await self._step(session, earlier)
        if action is not None:
            return await self._act(session, seed, actions, action)
        await self._keep((seed, actions), session)
        return shown

    async def _begin(self, seed: int) -> tuple["_Session", Turned]:
        loop = asyncio.get_running_loop()
        until = loop.time() + self.timeout_s
        while True:
            session = _Session(self.url, self.timeout_s)
            try:
                return session, await session.ask("reset", {"seed": seed})
            except OpenEnvFull:
                if loop.time() > until:
                    raise
            except ValueError as error:
                raise DataFault(
                    f"OpenEnv server {self.url}: the episode of seed {seed} cannot begin: {error}"
                ) from None
            if self._sessions:
                await self._sessions.popitem(last=False)[1].close()
            await asyncio.sleep(FULL_S)

    async def _act(
        self, session: "_Session", seed: int, actions: tuple[str, ...], action: str
    ) -> Turned:
        try:
            turned = await self._step(session, action)
        except ValueError as error:
            raise ActionRefused(str(error)) from error
        if turned.done or len(actions) + 1 >= self.horizon:
            await session.close()
        else:
            await self._keep((seed, (*actions, action)), session)
        return turned

    async def _step(self, session: "_Session", action: str) -> Turned:
        self.turns += 1
        return await session.ask("step", json.loads(action))

    async def _keep(self, key: tuple[int, tuple[str, ...]], session: "_Session") -> None:
        sibling = self._sessions.pop(key, None)  # it has played the same
        self._sessions[key] = session
        if len(self._sessions) > self.kept:
            sibling = self._sessions.popitem(last=False)[1]
        if sibling is not None:
            await sibling.close()

    async def close(self) -> None:
        while self._sessions:
            await self._sessions.popitem()[1].close()


class OpenEnvFull(InfrastructureFault):
    """A server that has no place for a session."""


class _Session:
    """A connection with an episode of its own. An answer that does not come, or is cancelled, ends
    it, because nobody knows what it has played."""

    def __init__(self, url: str, timeout_s: float):
        self.url, self.timeout_s = url, timeout_s
        self._client = aiohttp.ClientSession()
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def ask(self, kind: str, data: dict[str, Any]) -> Turned:
        """Send a message and return what stands after it. Raises InfrastructureFault where the
        server does not answer, OpenEnvFull where it has no place, and ValueError for a message that
        it, or its environment, refuses."""
        try:
            return await self._answer({"type": kind, "data": data})
        except BaseException:
            await self.close()
            raise

    async def _answer(self, message: dict[str, Any]) -> Turned:
        try:
            async with asyncio.timeout(self.timeout_s):
                if self._socket is None:
                    self._socket = await self._client.ws_connect(
                        f"{self.url}/ws", max_msg_size=LARGEST
                    )
                # a server without a place says so and hangs up
                with contextlib.suppress(ConnectionResetError):
                    await self._socket.send_json(message)
                answer = await self._socket.receive_json()
            kind, data = answer["type"], answer["data"]
            if kind == "observation":
                return _turned(data["observation"], data.get("reward"), data.get("done"))
        except (aiohttp.ClientError, OSError, TypeError, ValueError, KeyError) as error:
            raise InfrastructureFault(
                f"OpenEnv server {self.url}: {type(error).__name__}: {error}"
            ) from None
        code = data.get("code") if kind == "error" else None
        if code in ("VALIDATION_ERROR", "EXECUTION_ERROR"):
            raise ValueError(data.get("message"))
        if code == "CAPACITY_REACHED":
            raise OpenEnvFull(
                f"OpenEnv server {self.url} is full: {data.get('message')}; give it a greater"
                " max_concurrent_envs"
            )
        raise InfrastructureFault(f"OpenEnv server {self.url} answered {kind}: {data}")

    async def close(self) -> None:
        """Close the connection, which frees its place on the server."""
        await self._client.close()
