"""Settings of the actors."""

from typing import Any, Literal

import msgspec

from coppice.common.numbers import Count, Natural, Positive


class ServedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [actors.vllm], for engine = "vllm"."""

    way: Literal["server", "url"] = "server"
    """Each actor starts and ends its own server ("server"), or uses servers that already run
    ("url")."""
    urls: list[str] = []
    """Running servers or routers, one per actor. A router itself says which servers it has."""
    python: str = ""
    """The interpreter that has the engine's package; "" is this one."""
    arguments: dict[str, Any] = {}
    """Arguments of sglang.launch_server or vllm serve by their Python names ({tp_size = 2})."""
    environment: dict[str, str] = {}
    """Environment variables of the server's process."""
    gpus: Natural = 0
    """The number of GPUs per actor; 0 for those that it finds."""
    api_key_env: str = ""
    """The environment variable with the API key of running servers."""
    start_timeout_s: Positive = 900.0
    """Limit of the server's start, in seconds."""
    update_timeout_s: Positive = 300.0
    """Limit of one step of an update, in seconds."""
    request_timeout_s: Positive = 1800.0
    """Limit of one generation, in seconds."""


class SGLangConfig(ServedConfig, frozen=True, forbid_unknown_fields=True):
    """Section [actors.sglang], for engine = "sglang"."""

    weights: Literal["auto", "disk", "distributed"] = "auto"
    """How whole weights are sent: as a file, by broadcasts between GPUs, or what is published."""
    colocated: bool = False
    """Share the learner's GPUs: servers release their memory while it trains (docs/gpu.md)."""


class ActorsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [actors]."""

    engine: str = "local"
    """The embedded engine ("local"), servers ("sglang", "vllm"), or your own ("module:Class")."""
    engine_options: dict[str, Any] = {}
    """Options of your own engine."""
    count: Count = 4
    """The number of actor processes."""
    max_batch: Count = 24
    """Samples that one actor decodes together."""
    capacity: Count = 16
    """Requests that one actor accepts at once."""
    kv_cache_gib: Positive = 1.0
    """Keys and values of the embedded engine in GiB, of running samples and of the prefix cache."""
    max_context: Count = 1024
    """The most tokens of a prompt and its continuation."""
    prefill_tokens: Count = 512
    """Prompt tokens computed in one step."""
    threads: Count = 1
    """Compute threads of one actor."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """"auto" is model.dtype, or what the machine is faster in."""
    sglang: SGLangConfig = SGLangConfig()
    """See [actors.sglang]."""
    vllm: ServedConfig = ServedConfig()
    """See [actors.vllm]."""

    @property
    def served(self) -> ServedConfig | None:
        """The section of the engine's servers; None if the engine asks none."""
        return {"sglang": self.sglang, "vllm": self.vllm}.get(self.engine)

    @property
    def colocated(self) -> bool:
        """Whether engines and learner take turns on the same GPUs."""
        return self.engine == "sglang" and self.sglang.colocated

    @property
    def own_gpus(self) -> int:
        """The GPUs of each server that an actor starts."""
        return self.served.gpus if self.served and self.served.way == "server" else 0


class ActorProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of an actor process."""

    name: str
    run: str
    seed: int
    model: str
    """A Hugging Face folder: policy version 0."""
    actors: ActorsConfig
    place: int = 0
    """The number of the actor in the run, from 0."""
    spare: bool = False
    """Actors before it have the cores of its machine: it takes what they have no room for."""
    deterministic: bool = False
    """Answers depend on weights and requests alone (docs/reliability.md)."""
    turns: str = ""
    """The folder of ``common.turns``; "" if the GPUs are not shared."""
