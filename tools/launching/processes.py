"""The processes of a run: name, module, process file and environment of each."""

import secrets
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from actors.config import ActorProcess
from judges.config import with_served_model
from judges.retriever.worker import RetrieverProcess
from judges.serve import PLAYERS, JudgeProcess, built_in_service
from learner import schemes
from learner.config import LearnerConfig, LearnerProcess
from scheduler.config import EvaluationConfig, SchedulerConfig, SchedulerProcess
from scheduler.tracking import KEYS
from tools.launching.assets import Assets
from tools.launching.config import Config
from tools.launching.judge_model import JudgeModelProcess
from wire import hardware, shards


class Process(msgspec.Struct, frozen=True):
    """One process, ``python -m module RUN/processes/<file>.json``, started by the interpreter python ("" for the launcher's own).
    vital: when this process dies, the whole run stops or is resumed; other processes are restarted alone. withheld: variables of the launcher that
    it must not see, because they hold the API keys of others. needed: those that it needs. shard: the scheduler to which it belongs, None for what
    all schedulers share."""

    name: str
    module: str
    file: str
    threads: int
    vital: bool
    environment: dict[str, str] = {}
    python: str = ""
    withheld: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()
    shard: int | None = None


def make(config: Config, assets: Assets, run: Path) -> list[Process]:
    """Write the process files and return the plan, the schedulers first."""
    config = typed(config)
    files, folder = _files(config, assets, str(run)), run / "processes"
    folder.mkdir(parents=True, exist_ok=True)
    for name, body in files.items():
        (folder / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=1))
    needed = {file: key_variables(msgspec.to_builtins(body)) for file, body in files.items()}
    needed["scheduler"] |= KEYS  # the first one starts the trackers
    everybody = frozenset().union(*needed.values())
    plan, replace = _plan(config, files, run), msgspec.structs.replace
    return [replace(p, withheld=everybody - needed[p.file], needed=needed[p.file]) for p in plan]


