"""The number type in which a run computes, and the main memory that it will need, told from its
config and the policy's folder."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from coppice.common import hardware
from coppice.learner.config import LearnerConfig
from coppice.learner.update.plan import plan_of
from coppice.tools.launching.settings import Config, with_more


def typed(config: Config) -> Config:
    """Return the config with model.dtype written to the rooms that name no number type, and to the
    arguments of servers that actors start."""
    dtype, a, w = config.model.dtype, config.actors, config.learner
    w = replace(w, dtype=dtype if w.dtype == "auto" else w.dtype)
    if a.served is None:
        a = replace(a, dtype=dtype if a.dtype == "auto" else a.dtype)
    elif a.served.way != "url" and dtype != "auto":
        a = with_more(a, {"dtype": dtype})
    return replace(config, actors=a, learner=w)


def number_type(config: Config, model: Path | None = None) -> str:
    """Describe the number type in which the run computes, the reason for it, and the setting that
    changes it. model: the policy's folder."""
    config = typed(config)
    learner, why = hardware.dtype_and_reason(config.learner.dtype)
    actors, reason = _actors_type(config, model)
    if not actors:
        return (
            f"number type of the learner: {learner} ({why}; model.dtype);"
            " that of the actors' servers is their own and must be the same"
        )
    if actors != learner:
        return (
            f"warning: the learner computes in {learner} ({why}) and the actors in {actors}"
            f" ({reason}): log-probabilities of the same tokens differ by rounding, which the"
            " correction cannot tell from staleness; set model.dtype, and neither learner.dtype,"
            " actors.dtype nor the dtype of the servers' arguments"
        )
    chosen = learner == "bfloat16" and config.learner.dtype == "auto"
    change = "; --set model.dtype=float32 changes it" if chosen else ""
    return f"number type {learner} ({why}{change})"


def _actors_type(config: Config, model: Path | None) -> tuple[str, str]:
    a = config.actors
    if a.served is None:
        return hardware.dtype_and_reason(a.dtype)
    argument = str(a.served.arguments.get("dtype", "auto"))
    if argument != "auto":
        names = {"half": "float16", "float": "float32"}
        return names.get(argument, argument), f"actors.{a.engine}.arguments.dtype"
    if a.engine != "sglang" or a.sglang.way == "url" or model is None:
        return "", ""
    stored = model_shape(model).get("dtype", "")
    chosen = "bfloat16" if stored == "bfloat16" else "float16"
    return (chosen, f"SGLang's choice for weights stored in {stored}") if stored else ("", "")


def model_shape(model: Path) -> dict[str, Any]:
    """Return the settings of a model's folder, with the number type of its weights as "dtype"; {}
    if it is not on this disk yet."""
    settings = model / "config.json"
    shape = msgspec.json.decode(settings.read_bytes()) if settings.is_file() else {}
    return {"dtype": shape["torch_dtype"]} | shape if "torch_dtype" in shape else shape


_PROCESS_GIB, _REST_GIB = 0.4, 0.6
"""GiB that a process with torch takes beside weights, caches and activations (libraries, buffers,
memory that the allocator keeps), and GiB that the retriever, launcher, scheduler and judges take
together. See docs/performance.md."""
_SAVED = 9, 4
"""Numbers kept for the backward pass per token and layer, as multiples of the hidden width and of
the intermediate width."""


def memory_gib(config: Config, model: Path) -> float:
    """Estimate the most main memory that all processes hold together, in GiB. The weights of a
    model not yet on disk count as 0."""
    return sum(count * each for count, each in memory_parts(config, *_sizes(model)).values())


def _sizes(model: Path) -> tuple[dict[str, Any], float]:
    shape = model_shape(model)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return shape, size / (4 if shape.get("dtype") == "float32" else 2)


def memory_parts(
    config: Config, shape: dict[str, Any], weights: float
) -> dict[str, tuple[int, float]]:
    """Estimate the main memory of each kind of process, as (how many, GiB of each). shape: a
    model's config.json; weights: their number."""
    config = typed(config)
    a, w, served = config.actors, config.learner, config.judges.model
    sizes = {"float32": 4}
    acting, learning = (sizes.get(hardware.compute_dtype(d), 2) for d in (a.dtype, w.dtype))
    frozen, own = rank_gib(w, shape, weights, learning)
    parts = {"actor": (a.count, weights * acting / 2**30 + a.kv_cache_gib + _PROCESS_GIB)}
    parts["learner rank"] = w.here, own + _PROCESS_GIB
    if frozen and w.here:  # the ranks of one machine share them
        parts["frozen weights"] = 1, frozen
    parts |= {"judges' model": (1, served.kv_cache_gib + 1.1)} if served else {}
    return parts | {"all others": (config.scheduler.shards, _REST_GIB)}


def rank_gib(
    w: LearnerConfig, shape: dict[str, Any], weights: float, size: int
) -> tuple[float, float]:
    """Estimate what a learner rank holds of its models, in GiB: its frozen weights, and the rest.
    size: bytes of a number in which it computes.

    A trained weight takes 16 bytes (with its gradient and moments), and adapters with theirs take a
    fifth of the frozen weights at most. The frozen copy of the initial policy, which a policy whose
    weights all train may need, is in float32.
    """
    models, sizes = plan_of(w).models.values(), ("hidden_size", "intermediate_size")
    hidden, inner = (shape.get(name, 0) for name in sizes)
    layers, layer = shape.get("num_hidden_layers", 0), _SAVED[0] * hidden + _SAVED[1] * inner
    kept = layer + layers * hidden if w.gradient_checkpointing else layers * layer
    saved = w.micro_tokens * kept * (4 if size == 4 else 3)
    frozen = weights * size * sum(model.lora.rank > 0 for model in models)
    trained = weights * sum((0.8 if model.lora.rank else 16) + 4 * model.copy for model in models)
    return frozen / w.shards / 2**30, (trained / w.shards + saved) / 2**30


def free_gib() -> float:
    """Return the GiB that a run may take on this machine."""
    return hardware.free_memory() / 2**30


def memory_warning(config: Config, model: Path) -> str:
    """Return a warning that names what each process takes, if a run on CPUs needs more memory than
    is free; "" otherwise."""
    need, free = memory_gib(config, model), free_gib()
    if need <= free or hardware.visible_gpus() or config.cluster.on:
        return ""
    shape, weights = _sizes(model)
    parts = memory_parts(config, shape, weights).items()
    each = ", ".join(f"{count} {name} of {gib:.1f}" for name, (count, gib) in parts if count)
    return (
        f"warning: this plan needs about {need:.1f} GiB of memory and {free:.1f} are free, so that"
        f" the system may kill it ({each}): take fewer --actors or --learner, or a smaller"
        " actors.kv_cache_gib, learner.micro_tokens or model"
    )
