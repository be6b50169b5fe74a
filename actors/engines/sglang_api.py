"""SGLang over HTTP: the calls of one server, a server that the actor starts as its child, and
servers or a router that already run."""

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.weights import BaseWeights
from coppice.common import jsonl
from coppice.common.http import JsonClient
from coppice.common.process import free_port
from coppice.wire.faults import DataFault, InfrastructureFault

log = logging.getLogger("actors.sglang.server")

_NO_DUMPS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
"""Environment variables, unless the user sets them. Without them, after a child has died SGLang
spends 65 s on dumps before it ends."""
_FIXED = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
"""Environment variables, whatever the user sets. If this one were 1, log-probabilities would be
those before temperature."""
_STEP_S = 0.5
"""Seconds between two looks for a server that starts."""
_GRACE_S = 7.0
"""Seconds that a server gets to end: fewer than the launcher gives an actor to end."""
_LONGEST_LINE = 2**20
_TAIL = 40
"""Lines of the server's log that are kept for error messages."""
_OWN = ("model_path", "host", "port", "api_key", "weight_version")
"""Arguments that an actor sets itself and a user must not set."""
_AT_RANK = re.compile(r"@\d+$")
"""A router that knows the data-parallel ranks of a server lists each as URL@RANK."""


class Facts(msgspec.Struct, frozen=True):
    """What SGLang reports about itself. capacity, context: tokens. vocabulary: rows of the
    embedding, 0 when unknown. version: the name of its weights, "" or "default" when they have
    none. mask: the most tokens that SGLang can list as left by top-p and top-k."""

    capacity: int = 0
    context: int = 0
    vocabulary: int = 0
    device: str = ""
    tp: int = 1
    version: str = ""
    mask: int = 4096

    @property
    def updated(self) -> bool:
        """Whether somebody has changed SGLang's weights since it started."""
        # an actor names weights VERSION@MARK
        return self.version.partition("@")[0] not in ("", "default", "0")