def _files(config: Config, assets: Assets, run: str) -> dict[str, Any]:
    """Return the contents of the process files by name."""
    s = config.scheduler
    # A schedule without an end of its own ends with the run.
    w = msgspec.structs.replace(config.learner, decay_updates=config.learner.decay_updates or s.updates)
    needs = schemes.load(w.scheme, w.scheme_options).needs
    # A plug-in announces its own name, so only built-in services are waited for.
    services = [service for service in map(built_in_service, config.judges.use) if service]
    services += ["retrieve"] if assets.retriever else []
    judges = {k: v for k, v in config.judges.use.items() if k not in PLAYERS}
    served = config.judges.model and JudgeModelProcess(
        "judge-model", run, assets.judge_model, _free_port(), config.judges.model
    )
    if served:
        judges = {k: with_served_model(v, served.url, served.model) for k, v in judges.items()}
    files: dict[str, Any] = {
        "learner": LearnerProcess(
            "learner", run, config.seed, assets.model, s.questions_per_update, s.temperature, w, s.shards
        ),
    }  # fmt: skip
    players = {k: v for k, v in config.judges.use.items() if k in PLAYERS}
    if served:
        files["judge-model"] = served
    stored = f"{w.publish_url}/{Path(run).name}" if w.publish_url else ""
    for number in range(s.shards):
        name, home = partial(shards.called, number=number), str(shards.folder(Path(run), number))
        actors = 1 if config.cluster.on else len(range(number, config.actors.count, s.shards))
        files[name("scheduler")] = SchedulerProcess(
            name("scheduler"), run, config.seed, assets.model, config.data.environment, config.data.options, assets.train,
            assets.heldout, actors, services, max(1, config.actors.max_batch // 4), _share(s, number),
            config.actors.max_context, needs.reward_column, needs.equal, config.deterministic,
            shards.Shard(number, s.shards), config.actors.max_batch,
        )  # fmt: skip
        files[name("judges")] = JudgeProcess(name("judges"), home, judges)
        if players:  # opponents run apart from the judges, because a slow oracle would keep them waiting
            files[name("players")] = JudgeProcess(name("players"), home, players)
        if assets.retriever:
            r = config.retriever
            # Joining depends on time, and a query's vector, in its last bits, on what it is joined with.
            batch = 1 if config.deterministic else r.batch
            files[name("retriever")] = RetrieverProcess(
                name("retriever"), home, assets.retriever, r.encoder, r.threads, r.cache, r.search, batch
            )
    for i in range(config.actors.count):
        home = str(shards.folder(Path(run), i % s.shards))
        files[f"actor-{i}"] = ActorProcess(
            f"actor-{i}", home, config.seed * 1000 + i, assets.model, config.actors, i, config.deterministic, stored
        )
    return files


def _share(s: SchedulerConfig, number: int) -> SchedulerConfig:
    """Return the settings of one shard: its equal part of every update. The first shard alone evaluates and tracks."""
    parts = {key: getattr(s, key) // s.shards for key in ("questions_per_update", "dynamic_sampling_budget")}
    alone = {"evaluation": EvaluationConfig(questions=0), "trackers": [], "prometheus": ""} if number else {}
    return msgspec.structs.replace(s, **parts, **alone)


def _plan(config: Config, files: dict[str, Any], run: Path) -> list[Process]:
    """Return the processes that read the files."""
    rest, numbers = _rest(config), range(config.scheduler.shards)
    # The death of the first scheduler resumes the whole run; another one is started again alone.
    plan = [_of_shard("scheduler", "scheduler.main", n, 1, {}, vital=not n) for n in numbers]
    plan += [_of_shard("judges", "judges.serve", n, 1, rest) for n in numbers]
    if served := files.get("judge-model"):
        threads = served.model.threads
        plan.append(Process("judge-model", "tools.launching.judge_model", "judge-model", threads, False, rest))
    if "players" in files:
        plan += [_of_shard("players", "judges.serve", n, 1, {}) for n in numbers]
    if "retriever" in files:
        plan += [_of_shard("retriever", "judges.retriever.worker", n, config.retriever.threads, {}) for n in numbers]
    actors = [_actor(config, place) for place in range(config.actors.count)]
    plan += [msgspec.structs.replace(actor, shard=place % len(numbers)) for place, actor in enumerate(actors)]
    if config.learner.outside:
        return plan
    return plan + _ranks(config.learner, {} if config.cluster.on else _meeting(run, config.learner))


def _of_shard(
    kind: str, module: str, number: int, threads: int, environment: dict[str, str], vital: bool = False
) -> Process:
    """Plan a process that every shard has."""
    name = shards.called(kind, number)
    return Process(name, module, name, threads, vital, environment, shard=number)


def key_variables(settings: Any) -> frozenset[str]:
    """Return the environment variables that a process's settings name as holders of an API key (``api_key_env``), at any depth."""
    if isinstance(settings, dict):
        own = frozenset({settings["api_key_env"]} if isinstance(settings.get("api_key_env"), str) else ()) - {""}
        return own.union(*map(key_variables, settings.values()))
    return frozenset().union(*map(key_variables, settings)) if isinstance(settings, list | tuple) else frozenset()


_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "2"}
"""glibc's settings for a learner rank: memory of a tensor of 1 MiB or more returns to the system when the tensor is freed. With glibc's
defaults the heap of a rank grew to twice its contents (docs/performance.md). A decoding engine would save little memory and lose time."""


def forget_meeting(run: Path) -> None:
    """Remove the file at which the ranks of an earlier start met: it would mislead those that start now. No rank may be alive."""
    for old in run.glob("ranks-*"):
        old.unlink(missing_ok=True)


def _meeting(run: Path, learner: LearnerConfig) -> dict[str, str]:
    """Let the ranks meet at a file of the run folder, which needs no port, and talk over the loopback: torch authenticates neither."""
    forget_meeting(run)
    interface = "lo0" if sys.platform == "darwin" else "lo"
    shared = learner.publish != "file" and learner.publish_host != "127.0.0.1"  # weights leave by the same library
    own = {} if shared else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {"COPPICE_RANKS": str(run / f"ranks-{secrets.token_hex(4)}")} | own


def _ranks(learner: LearnerConfig, meeting: dict[str, str]) -> list[Process]:
    """Plan the learner's ranks. A single rank meets nobody. meeting: where they meet; on a cluster, rank 0's node says so, and each has its own GPU."""
    count, several = str(learner.count), learner.count > 1
    shared = meeting | {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count if meeting else "1"} if several else {}
    places = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank) if meeting else "0"} if several else {}
        for rank in range(learner.count)
    ]
    return [
        Process(f"learner-{rank}", "learner.main", "learner", learner.threads, True, _ALLOCATOR | shared | place)
        for rank, place in enumerate(places)
    ]


def _actor(config: Config, place: int) -> Process:
    """Plan one actor. With SGLang inside, it runs where sglang is installed; with actors.sglang.gpus it sees only its own GPUs."""
    a, name = config.actors, f"actor-{place}"
    if a.engine != "sglang":
        return Process(name, "actors.worker", name, a.threads, False)
    inside = a.sglang.way == "inside"
    shown = gpus_of(place, a.sglang.gpus, config.learner.here, hardware.visible_gpus())
    environment = dict(a.sglang.environment) if inside else {}
    environment |= {"CUDA_VISIBLE_DEVICES": ",".join(shown)} if shown else {}
    return Process(name, "actors.worker", name, a.threads, False, environment, a.sglang.python if inside else "")


