"""The settings of an experiment as typed structs: one section per room, and the settings of the
launcher itself."""

from typing import Any, Literal

import msgspec

from coppice.actors.config import ActorsConfig
from coppice.common.numbers import Count, Natural
from coppice.judges.config import JudgesConfig, RetrieverConfig
from coppice.learner.config import LearnerConfig
from coppice.scheduler.config import SchedulerConfig
from coppice.tools.defaults.settings import WarmStart


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [model]. name: "smollm2-135m", a Hugging Face folder or a hub id. dtype: the number
    type of actors and learner; actors.dtype and learner.dtype override it. "auto" is bfloat16 if
    the machine is faster in it, otherwise float32."""

    name: str = "smollm2-135m"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [data]. "default" means the built-in corpus and its questions; other values are paths
    (JSONL, Parquet) or hub datasets.

    train, heldout: one source or a list of sources (actors/environments/task_files.py).
    environment: a name from actors/environments/registry.py, or module:Class. options: arguments of
    the environment's constructor. An environment that makes its own tasks (a game) reads no files.
    agent: "module:function" or a command line, which is trained in the place of an environment
    (docs/agents.md); options are then those of the environment "agent".
    """

    train: str | list[str] = "default"
    heldout: str | list[str] = "default"
    corpus: str = "default"
    environment: str = "search_qa"
    agent: str = ""
    options: dict[str, Any] = {}


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [cluster]: where the processes run (docs/cluster.md).

    on: "" for this machine, "ray" for the Ray cluster of which this machine is a node,
    "ray://HOST:PORT" for one elsewhere. The other keys are for the job that ``--cluster slurm`` or
    ``--cluster kuberay`` writes. cpus, gpus, memory_gib: of one node. options: further options of
    sbatch, such as "--partition=h100". image: the container image, with this project in ``folder``.
    volume: the claim of the volume that all pods share. secret: the Kubernetes secret whose entries
    become variables (API keys).
    """

    on: str = ""
    cpus: Count = 16
    gpus: Natural = 8
    memory_gib: Count = 128
    options: list[str] = []
    image: str = ""
    folder: str = "/coppice"
    volume: str = ""
    secret: str = ""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole experiment. runs: the folder that holds the run folders. threads: compute threads of
    the set-up (index, warm start).

    deterministic: the same config on the same machine gives the same weights, bit for bit, also
    after any crash (docs/reliability.md). It needs scheduler.max_staleness = 0 and the embedded
    engine, which then serves one request at a time and reuses no prefix.
    """

    name: str
    seed: Natural = 0
    deterministic: bool = False
    runs: str = "runs"
    threads: Count = 2
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    warm_start: WarmStart = WarmStart()
    scheduler: SchedulerConfig = SchedulerConfig()
    actors: ActorsConfig = ActorsConfig()
    judges: JudgesConfig = JudgesConfig()
    retriever: RetrieverConfig = RetrieverConfig()
    learner: LearnerConfig = LearnerConfig()
    cluster: ClusterConfig = ClusterConfig()


def with_agent(config: Config) -> Config:
    """The config with ``data.agent`` as what it stands for: the environment "agent" and its option
    ``run``. Raises ValueError."""
    data = config.data
    if not data.agent:
        return config
    if data.environment not in (DataConfig().environment, "agent") or "run" in data.options:
        raise ValueError(
            f"data.agent = {data.agent!r} takes the place of data.environment and data.options.run: leave those out"
        )
    data = msgspec.structs.replace(
        data, environment="agent", agent="", options={**data.options, "run": data.agent}
    )
    return msgspec.structs.replace(config, data=data)
