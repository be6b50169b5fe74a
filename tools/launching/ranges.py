"""Which numbers a config takes: every one is finite, and those with a range are in it."""

import math
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_RANGES: list[tuple[str, Callable[[float], bool], dict[str, str]]] = [
    (
        "more than 0",
        lambda value: value > 0,
        {
            "": "threads",
            "warm_start": "rows lr",
            "scheduler": "k budget eta continuations updates questions_per_update max_action_tokens generate_deadline_s"
            " judge_deadline_s startup_timeout_s watchdog_s",
            "scheduler.dispatch": "heartbeat_s dead_after_s max_attempts",
            "actors": "count max_batch capacity kv_cache_gib max_context prefill_tokens threads",
            "actors.sglang": "start_timeout_s update_timeout_s request_timeout_s",
            "judges.model": "threads max_context max_batch kv_cache_gib wait_s",
            "retriever": "threads",
            "learner": "count epochs minibatches lr grad_clip micro_tokens checkpoint_every keep threads collective_timeout_s",
            "learner.lora": "alpha",
            "learner.critic": "lr value_clip loss_factor grad_clip lora.alpha",
            "learner.prm": "beta lr grad_clip lora.alpha",
        },
    ),
    (
        "0 or more",
        lambda value: value >= 0,
        {
            "": "seed",
            "warm_start": "steps warmup",
            "scheduler": "top_k",
            "scheduler.evaluation": "questions every temperature",
            "scheduler.placement": "batch",
            "actors.sglang": "gpus",
            "learner": "constant_tokens kl_coef warmup_updates decay_updates weight_decay",
            "learner.lora": "rank",
            "learner.critic": "warmup_updates lora.rank",
            "learner.prm": "warmup_updates lora.rank",
            "learner.watch": "engine_gap engine_gap_bfloat16 sample_share clip_share mask_share entropy kl grad_norm turns",
        },
    ),
    ("0 (synchronous) or more", lambda value: value >= 0, {"scheduler": "max_staleness"}),
    ("more than 0, since training samples", lambda value: value > 0, {"scheduler": "temperature"}),
    ("more than 0, at most 1", lambda value: 0 < value <= 1, {"scheduler": "top_p"}),
    ("0 to 1", lambda value: 0 <= value <= 1, {"warm_start": "two_hop"}),
    ("0 or more, less than 1", lambda value: 0 <= value < 1, {"learner": "betas[0] betas[1]"}),
]
"""What is expected of numbers, whether one is it, and their keys by section."""

_LIMITS = {
    f"{section}.{key}".removeprefix("."): (expected, holds)
    for expected, holds, sections in _RANGES
    for section, keys in sections.items()
    for key in keys.split()
}


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """(path, value) of every number under ``path``, those among the options of plug-ins included."""
    if isinstance(value, dict):
        for key, inner in typing.cast(dict[str, Any], value).items():
            yield from _numbers(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(typing.cast(Sequence[Any], value)):
            yield from _numbers(inner, f"{path}[{place}]")
    elif isinstance(value, int | float):
        yield path, value


def fault(config: dict[str, Any]) -> str:
    """The first number of a config, as plain dictionaries, that is none or out of range, with what was expected; "" without one.

    JSON, in which processes get their numbers, has no NaN and no infinity.
    """
    for key, value in _numbers(config, ""):
        if not math.isfinite(value):
            return f"{key} = {value}: expected a finite number"
        expected, holds = _LIMITS.get(key, ("", math.isfinite))
        if not holds(value):
            return f"{key} = {value}: expected {expected}"
    return ""
