"""One episode of an agent: a process of its own that speaks to the policy through a session of the
gateway. All are forked from one small process (``actors.environments.agents.runner``) that has
imported the libraries of agents, so that an episode does not wait for imports."""

import asyncio
import collections
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.environments.agents import runner
from coppice.actors.environments.agents.gateway import Gateway, Session
from coppice.actors.serving.conversations import Conversation
from coppice.actors.serving.replies import Reply
from coppice.common.process import die_with, without_secrets
from coppice.wire.faults import InfrastructureFault

TAIL = 4_096
"""Bytes of an agent's last output that are kept."""
IMPORT_S = 300.0
"""The time until a process begins an episode, of which the first one's imports take most."""
CLOSE_S = 10.0
DRAIN_S = 1.0
"""Seconds for which an ended process is read. An escaped child may hold its output open."""
LONGEST_VARIABLE = 100_000
"""The most bytes of COPPICE_TASK. Linux takes no variable of more than 128 KiB."""
_TRACEBACK = re.compile(
    r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(?P<error>\S.*)", re.MULTILINE
)
_NODE = re.compile(r"^Node\.js v\d")
_THROWN = re.compile(r"^\[?(?:Uncaught )?[\w$.]*(?:Error|Exception|Rejection)\b.*", re.MULTILINE)


class AgentProcess:
    """The process of an episode. It ends after everything that the agent has started."""

    stdout: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __init__(self, pid: int):
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit status, or InfrastructureFault if it is lost."""

    def kill(self) -> None:
        """Have its keeper kill the agent with all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)


class ForkServer:
    """Starts processes of ``command``, or of the function ``run`` ("module:function") if the
    command is empty. python: runs the functions. pass_env: variables that agents get although their
    names tell of a secret."""

    def __init__(
        self, command: list[str], run: str = "", python: str = sys.executable,
        pass_env: Sequence[str] = (),
    ):  # fmt: skip
        self.command, self.run, self.python, self.pass_env = command, run, python, pass_env
        self._channel: socket.socket | None = None
        self._server: asyncio.subprocess.Process | None = None
        self._opening = asyncio.Lock()
        self._listening: asyncio.Task[None] | None = None
        self._expected: collections.deque[asyncio.Future[AgentProcess]] = collections.deque()
        self._living: dict[int, AgentProcess] = {}

    async def start(self, task: bytes, variables: dict[str, str], memory: int) -> AgentProcess:
        """Start an episode, with the task in its stdin. memory: in bytes. Raises OSError."""
        if self.command and shutil.which(self.command[0]) is None:
            fault = f"there is no program {self.command[0]!r}"
            raise FileNotFoundError(f"{fault}: expected a path or a name on the PATH")
        environment = {"PYTHONUNBUFFERED": "1", **without_secrets(self.pass_env), **variables}
        settings = {"command": self.command, "environment": environment, "memory": memory}
        async with self._opening:
            if self._listening is None or self._listening.done():
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
            try:
                async with asyncio.timeout(IMPORT_S):
                    child = await born
            except TimeoutError:
                await self.close()
                raise OSError(f"no agent began in {IMPORT_S:g} s: does an import wait?") from None
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
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._server.wait()
            except TimeoutError:
                self._server.kill()
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


class Ended(msgspec.Struct, frozen=True):
    """How an episode ended. fault: why the process failed. said: what it wrote last."""

    reward: float | None
    fault: str = ""
    said: str = ""

    @property
    def error(self) -> str:
        """The line that tells why: of a Python traceback, of Node's error, or the last one."""
        last = self.said.strip().rpartition("\n")[2]
        errors = [match["error"] for match in _TRACEBACK.finditer(self.said)]
        if _NODE.match(last):
            errors = _THROWN.findall(self.said)
        return (errors[-1] if errors else last)[:500]

    @property
    def told(self) -> str:
        """Why the process ended, in a line."""
        return f"{self.fault or 'exit status 0'}: {self.error or 'it wrote nothing'}"


