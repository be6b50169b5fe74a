"""Servers of SGLang or vLLM over HTTP: one server, a server that the actor starts as its child, and
servers or a router that already run."""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from coppice.actors.config import ActorsConfig, ServedConfig
from coppice.common import jsonl
from coppice.common.http import JsonClient
from coppice.common.process import free_port
from coppice.wire.faults import DataFault, InfrastructureFault

log = logging.getLogger("actors.server")

_STEP_S = 0.5
"""Seconds between two looks for a server that starts."""
_GRACE_S = 7.0
"""Seconds that a server gets to end: fewer than the launcher gives an actor to end."""
_LONGEST_LINE = 2**20
_TAIL = 40
"""Lines of the server's log that are kept for error messages."""


class Facts(msgspec.Struct, frozen=True):
    """What a server reports about itself. capacity, context: tokens. vocabulary: rows of the
    embedding, 0 when unknown. version: the name of its weights, "" or "default" when they have
    none. mask: the most tokens that it can list as left by top-p and top-k."""

    capacity: int = 0
    context: int = 0
    vocabulary: int = 0
    device: str = ""
    tp: int = 1
    version: str = ""
    mask: int = 4096

    @property
    def updated(self) -> bool:
        """Whether somebody has changed the server's weights since it started."""
        # an actor names weights VERSION@MARK
        return self.version.partition("@")[0] not in ("", "default", "0")


class Sampled(msgspec.Struct):
    """One sample as a server answered it. finish: "stop", "length", or why it is none of them, with
    a reason. spans: the names of the weights that sampled its tokens. prompt, cached: tokens of the
    prompt, and those read from the cache. read: the prompt's ids, where they were asked for. masks:
    the ids that top-p and top-k left at each token. experts: ``Sample.experts``. versions: of each
    token, by the engine."""

    tokens: list[int]
    logprobs: list[float]
    finish: str
    reason: str
    spans: list[dict[str, Any]]
    prompt: int
    cached: int
    read: list[int] = []
    masks: list[list[int]] | None = None
    experts: np.ndarray | None = None
    versions: np.ndarray = np.zeros(0, np.int32)


