"""From a config to what a run of it will take: its work simulated, its times and memory by
``tools.planning.formulas``, for every split of the GPUs."""

import math
from pathlib import Path

import msgspec

from coppice.actors.environments import registry
from coppice.tools.defaults.models import OURS, ensure_model
from coppice.tools.defaults.settings import cache_folder
from coppice.tools.launching.config import Config
from coppice.tools.launching.memory import model_shape, rank_gib, typed
from coppice.tools.planning import formulas
from coppice.tools.planning.formulas import Assumed, Dense, Speed
from coppice.tools.planning.growth import MadeUp, Work

CUDA_GIB = 1.5
"""GiB of a GPU that a process takes beside what is counted (CUDA's context, libraries, buffers): an
assumption."""
ENGINE_SHARE = 0.85
"""Share of a GPU's memory that SGLang fills with weights and cache if
actors.sglang.arguments.mem_fraction_static does not say."""


class Split(msgspec.Struct, frozen=True):
    """Who gets how many of the GPUs, and what follows. engines: actor processes. hours: of the
    whole run without its evaluations. cache: tokens that an engine has room for. actor_gib,
    rank_gib: memory of one GPU. lacks: why it cannot work, or "". gpu_hours: of all GPUs; cost: 0
    without a price."""

    actors: int
    ranks: int
    engines: int
    speed: Speed
    hours: float
    cache: float
    actor_gib: float
    rank_gib: float
    lacks: str
    gpu_hours: float
    cost: float


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


def split(
    config: Config, model: Dense, work: Work, reach: Assumed, actors: int, ranks: int
) -> Split:
    """Return what follows if this many GPUs generate and train."""
    a, s, size = config.actors, config.scheduler, 2
    learner = msgspec.structs.replace(typed(config).learner, count=ranks)
    each = max(1, a.sglang.gpus)
    engines, held = actors // each, model.weights * size / 2**30
    room = float(a.sglang.arguments.get("mem_fraction_static", ENGINE_SHARE)) * reach.memory * each
    cache = (room - held) * 2**30 / model.cached(size)
    context = max(1.0, work.context / max(1, work.sampled))
    most = engines * min(a.max_batch, max(1.0, cache / context))
    timed = formulas.speed(learner, model, work, reach, s.max_staleness, actors, most, size)
    hours = timed.period * s.updates / 3600
    rank = sum(rank_gib(learner, msgspec.structs.asdict(model), model.weights, size)) + CUDA_GIB
    lacks, spent = "", hours * (actors + ranks)
    if cache < a.max_context:
        lacks = f"an engine has {max(0.0, cache):.0f} tokens of cache"
        lacks += f", less than actors.max_context = {a.max_context}"
    elif rank > reach.memory:
        lacks = f"a rank needs {rank:.0f} GiB of {reach.memory:g}"
    return Split(
        actors, ranks, engines, timed, hours, cache, room / each, rank, lacks, spent,
        spent * reach.price,
    )  # fmt: skip


def splits(config: Config, model: Dense, work: Work, reach: Assumed, gpus: int) -> list[Split]:
    """Return every split of ``gpus`` between actors and learner, the fastest that fits first.
    Raises ValueError."""
    each = max(1, config.actors.sglang.gpus)
    if gpus <= each:
        needed = f"{each} of an engine (actors.sglang.gpus) and 1 of the learner"
        raise ValueError(f"--gpus {gpus}: expected at least {each + 1}, {needed}")
    many = range(each, gpus, each)
    every = [split(config, model, work, reach, actors, gpus - actors) for actors in many]
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
