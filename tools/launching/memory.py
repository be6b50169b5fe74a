"""The number type in which a run computes, and the main memory that it will need, told from its
config and the policy's folder."""

import re
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from coppice.actors.config import ActorsConfig
from coppice.actors.environments import registry
from coppice.common import hardware
from coppice.judges.retriever.worker import is_served
from coppice.learner.model.memory import lacks, model_shape, rank_parts, sizes, told
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


_PROCESS_GIB, _REST_GIB = 0.4, 0.6
"""GiB that a process with torch takes beside weights, caches and activations (libraries, buffers,
memory that the allocator keeps), and GiB that the retriever, launcher, scheduler and judges take
together. See docs/performance.md."""
CUDA_GIB = 1.5
"""GiB of a GPU that a process takes beside what is counted (CUDA's context, libraries, buffers): an
assumption."""
ENCODER_GIB = 0.5
"""GiB of a retriever's encoder with the activations of its queries. The index is in main memory."""
ENGINE_SHARE = 0.85
"""Share of a GPU's memory that SGLang fills with weights and cache if
actors.sglang.arguments.mem_fraction_static does not say."""


def memory_gib(config: Config, model: Path) -> float:
    """Estimate the most main memory that all processes hold together, in GiB. The weights of a
    model not yet on disk count as 0."""
    return sum(count * each for count, each in memory_parts(config, *sizes(model)).values())


def memory_parts(
    config: Config, shape: dict[str, Any], weights: float
) -> dict[str, tuple[int, float]]:
    """Estimate the main memory of each kind of process, as (how many, GiB of each). shape: a
    model's config.json; weights: their number."""
    config = typed(config)
    a, w, served = config.actors, config.learner, config.judges.model
    numbers = {"float32": 4}
    acting, learning = (numbers.get(hardware.compute_dtype(d), 2) for d in (a.dtype, w.dtype))
    own = rank_parts(w, shape, weights, learning)
    frozen = sum(own.pop(name, 0.0) for name in ("frozen weights", "initial policy"))
    parts = {"actor": (a.count, weights * acting / 2**30 + a.kv_cache_gib + _PROCESS_GIB)}
    parts["learner rank"] = w.here, sum(own.values()) + _PROCESS_GIB
    if frozen and w.here:  # the ranks of one machine share them, sharded or not
        parts["frozen weights"] = 1, frozen * w.shards
    parts |= {"judges' model": (1, served.kv_cache_gib + 1.1)} if served else {}
    return parts | {"all others": (config.scheduler.shards, _REST_GIB)}