class Http(ABC):
    """One server, reached by its URL. key: of the server; by default api_key_env's. Every call
    raises InfrastructureFault when it fails or takes longer than its limit.

    section: of [actors], and the name of the package. release: whose calls these are. generating:
    the path of requests, the only one that may refuse with DataFault. naming: the field that names
    a request. alive: what answers GET while the process lives; "/health" also tells that it
    generates. adapters: the paths that load and unload. lost: what is said about an adapter that is
    not loaded. own: arguments that only an actor sets. defaults, fixed: environment variables of a
    server that an actor starts, before and after the user's."""

    product: ClassVar[str]
    section: ClassVar[str]
    release: ClassVar[str]
    generating: ClassVar[str]
    naming: ClassVar[str]
    alive: ClassVar[str]
    adapters: ClassVar[tuple[str, str]]
    lost: ClassVar[str]
    own: ClassVar[tuple[str, ...]]
    defaults: ClassVar[dict[str, str]] = {}
    fixed: ClassVar[dict[str, str]]

    def __init__(self, url: str, model: str, config: ActorsConfig, key: str = ""):
        served: ServedConfig = getattr(config, self.section)
        self.url, self.model = url.rstrip("/"), model
        self.name, self.timeout_s = f"{self.product} at {self.url}", served.request_timeout_s
        self.update_s = served.update_timeout_s
        self.client = JsonClient(
            self.url, key=key, api_key_env="" if key else served.api_key_env,
            timeout_s=self.timeout_s, attempts=1, concurrency=max(64, 4 * config.capacity),
        )  # fmt: skip
        self.start, self.close = self.client.start, self.client.close

    async def answers(self, path: str) -> bool:
        with contextlib.suppress(InfrastructureFault, DataFault):
            await self.client.send("GET", path, timeout_s=5.0)
            return True
        return False

    async def call(self, path: str, body: dict[str, Any], timeout_s: float = 0.0) -> dict[str, Any]:
        """Return the answer to POST ``path``. timeout_s: ``update_timeout_s`` if 0. Raises
        DataFault when ``generating`` refuses the request."""
        text = await self.send(path, body, timeout_s)
        try:
            answer = msgspec.json.decode(text) if text else {}
        except jsonl.MALFORMED as error:
            raise InfrastructureFault(
                f"{self.name}{path} answered no JSON ({error}): is it a server of {self.product}?"
            ) from None
        if isinstance(answer, dict) and answer.get("success") is False:
            reason = answer.get("message") or answer.get("error_message")
            raise InfrastructureFault(f"{self.name}: {path} failed: {reason}")
        return answer or {}

    async def send(self, path: str, body: dict[str, Any], timeout_s: float = 0.0) -> bytes:
        """Return the bytes of the answer, otherwise like ``call``."""
        try:
            return await self.client.send("POST", path, body, timeout_s=timeout_s or self.update_s)
        except DataFault as fault:  # a failed update is answered with status 400
            if path == self.generating:
                raise
            raise InfrastructureFault(str(fault)) from None

    def strange(self, error: Exception) -> InfrastructureFault:
        """Return the fault for an answer that cannot be read."""
        return InfrastructureFault(
            f"{self.name} answered what {self.generating} of {self.release} does not"
            f" ({type(error).__name__}: {error})"
        )

    def settings(self) -> dict[str, Any]:
        """Return the model's configuration, {} if it is not on this disk."""
        path = Path(self.model) / "config.json"
        settings = json.loads(path.read_text()) if path.is_file() else {}
        return settings | (settings.get("text_config") or {})

    async def abort(self, names: list[str]) -> None:
        """Stop requests. A request that has already ended is not an error."""
        with contextlib.suppress(InfrastructureFault):  # a server that is gone runs nothing
            await self.stop(names)

    async def workers(self) -> dict[str, str] | None:
        """Return a router's numbers of its servers by their URLs; None if this is a server."""
        return None

    async def check(self) -> None:  # noqa: B027
        """Refuse a server that cannot keep what ``Engine`` promises."""

    def check_whole(self) -> None:  # noqa: B027
        """Refuse whole weights where the server would not take all of them."""

    @abstractmethod
    async def free(self) -> None:
        """End what an earlier actor, which died in an update, may have left open."""

    @abstractmethod
    async def facts(self) -> Facts:
        """Return what the server, and the model's configuration if there is one, say about it."""

    @abstractmethod
    async def generate(
        self, bodies: list[dict[str, Any]], salt: str, adapter: str
    ) -> list[Sampled]:
        """Return the samples of requests. salt: separates cache entries. Raises DataFault."""

    @abstractmethod
    async def stop(self, names: list[str]) -> None:
        """Stop requests by their names, all if there are none."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop generating. Running requests wait, and compute their cache again afterwards."""

    @abstractmethod
    async def go_on(self) -> None:
        """Generate again."""

    @abstractmethod
    async def read(self, folder: str) -> None:
        """Take whole weights from a folder."""

    @abstractmethod
    async def rename(self, name: str) -> None:
        """Give the weights a name, which every answer then reports."""

    @abstractmethod
    async def checksum(self) -> tuple[str, frozenset[str]]:
        """Return the checksum of the weights without adapters, and the names of the tensors."""

    async def hold_memory(self, held: bool) -> None:
        """Release the memory of weights and cache while generation pauses, or take it again with
        the same weights. No server releases or takes it twice."""
        raise NotImplementedError

    async def load_adapter(self, name: str, folder: str) -> None:
        await self.send(self.adapters[0], {"lora_name": name, "lora_path": folder})

    async def unload_adapter(self, name: str) -> None:
        await self.send(self.adapters[1], {"lora_name": name})

    @staticmethod
    @abstractmethod
    def arguments(model: str, config: ActorsConfig, port: int, key: str) -> dict[str, Any]:
        """Return the arguments of a server that the actor starts, the user's own among them."""


class Servers:
    """The way "url": requests go to ``front``, a server or a router, and updates of weights to all
    ``servers``. elastic: ``front`` is a router, behind which servers come and go."""

    def __init__(self, kind: type[Http], url: str, model: str, config: ActorsConfig, key: str = ""):
        self.kind, self.model, self.actors = kind, model, config
        self.config: ServedConfig = getattr(config, kind.section)
        self.front, self.elastic = kind(url, model, config, key), False
        self.name, self.servers = self.front.name, [self.front]

    async def start(self) -> None:
        """Open the connections. Behind a router, wait for a server at most ``start_timeout_s``.
        Raises InfrastructureFault when nothing answers."""
        await self._connect(self.front)
        if (listed := await self.front.workers()) is None:
            return
        self.elastic, self.servers = True, list[Http]()
        end = time.monotonic() + self.config.start_timeout_s
        while True:
            for url in listed or {}:
                with contextlib.suppress(InfrastructureFault):
                    self.servers.append(await self.reached(url))
            if self.servers:
                return
            if time.monotonic() > end:
                raise InfrastructureFault(
                    f"no server behind {self.front.url} answered in {self._limit()}: add one (POST"
                    " /workers)"
                )
            await asyncio.sleep(_STEP_S)
            listed = await self.front.workers()

    async def reached(self, url: str) -> Http:
        """Return a further server behind the router. Raises InfrastructureFault."""
        server = self.kind(url, self.model, self.actors)
        try:
            await self._connect(server)
        except BaseException:
            await server.close()
            raise
        return server

    async def _connect(self, server: Http) -> None:
        await server.start()
        # an earlier actor, which died in an update, may have left it paused
        with contextlib.suppress(InfrastructureFault):
            await server.free()
        if not await server.answers("/health"):
            raise InfrastructureFault(
                f"{server.name} does not answer /health: is it running there?"
            )
        await server.check()

    def _limit(self) -> str:
        return f"actors.{self.kind.section}.start_timeout_s = {self.config.start_timeout_s:g} s"

    async def facts(self) -> Facts:
        """Return the facts of the first server, with the capacity of all servers together."""
        each = await asyncio.gather(*(server.facts() for server in self.servers))
        return msgspec.structs.replace(each[0], capacity=sum(facts.capacity for facts in each))

    async def died(self) -> str:
        """Return the reason when the URL or all servers behind it were silent three times."""
        silent = 0
        while silent < 3:
            await asyncio.sleep(10.0)
            alive = await asyncio.gather(*(s.answers(s.alive) for s in self.servers))
            answers = any(alive) and (not self.elastic or await self.front.answers("/health"))
            silent = 0 if answers else silent + 1
        what = ", or no server behind it" if self.elastic else f" {self.kind.alive}"
        return f"{self.name} no longer answers{what}"

    async def close(self) -> None:
        """Close the connections. Servers that this actor did not start go on."""
        for server in {self.front, *self.servers}:
            await server.close()


