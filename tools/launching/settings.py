"""The settings of an experiment as typed structs: one section per room, and the settings of the
launcher itself."""

import operator
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from coppice.actors.config import ActorsConfig
from coppice.common.numbers import Count, Natural
from coppice.judges.config import JudgeModelConfig, JudgesConfig, RetrieverConfig
from coppice.learner.config import LearnerConfig
from coppice.scheduler.config import SchedulerConfig
from coppice.tools.defaults.settings import WarmStart


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [model]: the policy."""

    name: str = "smollm2-135m"
    """The built-in "smollm2-135m", a model that Coppice makes ("tiny-search"), a Hugging Face
    folder or a hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number type of actors and learner, which their own dtype overrides; "auto" is bfloat16 if the
    machine is faster in it, otherwise float32."""


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [data]: the tasks. "default" means the built-in corpus and its questions; other
    values are paths (JSONL, Parquet) or hub datasets."""

    train: str | list[str] = "default"
    """One source of training tasks or a list of them (docs/data.md)."""
    heldout: str | list[str] = "default"
    """One source of held-out tasks or a list of them."""
    corpus: str = "default"
    """The passages that searches find: JSONL of {id, contents}."""
    environment: str = "search_qa"
    """A name of actors/environments/registry.py, or module:Class. A game reads no files."""
    agent: str = ""
    """What to train: "module:function" or a command line, not an environment (docs/agents.md)."""
    options: dict[str, Any] = {}
    """Arguments of the environment's constructor; with an agent, those of environment "agent"."""


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [cluster]: where the processes run (docs/cluster.md). The keys after ``pass_env`` are
    for the job that ``--cluster slurm`` or ``--cluster kuberay`` writes."""

    on: str = ""
    """Empty for this machine, "ray" for the cluster of which it is a node, or "ray://HOST:PORT"."""
    pass_env: list[str] = []
    """Further variables of the launcher that processes on other nodes get."""
    cpus: Count = 16
    """Processors of one node."""
    gpus: Natural = 8
    """GPUs of one node."""
    memory_gib: Count = 128
    """Memory of one node, in GiB."""
    partition: str = ""
    """SLURM's partition, "" for its default."""
    time: str = "24:00:00"
    """The time limit of a SLURM job, as sbatch writes it."""
    options: list[str] = []
    """Further options of sbatch, such as "--account=lab"."""
    image: str = ""
    """The container image, with this project in ``folder``."""
    folder: str = "/coppice"
    """Where the image has what the config names, such as plug-ins."""
    volume: str = ""
    """The claim of the volume that all pods share (ReadWriteMany)."""
    secret: str = ""
    """The Kubernetes secret whose entries become variables of the launcher (API keys)."""
    pod: dict[str, Any] = {}
    """Further keys of the pods' spec, such as nodeSelector, tolerations, imagePullSecrets."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole experiment."""

    name: str
    """Names the run folder, and the run in trackers and reports."""
    method: str = ""
    """The word of a method, whose parts lie under this config (docs/methods-table.md); "": none."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    """Draws the tasks, samples and weights of the run."""
    deterministic: bool = False
    """The same config on the same machine gives the same weights, bit for bit, also after any crash
    (docs/reliability.md). It needs scheduler.max_staleness = 0 and the embedded engine, which then
    serves one request at a time and reuses no prefix."""
    runs: str = "runs"
    """The folder that holds the run folders."""
    threads: Count = 2
    """Compute threads of the set-up (index, warm start)."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    warm_start: WarmStart = WarmStart()
    scheduler: SchedulerConfig = SchedulerConfig()
    actors: ActorsConfig = ActorsConfig()
    judges: JudgesConfig = JudgesConfig()
    retriever: RetrieverConfig = RetrieverConfig()
    learner: LearnerConfig = LearnerConfig()
    cluster: ClusterConfig = ClusterConfig()


class Assets(msgspec.Struct, frozen=True):
    """What a run needs before its processes start, with resolved paths. train and heldout are ""
    when the environment makes its own tasks. retriever is an index folder, a URL, or "" for none.
    judge_model is the folder of [judges.model], or "" for none."""

    model: str
    train: str | list[str]
    heldout: str | list[str]
    retriever: str
    judge_model: str = ""


JUDGE_HOST = "127.0.0.1"


class JudgeModelProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The process file of [judges.model]. folder: the model's Hugging Face folder."""

    name: str
    run: str
    folder: str
    port: int
    model: JudgeModelConfig


def with_agent(config: Config) -> Config:
    """The config with ``data.agent`` as what it stands for: the environment "agent" and its option
    ``run``. Raises ValueError."""
    data = config.data
    if not data.agent:
        return config
    if data.environment not in (DataConfig().environment, "agent") or "run" in data.options:
        raise ValueError(
            f"data.agent = {data.agent!r}: leave out data.environment and data.options.run, whose"
            " place it takes"
        )
    options = {**data.options, "run": data.agent}
    data = replace(data, environment="agent", agent="", options=options)
    return replace(config, data=data)


ADAPTERS_AT_ONCE = {"max_loras_per_batch": 2, "max_loaded_loras": 3}
"""SGLang's limits. Running requests keep the adapter with which they began, new requests use the
newest one, and a third may be loading."""


VLLM_ADAPTERS = {"max_loras": 2, "max_cpu_loras": 3}
"""The same for vLLM."""
VLLM_RANKS = 1, 8, 16, 32, 64, 128, 256, 320, 512


def with_arguments(config: Config) -> Config:
    """Add the arguments that a server which actors start needs for adapters, whose target layers
    follow from the model's files, and for experts."""
    a, rank, added = config.actors, config.learner.lora.rank, dict[str, Any]()
    if a.served is None or a.served.way == "url":
        return config
    added |= {"enable_lora": True, "max_lora_rank": rank} if rank else {}
    if a.engine == "vllm" and rank:  # which takes a few ranks only
        least = next((one for one in VLLM_RANKS if one >= rank), rank)
        added |= {"max_lora_rank": least} | VLLM_ADAPTERS
    # other runners choose experts inside their kernels, and report expert 0 of each token
    replayed = {"enable_return_routed_experts": True, "moe_runner_backend": "triton"}
    added |= replayed if config.learner.routing_replay else {}
    return replace(config, actors=with_more(a, added))


def with_more(actors: ActorsConfig, more: dict[str, Any]) -> ActorsConfig:
    """Give the servers that actors start further arguments. The user's own stay."""
    served = actors.served
    assert served is not None
    changed: Any = {actors.engine: replace(served, arguments=more | served.arguments)}
    return replace(actors, **changed)


_DEFAULT = Config("")


def setting(config: Config, *keys: str) -> str:
    """Name settings with their values: "learner.lr = 1e-06 and seed = 0"."""
    return " and ".join(f"{key} = {operator.attrgetter(key)(config)!r}" for key in keys)


def idle(config: Config, why: str, *keys: str) -> Iterator[str]:
    """Yield a fault for each key that is set although it has no effect."""
    for key in keys:
        value = operator.attrgetter(key)(config)
        if value != operator.attrgetter(key)(_DEFAULT):
            shown = f"[{key}]" if isinstance(value, msgspec.Struct) else setting(config, key)
            yield f"{shown} has no effect {why}: remove it"
