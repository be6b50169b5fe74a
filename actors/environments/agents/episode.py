"""One episode of an agent: a process of its own that speaks to the policy through a session of the gateway."""

import asyncio
import contextlib
import json
import os
import signal
from typing import Any

import msgspec

from actors.environments.agents.gateway import Gateway, Session
from actors.environments.agents.nursery import Nursery, Running
from actors.environments.agents.runner import REWARD
from actors.serving.asked import Asked
from actors.serving.replies import Reply

TAIL = 2_000
"""Bytes of what an agent wrote last that a fault shows."""


class Limits(msgspec.Struct, frozen=True):
    """seconds: of an episode, without those in which it waits for replies; memory_gib: address space of its process, 0 for no limit; output_mib: that it may write."""

    seconds: float = 600.0
    memory_gib: float = 0.0
    output_mib: float = 4.0


class Ended(msgspec.Struct, frozen=True):
    """How an episode ended. reward: None if nobody gave one. fault: why the process failed, "" if it did not. said: what it wrote last."""

    reward: float | None
    fault: str = ""
    said: str = ""

    @property
    def last(self) -> str:
        """The last line that it wrote, as a rule an error's."""
        return self.said.strip().rpartition("\n")[2][-500:]


class Episode:
    """A process and its session, from ``start`` to ``close``. Several requests may wait at the same time; each is answered once."""

    def __init__(self, gateway: Gateway, nursery: Nursery, task: dict[str, Any], limits: Limits):
        self.gateway, self.nursery, self.task, self.limits = gateway, nursery, task, limits
        self.session: Session = gateway.opened()
        self._waiting: dict[str, tuple[Asked, asyncio.Future[Reply]]] = {}
        self._process: Running | None = None
        self._ended: asyncio.Task[Ended] | None = None
        self._said = bytearray()
        self._limit: asyncio.Timeout = asyncio.timeout(None)
        self._left = limits.seconds
        self._since: float | None = None

    async def start(self) -> None:
        """Start the process. Raises OSError if it cannot be started."""
        key = self.session.key
        known = {
            "OPENAI_BASE_URL": self.gateway.url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": self.gateway.url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
            "COPPICE_SESSION": key,
            "COPPICE_TASK": json.dumps(self.task),
        }
        memory = int(self.limits.memory_gib * 2**30)
        self._process = await self.nursery.start(self.task, {**_environment(), **known}, memory)
        self._ended = asyncio.create_task(self._run())

    def asked(self) -> list[Asked]:
        """Return the requests that wait for their answers, in the order in which they came. While there are any, the agent's time stands still."""
        while not self.session.requests.empty():
            asked, answer = self.session.requests.get_nowait()
            self._waiting[asked.id] = asked, answer
        if self._waiting and self._since is not None:
            self._left -= asyncio.get_running_loop().time() - self._since
            self._since = None
            self._hold(None)
        return [asked for asked, _ in self._waiting.values()]

    @property
    def over(self) -> bool:
        """Whether the process has ended."""
        return self._ended is None or self._ended.done()

    async def news(self) -> None:
        """Wait until another request comes or the process ends."""
        assert self._ended is not None
        coming = asyncio.create_task(self.session.news.wait())
        try:
            await asyncio.wait([coming, self._ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            coming.cancel()

    async def next(self) -> Asked | Ended:
        """Return the oldest request that waits, or the end of the episode. Raises InfrastructureFault if its process is lost."""
        assert self._ended is not None
        while not (waiting := self.asked()):
            if self._ended.done():
                return self._ended.result()
            await self.news()
        self.session.open = ""
        return waiting[0]

    def answer(self, asked: Asked, reply: Reply) -> None:
        """Answer a request that waits. An agent that has gone away has no use for it."""
        self.session.open, self.session.step_reward = asked.id, None
        self._since = asyncio.get_running_loop().time()
        self._hold(self._since + max(self._left, 0.0))
        _, answer = self._waiting.pop(asked.id)
        if not answer.done():
            answer.set_result(reply)

    async def close(self) -> None:
        """Kill the process, with all that it has started, and close the session."""
        self.gateway.end(self.session, "the episode has ended")
        if self._process is not None and self._process.returncode is None:
            _kill(self._process.pid)
        if self._ended is not None:
            await asyncio.gather(self._ended, return_exceptions=True)

    def _hold(self, when: float | None) -> None:
        """End the process at ``when``, on the loop's clock, or not at all."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._limit.reschedule(when)

    async def _run(self) -> Ended:
        """Read what the process writes until it ends, or until a limit ends it."""
        assert self._process is not None and self._process.stdout is not None
        fault, written, reward = "", 0, None
        try:
            async with self._limit:
                self._since = asyncio.get_running_loop().time()
                self._hold(self._since + self._left)
                while line := await _line(self._process.stdout):
                    written += len(line)
                    if line.startswith(REWARD):
                        reward = json.loads(line.removeprefix(REWARD))
                        continue
                    self._said = (self._said + line)[-TAIL:]
                    if written > self.limits.output_mib * 2**20:
                        fault = f"it wrote more than {self.limits.output_mib:g} MiB"
                        break
                if not fault:
                    await self._process.wait()
        except TimeoutError:
            fault = f"it ran longer than {self.limits.seconds:g} s"
        if self._process.returncode is None:
            _kill(self._process.pid)
        try:
            code = await self._process.wait()
        finally:
            self.nursery.forget(self._process)
        if code and not fault:
            fault = f"exit status {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
        return Ended(
            reward if self.session.reward is None else self.session.reward, fault, self._said.decode(errors="replace")
        )


def _kill(pid: int) -> None:
    """Kill a process and all that it has started; itself alone, if it has no group of its own yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """The environment of an agent: this process's, without other keys of this run and of its user's other models."""
    return {name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "_TOKEN"))}


async def _line(stream: asyncio.StreamReader) -> bytes:
    """Return the next line, or a part of one that is too long."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(error.consumed)
    except ConnectionError:
        return b""
