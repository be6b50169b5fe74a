"""Settings of the actors."""

from typing import Any, Literal

import msgspec

from wire.numbers import Count, Natural, Positive


class SGLangConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [actors.sglang], for engine = "sglang".

    way: "server" starts one SGLang server an actor and ends with it; "inside" runs the engine in the actor's process; "url" uses
    servers that run already. urls: of them, one an actor. workers: of a router, the servers behind it, which take the weights.
    python: the interpreter that has sglang ("" is ours). arguments: of sglang.launch_server, or of sglang.Engine, by their Python names
    ({tp_size = 2}). environment: variables of that process. gpus: how many each actor takes (0: as it finds them). api_key_env: the variable
    that holds the servers' API key; a server that the actor starts gets a key of its own.
    weights: how a version travels, "auto" by where the processes are. lora: adapters alone ("adapter"), or merged into the base weights
    by the actor ("merged"). pause: what becomes of running requests meanwhile: "retract" computes their keys and values anew with the
    new weights, "in_place" keeps them. Timeouts in seconds: of the start, of one step of an update, of one generation.
    """

    way: Literal["server", "inside", "url"] = "server"
    urls: list[str] = []
    workers: list[str] = []
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

    engine: "local" is the embedded engine, "sglang" the one for GPUs, "module:Class" one of your own with its engine_options. count: actor processes. max_batch: samples decoding together in one
    actor. capacity: requests in flight an actor accepts. kv_cache_gib: keys and values of the embedded engine in all, running samples
    and prefix cache. max_context: longest prompt + continuation in tokens. prefill_tokens: prompt tokens computed in one step.
    threads: compute threads of one actor. dtype: "auto" is bfloat16 where the machine is faster in it, else float32.
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
    """An actor process file. model: a Hugging Face folder (policy version 0). place: which actor of the run, from 0."""

    name: str
    run: str
    seed: int
    model: str
    actors: ActorsConfig
    place: int = 0