def gpus_of(place: int, each: int, learners: int, gpus: list[str]) -> list[str]:
    """Return the GPUs of the actor at ``place``: actors take turns on the GPUs after those of
    ``learners`` ranks, or on all if too few come after.

    Raises ValueError when the machine has fewer GPUs than one actor needs.
    """
    if not each or not gpus:
        return []
    if each > len(gpus):
        raise ValueError(f"gpus = {each} of the engine, and {len(gpus)} are here: {gpus}")
    own = gpus[learners:] if len(gpus) - learners >= each else gpus
    first = place * each % (len(own) // each * each)
    return own[first : first + each]


def gpus_left(config: Config, gpus: list[str]) -> list[str]:
    """Return the GPUs of the judges' models and the retriever: those that neither the learner nor
    the actors use. If none is left, they may use any GPU."""
    own = 0 if config.actors.colocated else config.actors.count * config.actors.own_gpus
    return gpus[config.learner.here + own :]


def shared_parts(
    config: Config, shape: dict[str, Any], weights: float, room: float
) -> dict[str, float]:
    """Return the most of a GPU on which engine and learner take turns, in GiB: while the learner
    trains, its all without the engine's; while the engine generates, what of it stays."""
    w = typed(config).learner
    all_of_it, rest = (
        rank_parts(w, shape, weights, 4 if w.dtype == "float32" else 2, resting)
        for resting in (False, True)
    )
    rest["actors' cache with weights"] = share_of(config.actors) * room
    most = max(all_of_it, rest, key=lambda parts: sum(parts.values()))
    return most | {"CUDA": 2 * CUDA_GIB}


def gpu_parts(
    config: Config, shape: dict[str, Any], weights: float, gpus: list[str], room: float
) -> list[dict[str, float]]:
    """Estimate what each of this machine's GPUs holds, in GiB, by what it is. room: GiB of a GPU.
    Judges and retrievers that others have started are not known here."""
    config = typed(config)
    a, w = config.actors, config.learner
    parts = [dict[str, float]() for _ in gpus]

    def process(gpu: str, **held: float) -> None:
        own = parts[gpus.index(gpu)]
        for name, gib in {**held, "CUDA": CUDA_GIB}.items():
            own[name] = own.get(name, 0.0) + gib

    for gpu in gpus[: w.here]:
        if a.colocated:
            parts[gpus.index(gpu)] |= shared_parts(config, shape, weights, room)
        else:
            process(gpu, **rank_parts(w, shape, weights, 4 if w.dtype == "float32" else 2))
    here = not a.colocated and (a.served is None or a.served.way != "url")
    for place in range(a.count if here else 0):
        used, gib = gpus[:1], weights * 2 / 2**30 + a.kv_cache_gib
        if a.served is not None:
            used, gib = gpus_of(place, a.served.gpus, w.here, gpus) or used, share_of(a) * room
        for gpu in used:
            process(gpu, **{"actors' cache with weights": gib})
    first = (gpus_left(config, gpus) or gpus)[0]
    if served := config.judges.model:
        gib = 2 * billions(served.name) + served.kv_cache_gib
        process(first, **{"judges' cache with weights": gib})
    searches = registry.load(config.data.environment, config.data.options).searches
    if searches and not is_served(config.retriever.backend):
        process(first, encoder=ENCODER_GIB)
    return parts


def share_of(actors: ActorsConfig) -> float:
    """Return the share of a GPU's memory that the servers of actors fill."""
    own = actors.served.arguments if actors.served is not None else {}
    share = own.get("mem_fraction_static", own.get("gpu_memory_utilization", ENGINE_SHARE))
    return float(share)


def billions(name: str) -> float:
    """Return the weights that a model's name states, in billions, 0 if none."""
    found = re.search(r"(\d+(?:\.\d+)?)([bm])(?![a-z])", name.lower())
    return float(found[1]) / (1 if found[2] == "b" else 1000) if found else 0.0


def gpu_lines(parts: list[dict[str, float]]) -> list[str]:
    """Return a line for each kind of GPU: which, and what they hold."""
    kinds = dict[str, list[int]]()
    for number, own in enumerate(parts):
        kinds.setdefault(told(own) if own else "nothing of the run", []).append(number)
    return [f"GPU {', '.join(map(str, own))}: {line}" for line, own in kinds.items()]


def gpu_lacks(config: Config, model: Path) -> str:
    """Return why a GPU of this machine cannot hold what the run puts there, or ""."""
    gpus, room = hardware.visible_gpus(), hardware.gpu_gib()
    if config.cluster.on or not (gpus and room):
        return ""
    for number, own in enumerate(gpu_parts(config, *sizes(model), gpus, room)):
        if why := lacks(own, room):
            return f"GPU {number} holds {why}"
    return ""


def memory_warning(config: Config, model: Path) -> str:
    """Return a warning that names what each process takes, if a run on CPUs needs more memory than
    is free; "" otherwise."""
    need, free = memory_gib(config, model), hardware.free_memory() / 2**30
    if need <= free or hardware.visible_gpus() or config.cluster.on:
        return ""
    parts = memory_parts(config, *sizes(model)).items()
    each = ", ".join(f"{count} {name} of {gib:.1f}" for name, (count, gib) in parts if count)
    return (
        f"warning: this plan needs about {need:.1f} GiB of memory and {free:.1f} are free, so that"
        f" the system may kill it ({each}): take fewer --actors or --learner, or a smaller"
        " actors.kv_cache_gib, learner.micro_tokens or model"
    )
