"""Starts the processes of episodes. All are forked from one small process
(``actors.environments.agents.runner``). It has imported the libraries of agents that are Python
functions, so that an episode costs milliseconds and not the seconds of an import."""

import asyncio
import collections
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from coppice.actors.environments.agents import runner
from coppice.common.process import die_with, without_secrets
from coppice.wire.faults import InfrastructureFault


class ForkServer:
    """Starts processes of ``command``, or of the function ``run`` ("module:function") if the
    command is empty. python: runs the functions. pass_env: variables that agents get although their
    names tell of a secret."""

    def __init__(
        self,
        command: list[str],
        run: str = "",
        python: str = sys.executable,
        pass_env: Sequence[str] = (),
    ):
        self.command, self.run, self.python, self.pass_env = command, run, python, pass_env
        self._channel: socket.socket | None = None
        self._server: asyncio.subprocess.Process | None = None
        self._opening = asyncio.Lock()
        self._listening: asyncio.Task[None] | None = None
        self._expected: collections.deque[asyncio.Future[AgentProcess]] = collections.deque()
        self._living: dict[int, AgentProcess] = {}

    async def start(self, task: bytes, variables: dict[str, str], memory: int) -> "AgentProcess":
        """Start an episode, with the task in its stdin. memory: bytes, 0 for no limit. Raises
        OSError."""
        if self.command and shutil.which(self.command[0]) is None:
            program = repr(self.command[0])
            raise FileNotFoundError(
                f"there is no program {program}: expected a path or a name on the PATH"
            )
        environment = {"PYTHONUNBUFFERED": "1", **without_secrets(self.pass_env), **variables}
        settings = {"command": self.command, "environment": environment, "memory": memory}
        async with self._opening:
            if self._server is None or self._server.returncode is not None:
                await self._open()
        assert self._channel is not None
        # A pair of sockets and not a pipe: uvloop closes the file of a pipe twice, and the second
        # time it may be another's.
        ours, into = socket.socketpair()
        born = asyncio.get_running_loop().create_future()
        try:
            with tempfile.TemporaryFile() as stdin:
                stdin.write(json.dumps(settings).encode() + b"\n" + task)
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

    async def close(self) -> None:
        """End the process and with it the episodes."""
        if self._channel is not None:
            with contextlib.suppress(OSError):  # it has died already
                self._channel.shutdown(socket.SHUT_WR)
            self._channel.close()
        if self._server is not None:
            await self._server.wait()
        if self._listening is not None:
            await self._listening

    async def _open(self) -> None:
        self._channel, theirs = socket.socketpair()
        parent = os.getpid()
        with theirs:
            self._server = await asyncio.create_subprocess_exec(
                *(self.python, str(Path(runner.__file__)), self.run, str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=without_secrets(self.pass_env),
                preexec_fn=lambda: die_with(parent),
            )
        self._listening = asyncio.create_task(self._listen(self._channel))

    async def _listen(self, channel: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=channel.dup())
        try:
            async for line in reader:
                event = json.loads(line)
                if "born" in event:
                    self._living[event["born"]] = child = AgentProcess(event["born"])
                    if not (expected := self._expected.popleft()).cancelled():
                        expected.set_result(child)
                elif child := self._living.pop(event["ended"], None):
                    child.ended.set_result(event["code"])
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


class AgentProcess:
    """The process of an episode. It ends after everything that the agent has started."""

    stdout: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __init__(self, pid: int):
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        if not self.ended.done():
            return None
        return 1 if self.ended.exception() else self.ended.result()

    def kill(self) -> None:
        """Have its keeper kill the agent with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    async def wait(self) -> int:
        """Return the exit status. Raises InfrastructureFault if it is lost."""
        return await asyncio.shield(self.ended)