class Episode:
    """A process and its session. Several requests may wait at once; each is answered once. seconds:
    the most, without those of waiting for replies. memory_gib: 0 for no limit."""

    def __init__(
        self, gateway: Gateway, server: ForkServer, task: dict[str, Any], seconds: float = 600.0,
        memory_gib: float = 0.0, output_mib: float = 4.0,
    ):  # fmt: skip
        self.gateway, self.server, self.task = gateway, server, task
        self.seconds, self.memory_gib, self.output_mib = seconds, memory_gib, output_mib
        self.session: Session = gateway.opened()
        self._process: AgentProcess | None = None
        self._ended: asyncio.Task[Ended] | None = None
        self._said, self._returned = bytearray(), None
        self._limit: asyncio.Timeout = asyncio.timeout(None)
        self._left = seconds
        self._since: float | None = None

    async def start(self) -> None:
        """Start the process. Raises OSError if it cannot be started."""
        key, task = self.session.key, msgspec.json.encode(self.task)
        variables = {
            "OPENAI_BASE_URL": self.gateway.url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": self.gateway.url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
        }
        if len(task) <= LONGEST_VARIABLE:
            variables["COPPICE_TASK"] = task.decode()
        self._process = await self.server.start(task, variables, int(self.memory_gib * 2**30))
        self._ended = asyncio.create_task(self._run())

    def requests(self) -> list[Conversation]:
        """Return the requests that wait, oldest first. While any waits, the time stands still."""
        waiting = [*self.session.waiting.values()]
        if waiting and self._since is not None:
            self._left -= asyncio.get_running_loop().time() - self._since
            self._since = None
            self._hold(None)
        return waiting

    @property
    def over(self) -> bool:
        return self._ended is None or self._ended.done()

    async def news(self) -> None:
        """Wait until another request comes or the process ends."""
        assert self._ended is not None
        coming = asyncio.create_task(self.session.news.wait())
        try:
            await asyncio.wait([coming, self._ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            coming.cancel()

    async def next(self) -> Conversation | Ended:
        """Return the oldest request or the end. Raises InfrastructureFault if it is lost."""
        assert self._ended is not None
        while not (waiting := self.requests()):
            if self._ended.done():
                return self._ended.result()
            await self.news()
        self.session.open = ""
        return waiting[0]

    def answer(self, request: Conversation, reply: Reply) -> None:
        self._since = asyncio.get_running_loop().time()
        self._hold(self._since + max(self._left, 0.0))
        self.session.answer(request, reply)

    async def close(self) -> None:
        """Kill the process, with all that it has started, and close the session."""
        self.gateway.end(self.session, "the episode has ended")
        if self._process is not None and not self._process.ended.done():
            self._process.kill()
        if self._ended is not None:
            await asyncio.gather(self._ended, return_exceptions=True)

    def _hold(self, when: float | None) -> None:
        """End the process at ``when``, on the loop's clock, or not at all."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._limit.reschedule(when)

    async def _run(self) -> Ended:
        """Read what the process writes until it has ended, or until a limit ends it."""
        assert self._process is not None
        process, ended, fault = self._process, self._process.ended, ""
        reading = asyncio.create_task(self._read(process.stdout))
        try:
            try:
                async with self._limit:
                    self._since = asyncio.get_running_loop().time()
                    self._hold(self._since + self._left)
                    await asyncio.wait([reading, ended], return_when=asyncio.FIRST_COMPLETED)
                    # it has closed its output, and goes on
                    if reading.done() and not reading.result():
                        await asyncio.shield(ended)
            except TimeoutError:
                fault = f"it ran longer than {self.seconds:g} s"
            if not ended.done():
                process.kill()
            code = await asyncio.shield(ended)
            await asyncio.wait([reading], timeout=DRAIN_S)
        finally:
            reading.cancel()
            process.writer.close()
        if reading.done() and not reading.cancelled():
            fault = fault or reading.result()
        if code and not fault:
            names = {one.value: one.name for one in signal.Signals}  # without most real-time ones
            killed = names.get(-code, f"signal {-code}")
            fault = f"exit status {code}" if code > 0 else f"killed by {killed}"
        reward = self._returned if self.session.reward is None else self.session.reward
        return Ended(reward, fault, self._said.decode(errors="replace"))

    async def _read(self, output: asyncio.StreamReader) -> str:
        """Read to the end of what the process writes. Return the fault if it writes too much."""
        written = 0
        while line := await _line(output):
            written += len(line)
            if line.startswith(runner.REWARD):
                with contextlib.suppress(ValueError):  # of a line that another printed
                    self._returned = json.loads(line.removeprefix(runner.REWARD))
                    continue
            self._said = (self._said + line)[-TAIL:]
            if written > self.output_mib * 2**20:
                return f"it wrote more than {self.output_mib:g} MiB"
        return ""


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
