"""Settings of the actors."""

from typing import Any, Literal

import msgspec

from coppice.common.numbers import Count, Natural, Positive


class SGLangConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [actors.sglang], for engine = "sglang".

    way: with "server" each actor starts and ends its own SGLang server; with "inside" the engine
    runs in the actor's process; with "url" the actors use servers that already run. urls: those
    servers or routers, one per actor; a router says itself which servers are behind it. python: the
    interpreter that has sglang ("" is this one). arguments: arguments of sglang.launch_server or
    sglang.Engine by their Python names ({tp_size = 2}). environment: variables of that process.
    gpus: the number of GPUs per actor (0: those that it finds). api_key_env: the variable that
    holds the servers' API key; a server that an actor starts gets a key of its own. weights: how a
    version is sent; "auto" decides by where the processes run. lora: whether an adapter is sent
    alone ("adapter") or the actor merges it into the base weights ("merged"). pause: during an
    update, "retract" recomputes the keys and values of running requests with the new weights, and
    "in_place" keeps them. start_timeout_s, update_timeout_s, request_timeout_s: limits, in seconds,
    on the start, one step of an update, and one generation.
    """

    way: Literal["server", "inside", "url"] = "server"
    urls: list[str] = []
    python: str = ""
    arguments: dict[str, Any] = {}
    environment: dict[str, str] = {}
    gpus: Natural = 0
    api_key_env: str = ""
    weights: Literal["auto", "disk", "tensor", "distributed"] = "auto"
    lora: Literal["adapter", "merged"] = "adapter"
    pause: Literal["retract", "in_place"] = "retract"
    start_timeout_s: Positive = 900.0
    update_timeout_s: Positive = 300.0
    request_timeout_s: Positive = 1800.0


class ActorsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [actors].

    engine: "local" is the embedded engine, "sglang" the engine for GPUs, and "module:Class" your
    own engine. engine_options: its options. count: the number of actor processes. max_batch:
    samples that one actor decodes together. capacity: requests that an actor accepts at once.
    kv_cache_gib: all keys and values of the embedded engine, of running samples and of the prefix
    cache. max_context: most tokens of a prompt and its continuation. prefill_tokens: prompt tokens
    computed in one step. threads: compute threads of one actor. dtype: "auto" is model.dtype, or
    what the machine is faster in (bfloat16 or float32).
    """

    engine: str = "local"
    engine_options: dict[str, Any] = {}
    count: Count = 4
    max_batch: Count = 24
    capacity: Count = 16
    kv_cache_gib: Positive = 1.0
    max_context: Count = 1024
    prefill_tokens: Count = 512
    threads: Count = 1
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    sglang: SGLangConfig = SGLangConfig()


class ActorProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of an actor process. model: a Hugging Face folder (policy version 0). place: the
    number of the actor in the run, from 0. deterministic: answers depend on weights and requests
    alone (docs/reliability.md). weights_url: where versions are copied for an actor that does not
    see the run folder (common/storage.py)."""

    name: str
    run: str
    seed: int
    model: str
    actors: ActorsConfig
    place: int = 0
    deterministic: bool = False
    weights_url: str = ""
