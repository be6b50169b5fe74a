"""Settings of the scheduler."""

from typing import Annotated, Any

import msgspec

from coppice.common.declared import Equal
from coppice.common.numbers import Count, Natural, NotNegative, Positive
from coppice.common.shards import Shard
from coppice.scheduler.dispatch.dispatcher import DispatchConfig

UNJUDGED = "none"
"""The value of scheduler.judge for a run that learns from outcomes alone: no turn is judged."""


class EvaluationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [scheduler.evaluation]: held-out evaluation by whole trajectories.

    questions: size of the fixed held-out subset (the same for every seed; 0 switches evaluation
    off). every: updates between further evaluations (0: only the first and the last). temperature:
    0 is greedy. options: environment options that replace those of data.options, such as a fixed
    opponent.
    """

    questions: Natural = 128
    every: Natural = 0
    temperature: NotNegative = 0.0
    options: dict[str, Any] = {}


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [scheduler].

    strategy: a module of scheduler/strategies, or module:grow; strategy_options: the keyword
    arguments of grow. budget: the largest number of steps, B. judge: the service judge.<judge>, or
    "none". temperature, top_p, top_k: how training rollouts are sampled (top_p 1 and top_k 0 leave
    the distribution whole). max_action_tokens: the limit of one action. thinking: ask for a
    thinking block, if the chat template has that switch. updates: how many the run makes.
    questions_per_update: trees per update. max_staleness: the updates that trees are old in the
    mean at most (scheduler/ledger/pacing.py). dynamic_sampling_budget: how many questions without any
    spread of the reward may be replaced for an update (scheduler/growth/dynamic_sampling.py; 0: none).
    shards: the number of schedulers that share the learner (docs/performance.md, "Beyond one event
    loop"). bind: the ZeroMQ address on which workers connect; port 0 is any free one.
    generate_deadline_s: seconds until a generate call fails. judge_deadline_s: the same for calls
    of judges, retrievers, opponents and speakers. startup_timeout_s: seconds for which the
    scheduler waits for the workers that the run needs. watchdog_s: the terminal says what waits for
    what when nothing has moved for so long; stall_s: then the stuck part is replaced
    (docs/reliability.md). trackers: "wandb", "trackio" or both; prometheus: host:port of an
    endpoint for Prometheus, with port 0 for any free one ("": none); see docs/metrics.md.
    """

    strategy: str = "slate"
    strategy_options: dict[str, Any] = {}
    budget: Count = 4
    judge: str = "slate_rules"
    temperature: Positive = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Natural = 0
    max_action_tokens: Count = 500
    thinking: bool = True
    updates: Count = 100
    questions_per_update: Count = 32
    max_staleness: Natural = 1
    dynamic_sampling_budget: Natural = 0
    shards: Count = 1
    evaluation: EvaluationConfig = EvaluationConfig()
    dispatch: DispatchConfig = DispatchConfig()
    bind: str = "tcp://127.0.0.1:0"
    generate_deadline_s: Positive = 600.0
    judge_deadline_s: Positive = 120.0
    startup_timeout_s: Positive = 600.0
    watchdog_s: Positive = 120.0
    stall_s: Positive = 1800.0
    trackers: list[str] = []
    prometheus: str = ""


class SchedulerProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The scheduler's process file. model: a Hugging Face folder, for its tokenizer and chat
    template.

    environment, options: see actors/environments/registry.py. train, heldout: one task file or
    several ("" if the environment makes its tasks). services: the services to wait for, besides
    actors. most: the largest number of samples in one generate call. longest: the most tokens of a
    prompt and its action; 0 sets no limit. reward, equal: the column that dynamic sampling reads,
    and how it compares (``common.declared.SchemeNeeds``). deterministic: trees that a crash cut off
    grow anew (docs/reliability.md). shard: which of the run's schedulers this is; the counts of
    ``scheduler`` and ``actors`` are then its share, and ``run`` is the folder of the whole run.
    batch: the samples that an actor decodes together. evidence: whether the judge scores queries by
    the tasks' supporting passages.
    """

    name: str
    run: str
    seed: int
    model: str
    environment: str
    options: dict[str, Any]
    train: str | list[str]
    heldout: str | list[str]
    actors: int
    services: list[str]
    most: int
    scheduler: SchedulerConfig
    longest: int = 0
    reward: str = ""
    equal: Equal = "returns"
    deterministic: bool = False
    shard: Shard = Shard()
    batch: int = 24
    evidence: bool = False
