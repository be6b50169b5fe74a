"""Settings of the actors."""

from typing import Any, Literal

import msgspec

from coppice.common.numbers import Count, Natural, Positive


class SGLangConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [actors.sglang], for engine = "sglang"."""

    way: Literal["server", "url"] = "server"
    """Each actor starts and ends its own SGLang server ("server"), or uses servers that already run
    ("url")."""
    urls: list[str] = []
    """Running servers or routers, one per actor. A router itself says which servers it has."""
    python: str = ""
    """The interpreter that has sglang; "" is this one."""
    arguments: dict[str, Any] = {}
    """Arguments of sglang.launch_server by their Python names ({tp_size = 2})."""
    environment: dict[str, str] = {}
    """Environment variables of the server's process."""
    gpus: Natural = 0
    """The number of GPUs per actor; 0 for those that it finds."""
    api_key_env: str = ""
    """The environment variable with the API key of running servers."""
    weights: Literal["auto", "disk", "distributed"] = "auto"
    """How whole weights are sent: as a file, by broadcasts between GPUs, or what is published."""
    start_timeout_s: Positive = 900.0
    """Limit of SGLang's start, in seconds."""
    update_timeout_s: Positive = 300.0
    """Limit of one step of an update, in seconds."""
    request_timeout_s: Positive = 1800.0
    """Limit of one generation, in seconds."""


class ActorsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [actors]."""

    engine: str = "local"
    """"local" is the embedded engine, "sglang" the engine for GPUs, "module:Class" your own."""
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
    deterministic: bool = False
    """Answers depend on weights and requests alone (docs/reliability.md)."""
