"""Settings of the actors."""

from typing import Literal

import msgspec


class ActorsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [actors].

    engine: "local" is the embedded engine. count: actor processes. max_batch: samples decoding together in one actor.
    capacity: requests in flight an actor accepts. kv_cache_gib: budget of the prefix cache, beside the slots of running
    samples. max_context: longest prompt + continuation in tokens. prefill_tokens: prompt tokens admitted in one step.
    threads: compute threads of one actor. dtype: "auto" is bfloat16 where the processor computes in it, else float32.
    """

    engine: Literal["local"] = "local"
    count: int = 4
    max_batch: int = 24
    capacity: int = 16
    kv_cache_gib: float = 0.5
    max_context: int = 1024
    prefill_tokens: int = 512
    threads: int = 1
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


class ActorProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An actor process file. model: a Hugging Face folder (policy version 0)."""

    name: str
    run: str
    seed: int
    model: str
    actors: ActorsConfig
