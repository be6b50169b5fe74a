"""The main memory that a run will need, estimated from its config and the policy's folder."""

from pathlib import Path
from typing import Any

import msgspec

from coppice.common import hardware
from coppice.learner.config import LearnerConfig
from coppice.learner.update.plan import plan_of
from coppice.tools.launching.number_types import model_shape, typed
from coppice.tools.launching.settings import Config

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
    shape = model_shape(model)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    weights = size / (4 if shape.get("dtype") == "float32" else 2)
    return sum(count * each for count, each in memory_parts(config, shape, weights).values())


def memory_parts(
    config: Config, shape: dict[str, Any], weights: float
) -> dict[str, tuple[int, float]]:
    """Estimate the main memory of each kind of process, as (how many, GiB of each). shape: a
    model's config.json; weights: their number."""
    config = typed(config)
    a, w, served = config.actors, config.learner, config.judges.model
    acting, learning = (
        4 if hardware.compute_dtype(d) == "float32" else 2 for d in (a.dtype, w.dtype)
    )
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
    models = plan_of(w).models.values()
    hidden, inner, layers = (
        shape.get(name, 0) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    layer = _SAVED[0] * hidden + _SAVED[1] * inner
    saved = w.micro_tokens * (
        layer + layers * hidden if w.gradient_checkpointing else layers * layer
    )
    parts = w.shards
    frozen = weights * size * sum(model.lora.rank > 0 for model in models)
    trained = weights * sum((0.8 if model.lora.rank else 16) + 4 * model.copy for model in models)
    return frozen / parts / 2**30, (trained / parts + saved * (4 if size == 4 else 3)) / 2**30


def free_gib() -> float:
    """Return the GiB that a run may take on this machine."""
    return hardware.free_memory() / 2**30


def memory_warning(config: Config, model: Path) -> str:
    """Return a warning that names the largest plan that fits, if a run on CPUs needs more memory
    than is free; "" otherwise."""
    replace, free = msgspec.structs.replace, free_gib()

    def needed(actors: int, ranks: int) -> float:
        a, w = replace(config.actors, count=actors), replace(config.learner, count=ranks)
        return memory_gib(replace(config, actors=a, learner=w), model)

    need, fewest = needed(config.actors.count, config.learner.count), config.scheduler.shards
    if need <= free or hardware.visible_gpus() or config.cluster.on:
        return ""
    warning = f"warning: this plan needs about {need:.1f} GiB of memory and {free:.1f} are free, so that the system may kill it: "
    sizes = [
        (a, w)
        for a in range(fewest, config.actors.count + 1)
        for w in range(1, config.learner.count + 1)
    ]
    fitting = [size for size in sizes if needed(*size) <= free]
    if fitting:
        actors, ranks = max(fitting, key=lambda size: (sum(size), size[0]))
        return (
            f"{warning}--actors {actors} --learner {ranks} fits ({needed(actors, ranks):.1f} GiB)"
        )
    return (
        f"{warning}even --actors {fewest} --learner 1 needs {needed(fewest, 1):.1f} GiB. Set a smaller actors.kv_cache_gib"
        f" (now {config.actors.kv_cache_gib}) or learner.micro_tokens (now {config.learner.micro_tokens}), or take a smaller model"
    )


def estimate(config: Config, model: Path) -> str:
    """Tell the estimate of the memory, for --dry-run."""
    uncounted = ", without the judges' model" if config.judges.model else ""
    need, free = memory_gib(config, model), free_gib()
    return f"memory: about {need:.1f} GiB of {free:.1f} GiB free (weights, caches, activations{uncounted})"
