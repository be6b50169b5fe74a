"""From a config to what a run of it will take: its work simulated, its times and memory by ``tools.planning.formulas``, for every split of the GPUs."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from actors.environments import registry
from actors.environments.base import Environment
from tools.defaults.models import OURS, ensure_model
from tools.defaults.settings import cache_folder
from tools.inspecting import runs
from tools.launching import processes
from tools.launching.config import Config, ConfigError, convert
from tools.planning import formulas
from tools.planning.formulas import Dense, Device, Efficiency, Fleet, Speed
from tools.planning.growth import Work, grown
from tools.planning.samples import Lengths, Recorded, Source
from wire import hardware

TOKENS = 500_000
"""Trees are simulated until all their samples with their prompts have so many tokens, and at least one: some seconds."""
UPDATES = 16
"""No more updates than this are simulated."""
CUDA_GIB = 1.5
"""GiB of a GPU that a process takes beside what is counted (CUDA's context, libraries, buffers): an assumption."""
ENGINE_SHARE = 0.85
"""Share of a GPU's memory that SGLang fills with weights and cache if actors.sglang.arguments.mem_fraction_static does not say."""


class Split(msgspec.Struct, frozen=True):
    """Who gets how many of the devices (processes, without a GPU), and what follows. engines: actor processes. actor_gib, rank_gib: memory of one GPU. cache: tokens that an
    engine has room for. lacks: why it cannot work, or "". hours: of the whole run without
    its evaluations; gpu_hours: of all devices; cost: 0 without a price."""

    actors: int
    ranks: int
    engines: int
    speed: Speed
    actor_gib: float = 0.0
    rank_gib: float = 0.0
    cache: float = math.inf
    lacks: str = ""
    hours: float = 0.0
    gpu_hours: float = 0.0
    cost: float = 0.0


def environment_of(config: Config) -> Environment:
    """Return the environment of a config."""
    return registry.load(config.data.environment, config.data.options)


def model_of(config: Config, given: Path | None = None) -> Dense:
    """Return the sizes of a config's model: those of a config.json that is ``given``, of the model's folder, or as known by its name. Raises ValueError.

    A model of this project that is not here yet is made, which takes some seconds.
    """
    name = config.model.name
    own = ensure_model(name, cache_folder()) if not given and name in OURS else Path(name)
    folders = [given or own]
    for folder in folders:
        if shape := processes.model_shape(folder.parent if folder.name == "config.json" else folder):
            return Dense.of(shape, str(folder))
    known = [shape for start, shape in formulas.SHAPES.items() if name.rpartition("/")[2].startswith(start)]
    if given or not known:
        raise ValueError(
            f"{given or f'model.name = {name!r}'}: no config.json there, so the model's sizes are unknown: expected --shape FOLDER, with the model's"
            f" config.json in it, or a model that is here or known ({', '.join(formulas.SHAPES)})"
        )
    return known[0]


def work_of(config: Config, source: Source) -> Work:
    """Return the mean work of an update, from a few that are grown."""
    real, c = environment_of(config), config.scheduler
    one = grown(config, real, source, range(1), config.actors.count, config.learner.count)
    each = max(1, one.sampled + one.prompt)
    trees = max(1, min(c.questions_per_update, int(TOKENS // each)))
    updates = max(1, min(UPDATES, int(TOKENS // (trees * each))))
    works = [
        grown(config, real, source, range(i * trees, (i + 1) * trees), config.actors.count, config.learner.count)
        for i in range(updates)
    ]
    scale = dict.fromkeys(Work.__struct_fields__, c.questions_per_update / trees / updates)
    scale |= dict.fromkeys(("longest", "steps"), 1 / updates)  # of a tree
    return Work(**{name: factor * sum(getattr(work, name) for work in works) for name, factor in scale.items()})


def config_of(run: Path, changes: Sequence[str] = ()) -> Config:
    """Return the config of a run that ended, with ``a.b=value`` changes. Raises ValueError."""
    read = runs.read(run)
    if not read.records or "phases" not in read.summary.get("seconds", {}):
        raise ValueError(f"{run} has made no update or has no summary.json: expected the folder of a run that ended")
    try:
        return convert(read.config, list(changes))
    except ConfigError as error:
        raise ConfigError(f"{run}: {error}") from None


def recorded(run: Path, config: Config) -> Source:
    """Return the texts of a run, for a config."""
    of = config_of(run)
    if environment_of(of).fresh != environment_of(config).fresh:
        raise ValueError(
            f"--run {run} is of the environment {of.data.environment!r}, whose turns are{'' if environment_of(of).fresh else ' not'} fresh prompts, other than"
            f" those of {config.data.environment!r}: expected a run of an environment like the config's"
        )
    return Recorded(run, environment_of(of))


def measured(run: Path) -> dict[str, float]:
    """Return what a run that ended measured, per update, by the names of ``Work`` and ``Speed``; nan where it has no record. Prompts are counted in
    updates beside which no evaluation ran."""
    read = runs.read(run)
    evaluated = {round(e["version"]) for e in read.evaluations}
    alone = [r for r in read.records if not {round(r["version"]) - 1, round(r["version"])} & evaluated] or read.records
    prefilled = [r["cache/tokens_saved"] * (1 / r["cache/hit_rate"] - 1) for r in alone if r.get("cache/hit_rate")]
    period = read.summary["seconds"]["phases"]["updates"] / len(read.records)

    def mean(name: str) -> float:
        return _mean([record[name] for record in read.records if name in record])

    return {
        "sampled": read.summary["counts"]["generated_tokens"] / len(read.records),
        "prefilled": _mean(prefilled),
        "turns": mean("learner/turns"),
        "path": mean("learner/path_tokens"),
        "forwarded": mean("learner/forwarded_tokens") * read.config["learner"]["minibatches"],  # it is of a step
        "staleness": mean("learner/staleness_mean"),
        "generate": mean("busy/engine") * period,
        "learn": mean("learner/seconds"),
        "period": period,
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def reached(run: Path) -> tuple[Device, Efficiency]:
    """Return one process of a run as a device, by the FLOPs that it reached, and what a step waited beside.

    wait: what is left of the latency in the formula of the period; 0 where actors or learner leave nothing.
    """
    config, told = config_of(run), measured(run)
    model, work = model_of(config), work_of(config, recorded(run, config))
    learner = formulas.learner_flops(config.learner, model, work) / config.learner.count / told["learn"]
    actor = sum(formulas.actor_flops(model, work)) / config.actors.count / told["generate"]
    free = (config.scheduler.max_staleness + 1) * told["period"] - told["learn"] - told["generate"]
    wait = free / max(1, work.steps) if told["period"] > 1.05 * max(told["learn"], told["generate"]) else 0.0
    return Device(learner), Efficiency(1.0, actor / learner, 1.0, max(0.0, wait))


def split(
    config: Config, model: Dense, work: Work, device: Device, reach: Efficiency, actors: int, ranks: int, gpus: bool
) -> Split:
    """Return what follows if so many devices generate and so many train."""
    c, a, s = processes.typed(config), config.actors, config.scheduler
    learner = msgspec.structs.replace(c.learner, count=ranks)
    size = 2 if gpus else 4 if hardware.compute_dtype(c.learner.dtype) == "float32" else 2
    each = max(1, a.sglang.gpus) if gpus else 1
    engines, context = actors // each, work.context / max(1, work.sampled)
    share = float(a.sglang.arguments.get("mem_fraction_static", ENGINE_SHARE))
    room = share * device.memory * each if gpus else model.weights * size / 2**30 + a.kv_cache_gib
    cache = (room * 2**30 - model.weights * size) / model.cached(size)
    most = engines * min(a.max_batch, max(1.0, cache / max(1.0, context)))
    fleet = Fleet(actors, ranks, s.questions_per_update, s.max_staleness, most, size)
    timed = formulas.speed(learner, model, work, device, reach, fleet)
    hours = timed.period * s.updates / 3600
    if not gpus:
        return Split(actors, ranks, engines, timed, cache=cache, hours=hours)
    rank = sum(processes.rank_gib(learner, model.settings, model.weights, size)) + CUDA_GIB
    lacks = f"a rank needs {rank:.0f} GiB of {device.memory:g}" if rank > device.memory else ""
    if cache < a.max_context:
        lacks = f"an engine has {max(0.0, cache):.0f} tokens of cache, less than actors.max_context = {a.max_context}"
    gpu_hours = hours * (actors + ranks)
    return Split(
        actors, ranks, engines, timed, room / each, rank, cache, lacks, hours, gpu_hours, gpu_hours * device.price
    )


def splits(
    config: Config, model: Dense, work: Work, device: Device, reach: Efficiency, gpus: int | None
) -> list[Split]:
    """Return every split of ``gpus`` between actors and learner, the fastest that fits first; None: the config's own. Raises ValueError."""
    own, each = [(config.actors.count, config.learner.count)], max(1, config.actors.sglang.gpus)
    pairs = own if gpus is None else [(actors, gpus - actors) for actors in range(each, gpus, each)]
    if not pairs:
        raise ValueError(
            f"--gpus {gpus}: expected at least {each + 1}, {each} of an engine (actors.sglang.gpus) and 1 of the learner"
        )
    every = [split(config, model, work, device, reach, actors, ranks, gpus is not None) for actors, ranks in pairs]
    return sorted(every, key=lambda one: (bool(one.lacks), one.speed.period))


def made_up(config: Config, lengths: dict[str, Any]) -> tuple[Lengths, set[str]]:
    """Return the lengths of a plan without a run, and the names of those that nobody gave and that are assumed. Raises ValueError."""
    s, options = config.scheduler, config.data.options
    assumed = {
        "instruction": 200,
        "prompt": 300,
        "action": -(-s.max_action_tokens // 2),
        "observation": options["max_observation_characters"] // 4 if "max_observation_characters" in options else 100,
        "turns": float(s.budget),
    }
    given = {name: value for name, value in lengths.items() if value is not None}
    if "prompt" in given:
        assumed["instruction"] = min(assumed["instruction"], given["prompt"] - 1)
    size = Lengths(**(assumed | given))
    for name in Lengths.__struct_fields__:
        least = 0 if name in ("instruction", "observation") else 1
        if getattr(size, name) < least:
            raise ValueError(f"--{name} {getattr(size, name)}: expected at least {least}")
    if size.instruction >= size.prompt:
        raise ValueError(
            f"--instruction {size.instruction}: expected less than the whole --prompt, {size.prompt} tokens"
        )
    if size.action > s.max_action_tokens:
        raise ValueError(
            f"--action {size.action}: expected at most scheduler.max_action_tokens = {s.max_action_tokens}"
        )
    if environment_of(config).forced_prefix and size.turns > s.budget:
        raise ValueError(f"--turns {size.turns:g}: expected at most scheduler.budget = {s.budget}")
    return size, set(assumed) - set(given)
