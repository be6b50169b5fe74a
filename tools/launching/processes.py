"""The processes of a run: name, module, process file and environment of each."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from coppice.actors.config import ActorProcess
from coppice.actors.environments.task_files import listed
from coppice.common import hardware, shards
from coppice.common.atomic import as_json
from coppice.common.process import die_with, free_port
from coppice.judges.base import Judge
from coppice.judges.config import with_served_model
from coppice.judges.retriever.worker import RetrieverProcess
from coppice.judges.serve import PLAYERS, JudgeProcess, built_in_service, make_worker
from coppice.judges.slate import SlateRules
from coppice.learner import schemes
from coppice.learner.config import LearnerConfig, LearnerProcess
from coppice.scheduler.config import EvaluationConfig, SchedulerConfig, SchedulerProcess
from coppice.scheduler.dispatch.bounds import JudgeGives
from coppice.scheduler.telemetry.tracking import KEYS
from coppice.tools.defaults.settings import importable
from coppice.tools.launching import record
from coppice.tools.launching.config import Config, leaves
from coppice.tools.launching.memory import gpus_left, gpus_of, typed
from coppice.tools.launching.method import strategy_options
from coppice.tools.launching.settings import JUDGE_HOST, Assets, JudgeModelProcess


class PlannedProcess(msgspec.Struct, frozen=True):
    """One process, ``python -m module RUN/processes/<file>.json``. vital: when this process dies,
    the whole run stops or is resumed; other processes are restarted alone. withheld: variables of
    the launcher that it must not see, because they hold the API keys of others. needed: those that
    it needs. shard: the scheduler to which it belongs, None for what all schedulers share."""

    name: str
    module: str
    file: str
    threads: int = 1
    vital: bool = False
    environment: dict[str, str] = {}
    withheld: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()
    shard: int | None = None


def make(config: Config, assets: Assets, run: Path) -> list[PlannedProcess]:
    """Write the process files and return the plan, the schedulers first."""
    config = typed(config)
    w, s = config.learner, config.scheduler
    # A schedule without an end of its own ends with the run.
    settings = replace(w, decay_updates=w.decay_updates or s.updates)
    learner = LearnerProcess(
        "learner", str(run), config.seed, assets.model, s.questions_per_update, s.temperature,
        settings, s.shards, s.max_staleness, str(run) if config.actors.colocated else "",
        at_once(config)[1],
    )  # fmt: skip
    plan, bodies = list[PlannedProcess](), dict[str, Any](learner=learner)
    for process, body in _planned(config, assets, run):
        plan.append(process)
        bodies[process.file] = body
    if not w.outside:
        plan += _ranks(w, {} if config.cluster.on else _meeting(run, w))
    (run / "processes").mkdir(parents=True, exist_ok=True)
    for name, body in bodies.items():
        (run / "processes" / f"{name}.json").write_bytes(as_json(body))
    needed = {file: key_variables(msgspec.to_builtins(body)) for file, body in bodies.items()}
    needed["scheduler"] |= KEYS  # the first one starts the trackers
    everybody = frozenset().union(*needed.values())
    return [replace(p, withheld=everybody - needed[p.file], needed=needed[p.file]) for p in plan]


def _planned(config: Config, assets: Assets, run: Path) -> Iterator[tuple[PlannedProcess, Any]]:
    w, a, data = config.learner, config.actors, config.data
    s = replace(config.scheduler, strategy_options=strategy_options(config))
    needs = schemes.load(w.scheme, w.scheme_options).needs
    homes = [str(shards.folder(run, number)) for number in range(s.shards)]

    def each(kind: str, module: str, **more: Any) -> Iterator[tuple[PlannedProcess, str, int]]:
        """One process of a kind for each scheduler, with its folder and number."""
        for number, home in enumerate(homes):
            name = shards.called(kind, number)
            yield PlannedProcess(name, module, name, shard=number, **more), home, number

    # A plug-in announces its own name, so only built-in services are waited for.
    services = [service for service in map(built_in_service, config.judges.use) if service]
    services += ["retrieve"] if assets.retriever else []
    judges = {k: v for k, v in config.judges.use.items() if k not in PLAYERS}
    served = None
    if config.judges.model is not None:
        name, port = "judge-model", free_port()
        served = JudgeModelProcess(name, str(run), assets.judge_model, port, config.judges.model)
        url = f"http://{JUDGE_HOST}:{port}/v1"
        judges = {k: with_served_model(v, url, served.model) for k, v in judges.items()}
    own = [make_worker(*item) for item in judges.items()]
    gives = {j.service: JudgeGives((*j.columns,), j.limits) for j in own if isinstance(j, Judge)}
    # The death of the first scheduler resumes the whole run; another one is started again alone.
    for process, _, number in each("scheduler", "coppice.scheduler.main"):
        actors = 1 if config.cluster.on else len(range(number, a.count, s.shards))
        yield replace(process, vital=not number), SchedulerProcess(
            process.name, str(run), config.seed, assets.model, data.environment, data.options,
            assets.train, assets.heldout, actors, services, max(1, a.max_batch // 4),
            _share(s, number), a.max_context, needs.reward_column, needs.equal,
            config.deterministic, shards.Shard(number, s.shards), a.max_batch,
            reads_evidence(config), w.routing_replay, gives, _inputs(config, assets, run),
        )  # fmt: skip
    rest = _shown(gpus_left(config, hardware.visible_gpus()))
    if served is not None:
        name, module = served.name, "coppice.tools.launching.serve_model"
        yield PlannedProcess(name, module, name, served.model.threads, environment=rest), served
    for process, home, _ in each("judges", "coppice.judges.serve", environment=rest):
        yield process, JudgeProcess(process.name, home, judges)
    # opponents run apart from the judges, because a slow oracle would keep them waiting
    if players := {k: v for k, v in config.judges.use.items() if k in PLAYERS}:
        for process, home, _ in each("players", "coppice.judges.serve"):
            yield process, JudgeProcess(process.name, home, players)
    if assets.retriever:
        # Joining depends on time, and a query's vector in its last bits on what it is joined with.
        batch = 1 if config.deterministic else config.retriever.batch
        settings = replace(config.retriever, backend=assets.retriever, batch=batch)
        module = "coppice.judges.retriever.worker"
        for process, home, _ in each(
            "retriever", module, threads=settings.threads, environment=rest
        ):
            yield process, RetrieverProcess(process.name, home, settings)
    for place in range(a.count):
        process, seed = _actor(config, place), config.seed * 1000 + place
        yield process, ActorProcess(
            process.name, homes[place % s.shards], seed, assets.model, a, place,
            place >= at_once(config)[0], config.deterministic, str(run) if a.colocated else "",
        )  # fmt: skip


def _inputs(config: Config, assets: Assets, run: Path) -> dict[str, str]:
    """Return the files that a run's trees are made from, by setting: of tasks, index, plug-ins and
    their options; and those of the config and of the machine with its commit."""
    data = config.data
    inputs = {name: str(run / name) for name in ("config.json", record.ENVIRONMENT)}
    index = Path(assets.retriever, "manifest.json")  # with the corpus's digest
    inputs |= {"index": str(index)} if assets.retriever and index.is_file() else {}
    for key, tasks in (("data.train", assets.train), ("data.heldout", assets.heldout)):
        inputs |= {f"{key}[{i}]": path for i, path in enumerate(listed(tasks) if tasks else [])}
    uses = {"data.environment": (data.environment, {}), "data.options": ("", data.options)}
    uses |= {f"judges.use.{name}": (name, own) for name, own in config.judges.use.items()}
    uses |= {"scheduler.strategy": (config.scheduler.strategy, {})}
    for use, (name, own) in uses.items():
        for key, value in {use: name, **{f"{use}.{option}": own[option] for option in own}}.items():
            module, colon, _ = str(value).partition(":")
            loaded = sys.modules.get(module) if colon else None  # the rules have imported plug-ins
            words = [getattr(loaded, "__file__", None) or module, *str(value).split()]
            if files := [*filter(os.path.isfile, words)]:
                inputs[key] = files[0]
    return inputs


def reads_evidence(config: Config) -> bool:
    """Return whether the run's judge scores queries by the tasks' supporting passages."""
    name = SlateRules.name
    options = config.judges.use.get(name, {})
    return config.scheduler.judge == name and SlateRules(**options).query == "evidence"


def _share(s: SchedulerConfig, number: int) -> SchedulerConfig:
    """Return the settings of one shard: its equal part of every update. The first shard alone
    evaluates and tracks."""
    shared = ("questions_per_update", "dynamic_sampling_budget")
    parts: dict[str, Any] = {key: getattr(s, key) // s.shards for key in shared}
    if number:
        parts |= {"evaluation": EvaluationConfig(questions=0), "trackers": [], "prometheus": ""}
    return replace(s, **parts)


def process_variables(threads: int) -> dict[str, str]:
    """Return the variables of every process. threads: its compute threads."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def spawn(
    command: list[str], inherited: Mapping[str, str], own: Mapping[str, str], stdout: Any,
    stderr: Any, cwd: str | Path | None = None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a process that finds this package. It gets a session of its own, so that Ctrl-C reaches
    only the launcher, and is killed with this process. own: variables beside the inherited."""
    launcher = os.getpid()

    def alone() -> None:
        os.setsid()
        die_with(launcher)

    environment = complete(inherited, own)
    return subprocess.Popen(
        command, env=environment, stdout=stdout, stderr=stderr, cwd=cwd, preexec_fn=alone
    )


def complete(inherited: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that finds this package, its own beside the inherited."""
    paths = [path for path in (own.get("PYTHONPATH"), str(importable())) if path]
    return {**inherited, **own, "PYTHONPATH": os.pathsep.join(paths)}