class Launched(Servers):
    """The way "server": a child process on a loopback port, whose output goes to our log.
    inherited: open files that it gets."""

    def __init__(
        self, kind: type[Http], model: str, config: ActorsConfig, inherited: Sequence[int] = ()
    ):
        given = getattr(config, kind.section).arguments
        if taken := sorted(set(given) & set(kind.own)):
            raise ValueError(
                f"actors.{kind.section}.arguments: {taken} are set by the actor: remove them"
            )
        port, self.key = free_port(), secrets.token_urlsafe(24)
        super().__init__(kind, f"http://127.0.0.1:{port}", model, config, self.key)
        self.arguments = kind.arguments(model, config, port, self.key)
        self._inherited = inherited
        self._process: asyncio.subprocess.Process | None = None
        self._log: deque[str] = deque(maxlen=_TAIL)
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the server and wait for it. Raises InfrastructureFault with the end of its log."""
        # the server's Python may be another one, for which our PYTHONPATH holds wrong packages
        kind, python = self.kind, self.config.python or sys.executable
        # its packages' programs (ninja, for kernels that SGLang compiles) lie beside it
        folder = Path(shutil.which(python) or python).absolute().parent
        path = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        own = {"PYTHONPATH": "", "PYTHONUNBUFFERED": "1", "PATH": path}
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                python, Path(__file__).with_name("server_process.py"), kind.section,
                limit=_LONGEST_LINE, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, start_new_session=True, pass_fds=self._inherited,
                env=kind.defaults | os.environ | own | self.config.environment | kind.fixed,
            )  # fmt: skip
        except OSError as error:
            raise InfrastructureFault(
                f"actors.{kind.section}.python = {python!r} cannot be started: {error}"
            ) from None
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(self.arguments).encode())
        process.stdin.close()
        self._reading = asyncio.create_task(self._read(process.stdout))
        await self.front.start()
        end = time.monotonic() + self.config.start_timeout_s
        while not await self.front.answers("/health"):
            if process.returncode is not None:
                raise InfrastructureFault(
                    f"the {kind.product} server ended with status {process.returncode} while"
                    f" starting:\n{self._said()}"
                )
            if time.monotonic() > end:
                raise InfrastructureFault(
                    f"the {kind.product} server did not answer within {self._limit()}:\n"
                    f"{self._said()}"
                )
            await asyncio.sleep(_STEP_S)

    async def _read(self, output: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await output.readline()
            except ValueError:  # the line is longer than the limit; the rest of it is read next
                continue
            if not line:
                return
            # the server prints its arguments
            text = line.decode(errors="replace").rstrip().replace(self.key, "(key)")
            self._log.append(text)
            log.info("%s", text)

    def _said(self) -> str:
        return "\n".join(self._log) or "(it wrote nothing)"

    async def died(self) -> str:
        """Return the server's exit status and the end of its log, once the server has ended."""
        assert self._process is not None
        status = await self._process.wait()
        return f"the {self.kind.product} server ended with status {status}:\n{self._said()}"

    async def close(self) -> None:
        await super().close()
        if self._process is not None:
            # The signal goes to the server alone: it ends its children itself, but waits to
            # diagnose children that it finds dead.
            with contextlib.suppress(TimeoutError, ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
                await asyncio.wait_for(self._process.wait(), _GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                # its scheduler and detokenizer are in the same session
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        if self._reading is not None:
            self._reading.cancel()
