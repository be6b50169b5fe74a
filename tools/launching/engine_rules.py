"""The rules of the actors' engine: the settings of [actors] and [actors.sglang] fit the engine, the
way to reach it, and the learner's weights."""

from collections.abc import Iterator

import msgspec

from coppice.actors.config import ActorsConfig, SGLangConfig
from coppice.actors.engines import registry
from coppice.learner.config import LearnerConfig
from coppice.tools.launching.settings import Config

_ADAPTERS_AT_ONCE = {"max_loras_per_batch": 2, "max_loaded_loras": 3}
"""Running requests keep the adapter with which they began, new requests use the newest one, and a
third may be loading."""


def faults(config: Config) -> Iterator[str]:
    """Yield the settings that the chosen engine, or the chosen way to reach it, would silently
    ignore."""
    a, publish, default = config.actors, config.learner.publish, ActorsConfig()
    g = a.sglang
    registry.check(a.engine, a.engine_options)
    if a.engine != "sglang":
        if g != default.sglang:
            yield f"[actors.sglang] has no effect with actors.engine = {a.engine!r}: set it to 'sglang'"
        if publish == "memory" and a.engine == "local":
            yield "learner.publish = 'memory': the embedded engine reads files; expected 'file' (or 'both')"
        return
    for key in ("kv_cache_gib", "dtype"):
        if getattr(a, key) != getattr(default, key):
            yield (
                f"actors.{key} has no effect with actors.engine = 'sglang': SGLang's own settings are in [actors.sglang.arguments]"
                " (mem_fraction_static, dtype)"
            )
    if (g.way == "url") != bool(g.urls):
        yield f"actors.sglang.way = {g.way!r} with actors.sglang.urls = {g.urls}: expected URLs with 'url', and only then"
    if g.urls and a.count > len(g.urls):
        yield (
            f"actors.count = {a.count} and {len(g.urls)} actors.sglang.urls: expected one URL per actor, since each actor pauses and updates"
            " its own server"
        )
    if len(set(g.urls)) < len(g.urls):
        yield (
            f"actors.sglang.urls = {g.urls}: expected each URL once, since several actors would pause and update the same servers; a router"
            " spreads the requests of one actor"
        )
    for key in {"url": ("python", "arguments", "environment", "gpus")}.get(g.way, ("api_key_env",)):
        if getattr(g, key):
            yield f"actors.sglang.{key} has no effect with actors.sglang.way = {g.way!r}: remove it"
    if (name := "SGLANG_RETURN_ORIGINAL_LOGPROB") in g.environment:
        yield f"actors.sglang.environment.{name} has no effect: log-probabilities are always those after temperature; remove it"
    if g.weights in ("tensor", "distributed") and (publish == "file" or config.learner.lora.rank):
        yield (
            f"actors.sglang.weights = {g.weights!r} needs learner.publish = 'memory' or 'both', and learner.lora.rank = 0 (adapters travel"
            " as files)"
        )
    if config.learner.lora.rank and g.lora == "adapter":
        yield from _adapters(g, config.learner)


def _adapters(g: SGLangConfig, w: LearnerConfig) -> Iterator[str]:
    """Yield the arguments under which SGLang would refuse the learner's adapters at the first
    update, or ignore a part of them."""
    adapters = f"learner.lora.rank = {w.lora.rank}"
    if w.train_vision:
        yield "learner.train_vision with actors.sglang.lora = 'adapter': SGLang applies adapters to the language layers only; expected 'merged'"
    if g.arguments.get("enable_lora") is False:
        yield f"actors.sglang.arguments.enable_lora = False with {adapters}: remove it, or set actors.sglang.lora = 'merged'"
    for key, value in {"max_lora_rank": w.lora.rank, **_ADAPTERS_AT_ONCE}.items():
        limit = g.arguments.get(key)
        if isinstance(limit, int) and limit < value:
            yield f"actors.sglang.arguments.{key} = {limit}: expected {value} or more for the adapters of {adapters}: raise or remove it"


def with_adapters(config: Config) -> Config:
    """Add the arguments that a server which actors start needs for adapters. Their target layers
    follow from the model's files."""
    g, rank = config.actors.sglang, config.learner.lora.rank
    if config.actors.engine != "sglang" or g.way == "url" or g.lora != "adapter" or not rank:
        return config
    arguments = {"enable_lora": True, "max_lora_rank": rank} | g.arguments
    replace = msgspec.structs.replace
    sglang = replace(g, arguments=arguments)
    return replace(config, actors=replace(config.actors, sglang=sglang))