def key_variables(settings: Any) -> frozenset[str]:
    """Return the environment variables that a process's settings name as holders of an API key
    (``api_key_env``), at any depth."""
    named = (name for path, name in leaves(settings) if path.split(".")[-1] == "api_key_env")
    return frozenset(name for name in named if name and isinstance(name, str))


def _meeting(run: Path, learner: LearnerConfig) -> dict[str, str]:
    """Let the ranks meet at a file of the run folder, which needs no port, and talk over the
    loopback: torch authenticates neither."""
    for old in run.glob("ranks-*"):  # of an earlier start: it would mislead those that start now
        old.unlink(missing_ok=True)
    interface = "lo0" if sys.platform == "darwin" else "lo"
    # weights leave by the same library
    shared = learner.publish != "file" and learner.publish_host != "127.0.0.1"
    own = {} if shared else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {"COPPICE_RANKS": str(run / f"ranks-{secrets.token_hex(4)}")} | own


def _ranks(learner: LearnerConfig, meeting: dict[str, str]) -> Iterator[PlannedProcess]:
    """Plan the learner's ranks. A single rank meets nobody. meeting: where they meet; on a cluster,
    rank 0's node says so, and each has its own GPU."""
    for rank in range(learner.count):
        own = dict[str, str]()
        if learner.count > 1:
            own |= meeting | {"WORLD_SIZE": str(learner.count), "RANK": str(rank)}
            own["LOCAL_WORLD_SIZE"] = str(learner.count) if meeting else "1"
            own["LOCAL_RANK"] = str(rank) if meeting else "0"
        name, threads = f"learner-{rank}", learner.threads
        yield PlannedProcess(name, "coppice.learner.main", "learner", threads, True, own)


