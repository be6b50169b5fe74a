"""Starts the processes of episodes. A command line is started as it is. Agents that are Python functions are forked from one process that
has imported their libraries already, so that an episode costs milliseconds and not the seconds that a library takes to import."""

import asyncio
import collections
import contextlib
import json
import os
import socket
import sys
import tempfile
from typing import Any, Protocol

from actors.environments.agents.runner import confine
from wire.faults import InfrastructureFault
from wire.process import die_with


class Running(Protocol):
    """The process of an episode, with what asyncio's processes have."""

    pid: int
    stdout: asyncio.StreamReader | None

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...


class Nursery:
    """Starts processes of ``command``, or of the function ``run`` ("module:function") if the command is empty."""

    def __init__(self, command: list[str], run: str = ""):
        self.command, self.run = command, run
        self._channel: socket.socket | None = None
        self._nurse: asyncio.subprocess.Process | None = None
        self._opening = asyncio.Lock()
        self._listening: asyncio.Task[None] | None = None
        self._expected: collections.deque[asyncio.Future[_Forked]] = collections.deque()
        self._living: dict[int, _Forked] = {}

    async def start(self, task: dict[str, Any], environment: dict[str, str], memory: int) -> Running:
        """Start an episode with the task as JSON in its stdin. memory: bytes of its address space, 0 for no limit. Raises OSError if it cannot start."""
        if not self.command:
            return await self._fork(task, environment, memory)
        parent = os.getpid()

        def prepare() -> None:
            die_with(parent)
            confine(memory)

        with tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(task).encode())
            stdin.seek(0)
            return await asyncio.create_subprocess_exec(  # pyright: ignore[reportReturnType]
                *self.command,
                stdin=stdin,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                preexec_fn=prepare,
            )

    def forget(self, running: Running) -> None:
        """Read no more of what an episode writes."""
        if isinstance(running, _Forked) and running.writer is not None:
            running.writer.close()

    async def close(self) -> None:
        """End the process from which episodes are forked, and them."""
        if self._channel is not None:
            with contextlib.suppress(OSError):  # it has died already
                self._channel.shutdown(socket.SHUT_WR)
            self._channel.close()
        if self._nurse is not None:
            await self._nurse.wait()
        if self._listening is not None:
            await self._listening

    async def _fork(self, task: dict[str, Any], environment: dict[str, str], memory: int) -> "_Forked":
        async with self._opening:
            if self._nurse is None or self._nurse.returncode is not None:
                await self._open()
        assert self._channel is not None
        # A pair of sockets and not a pipe: uvloop closes the file of a pipe twice, and the second time it may be another's.
        ours, into = socket.socketpair()
        born = asyncio.get_running_loop().create_future()
        try:
            with tempfile.TemporaryFile() as stdin:
                stdin.write(json.dumps({"environment": environment, "memory": memory}).encode() + b"\n")
                stdin.write(json.dumps(task).encode())
                stdin.seek(0)
                self._expected.append(born)
                socket.send_fds(self._channel, [b"f"], [stdin.fileno(), into.fileno()])
            child = await born
            child.stdout, child.writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        finally:
            into.close()
        return child

    async def _open(self) -> None:
        self._channel, theirs = socket.socketpair()
        parent = os.getpid()
        with theirs:
            self._nurse = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "actors.environments.agents.runner", self.run, str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=lambda: die_with(parent),
            )
        self._listening = asyncio.create_task(self._listen(self._channel))

    async def _listen(self, channel: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=channel.dup())
        try:
            async for line in reader:
                said = json.loads(line)
                if "born" in said:
                    self._living[said["born"]] = child = _Forked(said["born"])
                    if not (expected := self._expected.popleft()).cancelled():
                        expected.set_result(child)
                elif child := self._living.pop(said["ended"], None):
                    child.ended.set_result(said["code"])
        except ConnectionError:
            pass
        finally:
            writer.close()
            lost = InfrastructureFault("the process from which agents are forked has died")
            for expected in self._expected:
                if not expected.done():
                    expected.set_exception(lost)
            for child in self._living.values():
                child.ended.set_exception(lost)
            self._expected.clear()
            self._living.clear()


class _Forked:
    """The process of an episode, a child of the nursery's."""

    def __init__(self, pid: int):
        self.pid = pid
        self.stdout: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        return None if not self.ended.done() else 1 if self.ended.exception() else self.ended.result()

    async def wait(self) -> int:
        """Return the exit status. Raises InfrastructureFault if nobody knows it any more."""
        return await asyncio.shield(self.ended)