def _rest(config: Config) -> dict[str, str]:
    """Give the judges' models the GPUs that neither the learner nor the actors use; if none is left, they may use any GPU."""
    gpus, a = hardware.visible_gpus(), config.actors
    own = a.count * a.sglang.gpus if a.engine == "sglang" and a.sglang.way != "url" else 0
    rest = gpus[config.learner.here + own :]
    return {"CUDA_VISIBLE_DEVICES": ",".join(rest)} if rest else {}


def gpus_of(place: int, each: int, learners: int, gpus: list[str]) -> list[str]:
    """Return the GPUs of the actor at ``place``: actors take turns on the GPUs after the learner's, or on all if too few come after.

    Raises ValueError when the machine has fewer GPUs than one actor needs.
    """
    if not each or not gpus:
        return []
    if each > len(gpus):
        raise ValueError(f"actors.sglang.gpus = {each}, and {len(gpus)} are here: {gpus}")
    own = gpus[learners:] if len(gpus) - learners >= each else gpus
    first = place * each % (len(own) // each * each)
    return own[first : first + each]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(learner: LearnerConfig, run: Path) -> str:
    """Say how the ranks of a learner from outside are started (docs/learner.md, "Several machines")."""
    return (
        f"the learner's {learner.count} ranks come from outside: start them from the repository's folder on each of N machines with\n"
        f"  torchrun --nnodes N --node-rank I --nproc-per-node {learner.count}/N --master-addr FIRST --master-port PORT"
        f" -m learner.main {run}/processes/learner.json"
    )


def describe(plan: list[Process], config: Config, model: Path) -> str:
    """Describe the plan and estimate its memory for --dry-run. model: the policy's folder."""
    uncounted = ", without the judges' model" if config.judges.model else ""
    lines = [f"  {p.name:<12} python -m {p.module} processes/{p.file}.json   {p.threads} thread(s)" for p in plan]
    need, free = memory_gib(config, model), free_gib()
    estimate = f"memory: about {need:.1f} GiB of {free:.1f} GiB free (weights, caches, activations{uncounted})"
    return "\n".join([*lines, estimate])


def memory_warning(config: Config, model: Path) -> str:
    """Return a warning that names the largest plan that fits, if a run on CPUs needs more memory than is free; "" otherwise."""
    need, free = memory_gib(config, model), free_gib()
    if need <= free or hardware.visible_gpus() or config.cluster.on:
        return ""
    warning = f"warning: this plan needs about {need:.1f} GiB of memory and {free:.1f} are free, so that the system may kill it: "
    fewest = config.scheduler.shards
    sizes = [(a, w) for a in range(fewest, config.actors.count + 1) for w in range(1, config.learner.count + 1)]
    fitting = [size for size in sizes if memory_gib(_sized(config, *size), model) <= free]
    if fitting:
        actors, ranks = max(fitting, key=lambda size: (sum(size), size[0]))
        less = memory_gib(_sized(config, actors, ranks), model)
        return f"{warning}--actors {actors} --learner {ranks} fits ({less:.1f} GiB)"
    least = memory_gib(_sized(config, fewest, 1), model)
    return (
        f"{warning}even --actors {fewest} --learner 1 needs {least:.1f} GiB. Set a smaller actors.kv_cache_gib"
        f" (now {config.actors.kv_cache_gib}) or learner.micro_tokens (now {config.learner.micro_tokens}), or take a smaller model"
    )


def _sized(config: Config, actors: int, ranks: int) -> Config:
    replace = msgspec.structs.replace
    return replace(config, actors=replace(config.actors, count=actors), learner=replace(config.learner, count=ranks))


def typed(config: Config) -> Config:
    """Return the config with model.dtype written to the rooms that name no number type, and to the arguments of SGLang where actors start it."""
    dtype, a, w, replace = config.model.dtype, config.actors, config.learner, msgspec.structs.replace
    w = replace(w, dtype=dtype if w.dtype == "auto" else w.dtype)
    if a.engine != "sglang":
        a = replace(a, dtype=dtype if a.dtype == "auto" else a.dtype)
    elif a.sglang.way != "url" and dtype != "auto":
        a = replace(a, sglang=replace(a.sglang, arguments={"dtype": dtype} | a.sglang.arguments))
    return replace(config, actors=a, learner=w)


def number_type(config: Config, model: Path | None = None) -> str:
    """Describe the number type in which the run computes, the reason for it, and the setting that changes it. model: the policy's folder."""
    config = typed(config)
    learner, why = hardware.dtype_and_reason(config.learner.dtype)
    actors, reason = _acting(config, model)
    if not actors:
        return f"number type of the learner: {learner} ({why}; model.dtype); that of the SGLang servers is their own and must be the same"
    if actors != learner:
        return (
            f"warning: the learner computes in {learner} ({why}) and the actors in {actors} ({reason}): the log-probabilities of the same"
            " tokens then differ by rounding, which the correction cannot tell from staleness; set model.dtype, and neither learner.dtype,"
            " actors.dtype nor actors.sglang.arguments.dtype"
        )
    chosen = learner == "bfloat16" and config.learner.dtype == "auto"
    change = "; --set model.dtype=float32 changes it" if chosen else ""
    return f"number type {learner} ({why}{change})"


def _acting(config: Config, model: Path | None) -> tuple[str, str]:
    """Return the number type of the actors and the reason; "" if only a server that runs elsewhere, or a model not yet here, could tell."""
    a = config.actors
    if a.engine != "sglang":
        return hardware.dtype_and_reason(a.dtype)
    argument = str(a.sglang.arguments.get("dtype", "auto"))
    if argument != "auto":
        return {"half": "float16", "float": "float32"}.get(argument, argument), "actors.sglang.arguments.dtype"
    stored = "" if model is None or a.sglang.way == "url" else model_shape(model).get("dtype", "")
    if not stored:
        return "", ""
    return "bfloat16" if stored == "bfloat16" else "float16", f"SGLang's choice for weights stored in {stored}"


def model_shape(model: Path) -> dict[str, Any]:
    """Return the settings of a model's folder, with the number type of its weights as "dtype"; {} if it is not on this disk yet."""
    settings = model / "config.json"
    shape = msgspec.json.decode(settings.read_bytes()) if settings.is_file() else {}
    return {"dtype": shape["torch_dtype"]} | shape if "torch_dtype" in shape else shape


_PROCESS_GIB, _REST_GIB = 0.4, 0.6
"""GiB that a process with torch takes beside weights, caches and activations (libraries, buffers, memory that the allocator keeps), and GiB
that the retriever, launcher, scheduler and judges take together. See docs/performance.md."""
_SAVED = 9, 4
"""Numbers kept for the backward pass per token and layer, as multiples of the hidden width and of the intermediate width."""


def memory_gib(config: Config, model: Path) -> float:
    """Estimate the most main memory that all processes hold together, in GiB. The weights of a model not yet on disk count as 0."""
    shape = model_shape(model)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    weights = size / (4 if shape.get("dtype") == "float32" else 2)
    return sum(count * each for count, each in memory_parts(config, shape, weights).values())


def memory_parts(config: Config, shape: dict[str, Any], weights: float) -> dict[str, tuple[int, float]]:
    """Estimate the main memory of each kind of process, as (how many, GiB of each). shape: a model's config.json; weights: their number."""
    config = typed(config)
    a, w, served = config.actors, config.learner, config.judges.model
    acting, learning = (4 if hardware.compute_dtype(d) == "float32" else 2 for d in (a.dtype, w.dtype))
    frozen, own = rank_gib(w, shape, weights, learning)
    parts = {"actor": (a.count, weights * acting / 2**30 + a.kv_cache_gib + _PROCESS_GIB)}
    parts["learner rank"] = w.here, own + _PROCESS_GIB
    if frozen and w.here:  # the ranks of one machine share them
        parts["frozen weights"] = 1, frozen
    parts |= {"judges' model": (1, served.kv_cache_gib + 1.1)} if served else {}
    return parts | {"all others": (config.scheduler.shards, _REST_GIB)}


def rank_gib(w: LearnerConfig, shape: dict[str, Any], weights: float, size: int) -> tuple[float, float]:
    """Estimate what a learner rank holds of a model, in GiB: its frozen weights, and the rest. size: bytes of a number in which it computes.

    A trained weight takes 16 bytes (with its gradient and moments), also one of a critic or reward model, and adapters with theirs take a fifth of
    the frozen weights at most. A policy whose weights all train is kept as it began, too, if a KL is measured to it.
    """
    needs = schemes.load(w.scheme, w.scheme_options).needs.models
    kept = size if needs & {"kl"} or w.kl_coef or w.kl_reward_coef else 0
    hidden, inner, layers = (shape.get(name, 0) for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    layer = _SAVED[0] * hidden + _SAVED[1] * inner
    saved = w.micro_tokens * (layer + layers * hidden if w.gradient_checkpointing else layers * layer)
    parts = w.shards
    frozen, trained = (weights * size, weights * 0.8) if w.lora.rank else (0.0, weights * (16 + kept))
    trained += sum(16 * weights for model in (w.critic, w.prm) if model is not None and model.lora is None)
    return frozen / parts / 2**30, (trained / parts + saved * (4 if size == 4 else 3)) / 2**30


def free_gib() -> float:
    """Return the GiB that a run may take on this machine."""
    return hardware.free_memory() / 2**30