class Http:
    """One server, reached by its URL. key: of the server; by default api_key_env's."""

    def __init__(self, url: str, model: str, config: ActorsConfig, key: str = ""):
        self.url, self.model = url.rstrip("/"), model
        self.name, self.timeout_s = f"SGLang at {self.url}", config.sglang.request_timeout_s
        self.client = JsonClient(
            self.url, key=key, api_key_env="" if key else config.sglang.api_key_env,
            timeout_s=self.timeout_s, attempts=1, concurrency=max(64, 4 * config.capacity),
        )  # fmt: skip
        self.start, self.close = self.client.start, self.client.close

    async def answers(self, path: str) -> bool:
        """Return whether the server answers GET ``path``. "/health" fails while it starts or its
        generation pauses; "/model_info" tells whether the process lives."""
        try:
            await self.client.send("GET", path, timeout_s=5.0)
        except (InfrastructureFault, DataFault):
            return False
        return True

    async def workers(self) -> dict[str, str] | None:
        """Return a router's numbers of its servers by their URLs; None if this is a server."""
        try:
            answer = await self.client.get("/workers", timeout_s=10.0)
            return {
                _AT_RANK.sub("", worker["url"]).rstrip("/"): worker["id"]
                for worker in answer["workers"]
            }
        except InfrastructureFault as fault:
            if "HTTP 404" in str(fault):
                return None
            raise
        except (KeyError, TypeError) as error:
            raise InfrastructureFault(
                f"{self.url}/workers answered what the router of sglang-router 0.3.2 does not"
                f" ({type(error).__name__}: {error})"
            ) from None

    async def facts(self) -> Facts:
        """Return what the server, and the model's configuration if there is one, say about it."""
        info = await self.client.get("/server_info", timeout_s=30.0)
        # /model_info has what updates have changed since the start
        info |= await self.client.get("/model_info", timeout_s=30.0)
        path, settings = Path(self.model) / "config.json", dict[str, Any]()
        if path.is_file():
            settings = json.loads(path.read_text())
            settings |= settings.get("text_config") or {}
        return Facts(
            capacity=int(info.get("max_total_num_tokens") or 0),
            context=int(info.get("context_length") or settings.get("max_position_embeddings") or 0),
            vocabulary=int(settings.get("vocab_size") or 0),
            device=str(info.get("device") or ""),
            tp=int(info.get("tp_size") or 1),
            version=str(info.get("weight_version") or ""),
            mask=int(info.get("sampling_mask_max_tokens") or 4096),
        )

    async def call(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the answer to POST ``path``. Raises InfrastructureFault when the call fails or
        takes longer than ``timeout_s``, and DataFault when /generate refuses the request."""
        try:
            text = await self.client.send("POST", path, body, timeout_s=timeout_s)
            answer = msgspec.json.decode(text) if text else {}
        except jsonl.MALFORMED as error:
            raise InfrastructureFault(
                f"{self.name}{path} answered no JSON ({error}): is it an SGLang server?"
            ) from None
        except DataFault as fault:  # SGLang answers a failed update with status 400
            if path == "/generate":
                raise
            raise InfrastructureFault(str(fault)) from None
        if isinstance(answer, dict) and answer.get("success") is False:
            reason = answer.get("message") or answer.get("error_message")
            raise InfrastructureFault(f"{self.name}: {path} failed: {reason}")
        return answer or {}

    async def abort(self, names: list[str]) -> None:
        """Stop requests. A request that has already ended is not an error."""
        with contextlib.suppress(InfrastructureFault):  # a server that is gone runs nothing
            for name in names:
                await self.call("/abort_request", {"rid": name}, 10.0)


class Servers:
    """The way "url": requests go to ``front``, a server or a router, and updates of weights to all
    ``servers``. elastic: ``front`` is a router, behind which servers come and go."""

    def __init__(self, url: str, model: str, config: ActorsConfig, key: str = ""):
        self.model, self.actors, self.config = model, config, config.sglang
        self.front, self.elastic = Http(url, model, config, key), False
        self.name, self.servers = self.front.name, [self.front]

    async def start(self) -> None:
        """Open the connections. Behind a router, wait for a server at most ``start_timeout_s``.
        Raises InfrastructureFault when nothing answers."""
        await self._connect(self.front)
        listed = await self.front.workers()
        if listed is None:
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
                    f"no server behind {self.front.url} answered in actors.sglang.start_timeout_s ="
                    f" {self.config.start_timeout_s:g} s: add one (POST /workers)"
                )
            await asyncio.sleep(_STEP_S)
            listed = await self.front.workers()

    async def reached(self, url: str) -> Http:
        """Return a further server behind the router. Raises InfrastructureFault."""
        server = Http(url, self.model, self.actors)
        try:
            await self._connect(server)
        except BaseException:
            await server.close()
            raise
        return server

    async def _connect(self, server: Http) -> None:
        await server.start()
        # an earlier actor, which died in an update, may have left these open
        for path in ("/end_weight_update", "/continue_generation"):
            with contextlib.suppress(InfrastructureFault):
                await server.call(path, {}, 10.0)
        if not await server.answers("/health"):
            raise InfrastructureFault(
                f"{server.name} does not answer /health: is it running there?"
            )

    async def facts(self) -> Facts:
        """Return the facts of the first server, with the capacity of all servers together."""
        each = await asyncio.gather(*(server.facts() for server in self.servers))
        return msgspec.structs.replace(each[0], capacity=sum(facts.capacity for facts in each))

    async def died(self) -> str:
        """Return the reason when the URL or all servers behind it were silent three times."""
        silent = 0
        while silent < 3:
            await asyncio.sleep(10.0)
            alive = await asyncio.gather(*(s.answers("/model_info") for s in self.servers))
            answers = any(alive) and (not self.elastic or await self.front.answers("/health"))
            silent = 0 if answers else silent + 1
        what = ", or no server behind it" if self.elastic else " /model_info"
        return f"{self.name} no longer answers{what}"

    async def close(self) -> None:
        """Close the connections. Servers that this actor did not start go on."""
        for server in {self.front, *self.servers}:
            await server.close()


class Launched(Servers):
    """The way "server": a child process on a loopback port, whose output goes to our log."""

    def __init__(self, model: str, config: ActorsConfig):
        if taken := sorted(set(config.sglang.arguments) & set(_OWN)):
            raise ValueError(f"actors.sglang.arguments: {taken} are set by the actor: remove them")
        port, self._key = free_port(), secrets.token_urlsafe(24)
        super().__init__(f"http://127.0.0.1:{port}", model, config, self._key)
        address = {"host": "127.0.0.1", "port": port, "api_key": self._key}
        self.arguments: dict[str, Any] = arguments(model, config) | address
        self._process: asyncio.subprocess.Process | None = None
        self._log: deque[str] = deque(maxlen=_TAIL)
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the server and wait for it. Raises InfrastructureFault with the end of its log."""
        # SGLang's Python may be another one, for which our PYTHONPATH holds wrong packages
        own = {"PYTHONPATH": "", "PYTHONUNBUFFERED": "1", "SGL_FORCE_SHUTDOWN": "1"}
        python = self.config.python or sys.executable
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                python, Path(__file__).with_name("sglang_process.py"), limit=_LONGEST_LINE,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, start_new_session=True,
                env=_NO_DUMPS | os.environ | own | self.config.environment | _FIXED,
            )  # fmt: skip
        except OSError as error:
            raise InfrastructureFault(
                f"actors.sglang.python = {python!r} cannot be started: {error}"
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
                    f"the SGLang server ended with status {process.returncode} while starting:\n"
                    f"{self._said()}"
                )
            if time.monotonic() > end:
                raise InfrastructureFault(
                    "the SGLang server did not answer within actors.sglang.start_timeout_s ="
                    f" {self.config.start_timeout_s:g} s:\n{self._said()}"
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
            text = line.decode(errors="replace").rstrip().replace(self._key, "(key)")
            self._log.append(text)
            log.info("%s", text)

    def _said(self) -> str:
        return "\n".join(self._log) or "(it wrote nothing)"

    async def died(self) -> str:
        """Return the server's exit status and the end of its log, once the server has ended."""
        assert self._process is not None
        status = await self._process.wait()
        return f"the SGLang server ended with status {status}:\n{self._said()}"

    async def close(self) -> None:
        """End the server and its children."""
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


def arguments(model: str, config: ActorsConfig) -> dict[str, Any]:
    """Return the fields of sglang's ServerArgs: the settings', then the user's own."""
    own = config.sglang.arguments
    derived = own.get("enable_lora") and "lora_target_modules" not in own
    adapters = {"lora_target_modules": linear_layers(Path(model))} if derived else {}
    return {
        "model_path": model,
        "weight_version": "0",
        "context_length": config.max_context,
        "max_running_requests": config.max_batch,
        "chunked_prefill_size": config.prefill_tokens,
        "enable_cache_report": True,
        "enable_fp32_lm_head": True,  # as the learner's
        **adapters,
    } | own


def linear_layers(model: Path) -> list[str]:
    """Names of the layers that PEFT's "all-linear" adapters change."""
    layers = {
        name.split(".")[-2]
        for name, shape in BaseWeights(model).shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and not name.startswith("visual.")
    }
    return sorted(layers - {"embed_tokens", "lm_head"})
