"""From a config to what a run of it will take: its work simulated, its times and memory by
``tools.planning.formulas``, for every split of the GPUs."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from coppice.actors.environments import registry
from coppice.common import hardware
from coppice.tools.defaults.models import OURS, ensure_model
from coppice.tools.defaults.settings import cache_folder
from coppice.tools.inspecting import runs
from coppice.tools.launching.config import Config, ConfigError, convert
from coppice.tools.launching.memory import model_shape, rank_gib, typed
from coppice.tools.planning import formulas
from coppice.tools.planning.formulas import Assumed, Dense, Speed
from coppice.tools.planning.growth import Work, work_of
from coppice.tools.planning.samples import MadeUp, RecordedTexts

CUDA_GIB = 1.5
"""GiB of a GPU that a process takes beside what is counted (CUDA's context, libraries, buffers): an
assumption."""
ENGINE_SHARE = 0.85
"""Share of a GPU's memory that SGLang fills with weights and cache if
actors.sglang.arguments.mem_fraction_static does not say."""


class Split(msgspec.Struct, frozen=True):
    """Who gets how many of the devices (processes, without a GPU), and what follows. engines: actor
    processes. hours: of the whole run without its evaluations. cache: tokens that an engine has
    room for. Without a GPU, the rest says nothing: actor_gib, rank_gib: memory of one GPU. lacks:
    why it cannot work, or "". gpu_hours: of all devices; cost: 0 without a price."""

    actors: int
    ranks: int
    engines: int
    speed: Speed
    hours: float
    cache: float
    actor_gib: float = 0.0
    rank_gib: float = 0.0
    lacks: str = ""
    gpu_hours: float = 0.0
    cost: float = 0.0


def model_of(config: Config, given: Path | None = None) -> Dense:
    """Return the sizes of a config's model: those of a config.json that is ``given``, of the
    model's folder, or as known by its name. Raises ValueError.

    A model of this project that is not here yet is made, which takes some seconds.
    """
    name = config.model.name
    folder = given or (ensure_model(name, cache_folder()) if name in OURS else Path(name))
    if shape := model_shape(folder):
        return Dense.of(shape, str(folder))
    for start, sizes in formulas.SHAPES.items():
        if not given and name.rpartition("/")[2].startswith(start):
            return sizes
    lacking = f"{given or f'model.name = {name!r}'}: no config.json there"
    raise ValueError(
        f"{lacking}, so the model's sizes are unknown: expected --shape FOLDER, with the model's"
        f" config.json in it, or a model that is here or known ({', '.join(formulas.SHAPES)})"
    )


def config_of(run: Path, changes: Sequence[str] = ()) -> Config:
    """Return the config of a run that ended, with ``a.b=value`` changes. Raises ValueError."""
    read = runs.read(run)
    if not read.records or "phases" not in read.summary.get("seconds", {}):
        lacking = "has made no update or has no summary.json"
        raise ValueError(f"{run} {lacking}: expected the folder of a run that ended")
    if any(change.partition("=")[0].strip() == "method" for change in changes):
        raise ValueError(
            "--set method has no effect with --run, whose config holds all parts: give --config"
        )
    try:
        return convert(read.config, list(changes))
    except ConfigError as error:
        raise ConfigError(f"{run}: {error}") from None


def recorded(run: Path, config: Config) -> RecordedTexts:
    """Return the texts of a run, for a config. Raises ValueError."""
    own, other = config_of(run).data, config.data
    source = registry.load(own.environment, own.options)
    if source.fresh != registry.load(other.environment, other.options).fresh:
        kind = "" if source.fresh else " not"
        raise ValueError(
            f"--run {run} is of the environment {own.environment!r}, whose turns are{kind} fresh"
            f" prompts, other than those of {other.environment!r}: expected a run of an environment"
            " like the config's"
        )
    return RecordedTexts(run, source)


def measured(run: Path) -> dict[str, float]:
    """Return what a run that ended measured, per update, by the names of ``Work`` and ``Speed``;
    nan where it has no record. Prompts are counted in updates beside which no evaluation ran."""
    read = runs.read(run)
    records, evaluated = read.records, {round(e["version"]) for e in read.evaluations}
    near = [{round(r["version"]) - 1, round(r["version"])} & evaluated for r in records]
    alone = [r for r, evaluations in zip(records, near, strict=True) if not evaluations]
    rates = [(r["cache/tokens_saved"], r.get("cache/hit_rate")) for r in alone or records]
    prefilled = [saved * (1 / rate - 1) for saved, rate in rates if rate]
    while len(prefilled) > 1 and not prefilled[0]:  # no heartbeat had come yet
        prefilled.pop(0)
    period = read.summary["seconds"]["phases"]["updates"] / len(records)

    def mean(name: str) -> float:
        values = [record[name] for record in records if name in record]
        return fmean(values) if values else math.nan

    return {
        "sampled": read.summary["counts"]["generated_tokens"] / len(records),
        "prefilled": fmean(prefilled) if prefilled else math.nan,
        "turns": mean("learner/turns"),
        "path": mean("learner/path_tokens"),
        # it is of a step
        "forwarded": mean("learner/forwarded_tokens") * read.config["learner"]["minibatches"],
        "staleness": mean("learner/staleness_mean"),
        "generate": mean("busy/engine") * period,
        "learn": mean("learner/seconds"),
        "period": period,
    }


def reached(run: Path) -> Assumed:
    """Return one process of a run as a device, by the FLOPs that it reached, and what a step waited
    beside.

    wait: what is left of the latency in the formula of the period; 0 where actors or learner leave
    nothing.
    """
    config, told = config_of(run), measured(run)
    model, work = model_of(config), work_of(config, recorded(run, config))
    flops = formulas.learner_flops(config.learner, model, work)
    learner = flops / config.learner.count / told["learn"]
    busy = told["generate"] or told["period"]  # in a short run no heartbeat may have told it
    actor = sum(formulas.actor_flops(model, work)) / config.actors.count / busy
    free = (config.scheduler.max_staleness + 1) * told["period"] - told["learn"] - told["generate"]
    waited = told["period"] > 1.05 * max(told["learn"], told["generate"])
    wait = max(0.0, free / max(1, work.steps)) if waited else 0.0
    read = actor / learner
    return Assumed(
        flops=learner, learner_share=1.0, prefill_share=read, decode_share=1.0, wait=wait
    )


def split(
    config: Config, model: Dense, work: Work, reach: Assumed, actors: int, ranks: int, gpus: bool
) -> Split:
    """Return what follows if this many devices generate and train."""
    a, s = config.actors, config.scheduler
    learner = msgspec.structs.replace(typed(config).learner, count=ranks)
    size = 4 if not gpus and hardware.compute_dtype(learner.dtype) == "float32" else 2
    each = max(1, a.sglang.gpus) if gpus else 1
    engines, held = actors // each, model.weights * size / 2**30
    share = float(a.sglang.arguments.get("mem_fraction_static", ENGINE_SHARE))
    room = share * reach.memory * each if gpus else held + a.kv_cache_gib
    cache = (room - held) * 2**30 / model.cached(size)
    context = max(1.0, work.context / max(1, work.sampled))
    most = engines * min(a.max_batch, max(1.0, cache / context))
    timed = formulas.speed(learner, model, work, reach, s.max_staleness, actors, most, size)
    hours = timed.period * s.updates / 3600
    if not gpus:
        return Split(actors, ranks, engines, timed, hours, cache)
    shape, lacks = msgspec.structs.asdict(model), ""
    rank = sum(rank_gib(learner, shape, model.weights, size)) + CUDA_GIB
    if cache < a.max_context:
        lacks = f"an engine has {max(0.0, cache):.0f} tokens of cache"
        lacks += f", less than actors.max_context = {a.max_context}"
    elif rank > reach.memory:
        lacks = f"a rank needs {rank:.0f} GiB of {reach.memory:g}"
    spent = hours * (actors + ranks)
    gpu = room / each, rank, lacks, spent, spent * reach.price
    return Split(actors, ranks, engines, timed, hours, cache, *gpu)


def splits(
    config: Config, model: Dense, work: Work, reach: Assumed, gpus: int | None
) -> list[Split]:
    """Return every split of ``gpus`` between actors and learner, the fastest that fits first; None:
    the config's own. Raises ValueError."""
    each, pairs = max(1, config.actors.sglang.gpus), [(config.actors.count, config.learner.count)]
    if gpus is not None:
        pairs = [(actors, gpus - actors) for actors in range(each, gpus, each)]
    if not pairs:
        needed = f"{each} of an engine (actors.sglang.gpus) and 1 of the learner"
        raise ValueError(f"--gpus {gpus}: expected at least {each + 1}, {needed}")
    every = [split(config, model, work, reach, *pair, gpus is not None) for pair in pairs]
    return sorted(every, key=lambda one: (bool(one.lacks), one.speed.period))


def made_up(config: Config, assumed: Assumed) -> tuple[MadeUp, dict[str, float]]:
    """Return texts of the assumed lengths, and these lengths. Raises ValueError."""
    s, options, a = config.scheduler, config.data.options, assumed
    seen = options.get("max_observation_characters", 400) // 4
    environment = registry.load(config.data.environment, options)
    instruction, action = min(a.instruction, a.prompt - 1), a.action or -(-s.max_action_tokens // 2)
    observation, turns = seen if a.observation < 0 else a.observation, a.turns or float(s.budget)
    if action > s.max_action_tokens:
        most = f"expected at most scheduler.max_action_tokens = {s.max_action_tokens}"
        raise ValueError(f"--assume action={a.action}: {most}")
    if not 1 <= turns <= (s.budget if environment.forced_prefix else math.inf):
        most = f"at most scheduler.budget = {s.budget} where that ends an episode"
        raise ValueError(f"--assume turns={turns:g}: expected at least 1, and {most}")
    lengths = (instruction, a.prompt, action, observation)
    source = MadeUp(*lengths, turns, s.budget, environment.fresh)
    names = ("instruction", "prompt", "action", "observation", "turns")
    return source, dict(zip(names, (*lengths, turns), strict=True))
