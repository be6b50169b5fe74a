"""The calls of an SGLang server, and the parts that the three ways to reach SGLang share: protocol,
facts and arguments."""

import json
import re
from pathlib import Path
from typing import Any, Protocol

import msgspec

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.weights import BaseWeights
from coppice.common import jsonl
from coppice.common.http import JsonClient
from coppice.wire.faults import DataFault, InfrastructureFault

NO_DUMPS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
"""Environment variables, unless the user sets them. Without them, after a child has died SGLang
spends 65 s on dumps before it ends."""

FIXED = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
"""Environment variables, whatever the user sets. If this one were 1, log-probabilities would be
those before temperature."""

_AT_RANK = re.compile(r"@\d+$")
"""A router that knows the data-parallel ranks of a server lists each as URL@RANK."""


class Facts(msgspec.Struct, frozen=True):
    """What SGLang reports about itself. capacity, context: tokens. vocabulary: rows of the
    embedding, 0 when unknown.

    version: the name of its weights that it was last told; "" or "default" when nobody told it.
    mask: SGLang can list the tokens that top-p and top-k leave only if they are at most this many.
    """

    capacity: int = 0
    context: int = 0
    vocabulary: int = 0
    device: str = ""
    dtype: str = ""
    tp: int = 1
    version: str = ""
    mask: int = 4096

    @property
    def updated(self) -> bool:
        """Whether somebody has changed SGLang's weights since it started."""
        # an actor names weights VERSION@MARK
        return self.version.partition("@")[0] not in ("", "default", "0")


class Api(Protocol):
    """One server that holds weights."""

    name: str

    async def call(
        self, path: str, body: dict[str, Any], timeout_s: float, attempts: int = 1
    ) -> dict[str, Any]:
        """Return the answer to POST ``path``. Raises InfrastructureFault when the call fails or
        takes longer than ``timeout_s``."""
        ...


class Way(Protocol):
    """How one engine reaches SGLang. servers: all servers that take part in an update. elastic:
    they come and go behind a router."""

    name: str
    elastic: bool

    @property
    def servers(self) -> "list[Any]":
        """The servers, each an ``Api``."""
        ...

    async def start(self) -> None: ...

    async def facts(self) -> Facts: ...

    async def generate(self, body: dict[str, Any]) -> Any: ...

    async def abort(self, names: list[str]) -> None: ...

    async def died(self) -> str: ...

    async def close(self) -> None: ...


class Http:
    """One server, reached by its URL."""

    def __init__(self, url: str, key: str, timeout_s: float, concurrency: int):
        self.url, self.name = url.rstrip("/"), f"SGLang at {url.rstrip('/')}"
        self._client = JsonClient(
            self.url, key=key, timeout_s=timeout_s, attempts=1, concurrency=max(64, 4 * concurrency)
        )

    async def start(self) -> None:
        """Open the connection pool."""
        await self._client.start()

    async def close(self) -> None:
        """Close the connection pool."""
        await self._client.close()

    async def healthy(self) -> bool:
        """Return whether the server answers /health. It does not while it starts or while its
        generation pauses."""
        return await self._answers("/health")

    async def alive(self) -> bool:
        """Return whether the server's process answers, even while generation pauses."""
        return await self._answers("/model_info")

    async def _answers(self, path: str) -> bool:
        try:
            await self._client.send("GET", path, timeout_s=5.0, attempts=1)
        except (InfrastructureFault, DataFault):
            return False
        return True

    async def workers(self) -> dict[str, str] | None:
        """Return the servers behind a router: its numbers for them by their URLs. None if this is a
        server itself."""
        try:
            answer = await self._client.get("/workers", timeout_s=10.0, attempts=1)
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
                f"{self.url}/workers answered what the router of sglang-router 0.3.2 does not ({type(error).__name__}: {error})"
            ) from None

    async def named(self) -> str:
        """Return the name of the weights that the server holds."""
        info = await self._client.get("/model_info", timeout_s=10.0, attempts=1)
        return str(info.get("weight_version") or "")

    async def remove(self, worker: str) -> None:
        """Tell the router to send nothing more to the server of this number."""
        await self._client.send("DELETE", f"/workers/{worker}", timeout_s=10.0, attempts=1)

    async def facts(self, model: str = "") -> Facts:
        """Return what the server reports. The vocabulary is read from the folder ``model``, because
        an update changes the model's name."""
        info = await self._client.get("/server_info", timeout_s=30.0, attempts=3)
        # has what updates have changed since
        info |= await self._client.get("/model_info", timeout_s=30.0, attempts=3)
        return read_facts(model, info)

    async def call(
        self, path: str, body: dict[str, Any], timeout_s: float, attempts: int = 1
    ) -> dict[str, Any]:
        """Return the answer to POST ``path``. SGLang answers a failed update with 400, which here
        is not a DataFault."""
        try:
            text = await self._client.send(
                "POST", path, body, timeout_s=timeout_s, attempts=attempts
            )
            answer = msgspec.json.decode(text) if text else {}
        except jsonl.MALFORMED as error:
            raise InfrastructureFault(
                f"{self.name}{path} answered no JSON ({error}): is it an SGLang server?"
            ) from None
        except DataFault as fault:
            if path == "/generate":
                raise
            raise InfrastructureFault(str(fault)) from None
        if isinstance(answer, dict) and answer.get("success") is False:
            raise InfrastructureFault(
                f"{self.name}: {path} failed: {answer.get('message') or answer.get('error_message')}"
            )
        return answer or {}

    async def send(self, path: str) -> None:
        """POST without a body to a path whose answer is not JSON (/flush_cache)."""
        await self._client.send("POST", path, attempts=1)

    async def abort(self, names: list[str]) -> None:
        """Stop requests. A request that has already ended is not an error."""
        for name in names:
            try:
                await self.call("/abort_request", {"rid": name}, 10.0)
            except InfrastructureFault:
                return  # a server that is gone runs nothing


def arguments(model: str, config: ActorsConfig) -> dict[str, Any]:
    """Return the fields of sglang's ServerArgs that follow from the actor's settings, and the
    user's own arguments, which take precedence."""
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
        **adapters,
    } | own


def linear_layers(model: Path) -> list[str]:
    """Names of the layers that the learner's adapters change: all linear ones but the head, as
    PEFT's "all-linear" has them."""
    shapes = BaseWeights(model).shapes()
    linear = (
        name for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")
    )
    names = [name.split(".") for name in linear if not name.startswith("visual.")]
    return sorted({parts[-2] for parts in names} - {"embed_tokens", "lm_head"})


def read_facts(model: str, info: dict[str, Any]) -> Facts:
    """Return the facts in SGLang's description of itself and, if the folder ``model`` exists, in
    the model's configuration."""
    settings: dict[str, Any] = {}
    path = Path(model) / "config.json"
    if path.is_file():
        settings = json.loads(path.read_text())
        settings |= settings.get("text_config") or {}
    context = info.get("context_length") or settings.get("max_position_embeddings") or 0
    return Facts(
        int(info.get("max_total_num_tokens") or 0),
        int(context),
        int(settings.get("vocab_size") or 0),
        str(info.get("device") or ""),
        str(info.get("dtype") or ""),
        int(info.get("tp_size") or 1),
        str(info.get("weight_version") or ""),
        int(info.get("sampling_mask_max_tokens") or 4096),
    )
