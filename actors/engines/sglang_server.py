"""An SGLang server as a child of the actor, which starts it on a free loopback port with a key of
its own, watches it and ends it."""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.sglang_api import FIXED, NO_DUMPS, Facts, Http, arguments
from coppice.common.process import free_port
from coppice.wire.faults import InfrastructureFault

log = logging.getLogger("actors.sglang.server")

_ROOT = Path(__file__).resolve().parents[2]
_STEP_S = 0.5
_GRACE_S = 7.0
"""Seconds that the server gets to end. They are fewer than the launcher gives an actor to end."""
_LONGEST_LINE = 2**20
_OWN = ("model_path", "host", "port", "api_key", "weight_version")
"""Arguments that an actor sets itself and a user must not set."""
_TAIL = 40
"""The number of lines of the server's log that are kept for error messages."""


class Launched:
    """The way "server": ``start`` starts the server and waits for it, ``close`` ends it. Each line
    of its output goes to this process's log."""

    elastic = False

    def __init__(self, model: str, config: ActorsConfig):
        self.config = config.sglang
        if taken := sorted(set(config.sglang.arguments) & set(_OWN)):
            raise ValueError(f"actors.sglang.arguments: {taken} are set by the actor: remove them")
        self.port = free_port()
        self._key = key = secrets.token_urlsafe(24)
        self.front = Http(
            f"http://127.0.0.1:{self.port}", key, config.sglang.request_timeout_s, config.capacity
        )
        self.servers = [self.front]
        self.name = self.front.name
        here = {"host": "127.0.0.1", "port": self.port, "api_key": key}
        self.arguments: dict[str, Any] = arguments(model, config) | here
        self._process: asyncio.subprocess.Process | None = None
        self._log: deque[str] = deque(maxlen=_TAIL)
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the server and wait until it answers. Raises InfrastructureFault with the end of
        its log when it does not."""
        own = {"PYTHONPATH": str(_ROOT), "PYTHONUNBUFFERED": "1", "SGL_FORCE_SHUTDOWN": "1"}
        environment = NO_DUMPS | os.environ | own | self.config.environment
        if "PYTHONPATH" in self.config.environment:
            environment["PYTHONPATH"] = (
                f"{self.config.environment['PYTHONPATH']}{os.pathsep}{_ROOT}"
            )
        environment |= FIXED
        python = self.config.python or sys.executable
        try:
            self._process = await asyncio.create_subprocess_exec(
                python, "-m", "coppice.actors.engines.sglang_process",
                limit=_LONGEST_LINE, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                env=environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise InfrastructureFault(
                f"actors.sglang.python = {python!r} cannot be started: {error}"
            ) from None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self.arguments).encode())
        self._process.stdin.close()
        self._reading = asyncio.create_task(self._read())
        try:
            await self.front.start()
            await self._ready()
        except BaseException:
            await self.close()
            raise

    async def _ready(self) -> None:
        end = time.monotonic() + self.config.start_timeout_s
        while not await self.front.healthy():
            assert self._process is not None
            if self._process.returncode is not None:
                raise InfrastructureFault(
                    f"the SGLang server ended with status {self._process.returncode} while starting:\n{self._said()}"
                )
            if time.monotonic() > end:
                raise InfrastructureFault(
                    f"the SGLang server did not answer within actors.sglang.start_timeout_s = {self.config.start_timeout_s:g} s:\n"
                    f"{self._said()}"
                )
            await asyncio.sleep(_STEP_S)

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # the line is longer than the limit; the rest of it is read next
                continue
            if not line:
                return
            # the server prints its arguments
            text = line.decode(errors="replace").rstrip().replace(self._key, "(key)")
            self._log.append(text)
            log.info("%s", text)

    def _said(self) -> str:
        return "\n".join(self._log) or "(it wrote nothing)"

    async def facts(self) -> Facts:
        """Return what the server reports about itself."""
        return await self.front.facts(self.arguments["model_path"])

    async def generate(self, body: dict[str, Any]) -> Any:
        """Return the answer to POST /generate."""
        return await self.front.call("/generate", body, self.config.request_timeout_s, attempts=1)

    async def abort(self, names: list[str]) -> None:
        """Stop these requests."""
        await self.front.abort(names)

    async def died(self) -> str:
        """Return the server's exit status and the end of its log, once the server has ended."""
        assert self._process is not None
        status = await self._process.wait()
        return f"the SGLang server ended with status {status}:\n{self._said()}"

    async def close(self) -> None:
        """End the server and its children."""
        await self.front.close()
        if self._process is not None and self._process.returncode is None:
            # The signal goes to the server alone: it ends its children itself, but waits to
            # diagnose children that it finds dead.
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _GRACE_S)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                # its scheduler and detokenizer are in the same session
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        if self._reading is not None:
            self._reading.cancel()