def _actor(config: Config, place: int) -> PlannedProcess:
    a, name, shard = config.actors, f"actor-{place}", place % config.scheduler.shards
    actor = PlannedProcess(name, "coppice.actors.worker", name, a.threads, shard=shard)
    if a.served is None or config.cluster.on:  # whose nodes give GPUs
        return actor
    before = 0 if a.colocated else config.learner.here
    shown = gpus_of(place, a.served.gpus, before, hardware.visible_gpus())
    return replace(actor, environment=_shown(shown))


def at_once(config: Config) -> tuple[int, int]:
    """Return how many actors and how many ranks compute at once: each as many as have a core. Two
    actors on one core would both decode smaller batches, and two ranks both compute the trunks."""
    a, w = config.actors, config.learner
    elsewhere = config.cluster.on or a.served is not None or w.outside or hardware.visible_gpus()
    if elsewhere or config.deterministic or w.sharding != "replicate":
        return a.count, w.count
    cores = hardware.cores()
    return max(1, min(a.count, cores // a.threads)), max(1, min(w.count, cores // w.threads))


def _shown(gpus: list[str]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def torchrun(learner: LearnerConfig, run: Path) -> str:
    """Say how the ranks of a learner from outside are started (docs/learner.md, "Several
    machines")."""
    return (
        f"the learner's {learner.count} ranks come from outside:"
        " start them from the repository's folder on each of N machines with\n"
        f"  torchrun --nnodes N --node-rank I --nproc-per-node {learner.count}/N"
        " --master-addr FIRST --master-port PORT"
        f" -m coppice.learner.main {run}/processes/learner.json"
    )
