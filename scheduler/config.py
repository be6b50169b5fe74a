"""Settings of the scheduler."""

from typing import Annotated, Any

import msgspec

from coppice.common.declared import Equal
from coppice.common.numbers import Count, Natural, NotNegative, Positive
from coppice.common.shards import Shard
from coppice.scheduler.dispatch.bounds import JudgeGives
from coppice.scheduler.dispatch.dispatcher import DispatchConfig

UNJUDGED = "none"
"""The value of scheduler.judge for a run that learns from outcomes alone: no turn is judged."""


class EvaluationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [scheduler.evaluation]: held-out evaluation by whole trajectories."""

    questions: Natural = 128
    """Size of the fixed held-out subset, the same for every seed; 0 switches evaluation off."""
    every: Natural = 0
    """Updates between further evaluations; 0: only the first and the last."""
    temperature: NotNegative = 0.0
    """Of the sampling; 0 is greedy."""
    options: dict[str, Any] = {}
    """Environment options that replace those of data.options, such as a fixed opponent."""


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [scheduler]."""

    strategy: str = "slate"
    """A module of scheduler/growth/strategies, or module:grow."""
    strategy_options: dict[str, Any] = {}
    """The keyword arguments of grow."""
    budget: Count = 4
    """The largest number of steps, B."""
    judge: str = "slate_rules"
    """The service judge.<judge>, or "none"."""
    temperature: Positive = 1.0
    """Of training rollouts."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Of training rollouts; 1 leaves the distribution whole."""
    top_k: Natural = 0
    """Of training rollouts; 0 leaves the distribution whole."""
    max_action_tokens: Count = 500
    """The limit of one action, in tokens."""
    thinking: bool = True
    """Ask for a thinking block, if the chat template has that switch."""
    updates: Count = 100
    """How many the run makes."""
    questions_per_update: Count = 32
    """Trees per update."""
    hops_in_turn: bool = False
    """Draw questions of one hop, of two, .. in turn instead of as often as the files have them."""
    max_staleness: Natural = 1
    """The updates that trees are old in the mean at most (scheduler/ledger/pacing.py)."""
    dynamic_sampling_budget: Natural = 0
    """Questions without any spread of the reward that may be replaced for an update; 0: none."""
    shards: Count = 1
    """Schedulers that share the learner (docs/performance.md, "Beyond one event loop")."""
    keep_versions: Natural = 0
    """Versions whose trees and calls stay on the disk, besides held-out and quarantined trees and
    those since the oldest checkpoint (docs/reliability.md); 0: all."""
    evaluation: EvaluationConfig = EvaluationConfig()
    dispatch: DispatchConfig = DispatchConfig()
    bind: str = "tcp://127.0.0.1:0"
    """The ZeroMQ address on which workers connect; port 0 is any free one."""
    generate_deadline_s: Positive = 600.0
    """Seconds until a generate call fails."""
    judge_deadline_s: Positive = 120.0
    """The same for calls of judges, retrievers, opponents and speakers."""
    startup_timeout_s: Positive = 600.0
    """Seconds for which the scheduler waits for the workers that the run needs."""
    watchdog_s: Positive = 120.0
    """Seconds without progress after which the terminal says what waits for what."""
    stall_s: Positive = 1800.0
    """Seconds without progress after which the stuck part is replaced (docs/reliability.md)."""
    trackers: list[str] = []
    """The trackers "wandb", "trackio" or both (docs/metrics.md)."""
    prometheus: str = ""
    """host:port of an endpoint for Prometheus, with port 0 for any free one; "": none."""


class SchedulerProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The scheduler's process file."""

    name: str
    run: str
    """The folder of the whole run."""
    seed: int
    model: str
    """A Hugging Face folder, for its tokenizer and chat template."""
    environment: str
    """See actors/environments/registry.py, also for ``options``."""
    options: dict[str, Any]
    train: str | list[str]
    """One task file or several; "" if the environment makes its tasks."""
    heldout: str | list[str]
    """The same for evaluation."""
    actors: int
    """How many to wait for, of the share of this shard."""
    services: list[str]
    """The services to wait for besides actors."""
    most: int
    """The largest number of samples in one generate call."""
    scheduler: SchedulerConfig
    """Its counts are the share of this shard."""
    longest: int = 0
    """The most tokens of a prompt and its action; 0 sets no limit."""
    reward: str = ""
    """The column that dynamic sampling reads."""
    equal: Equal = "returns"
    """How dynamic sampling compares rewards (``common.declared.SchemeNeeds``)."""
    deterministic: bool = False
    """Trees that a crash cut off grow anew (docs/reliability.md)."""
    shard: Shard = Shard()
    """Which of the run's schedulers this is."""
    batch: int = 24
    """The samples that an actor decodes together."""
    evidence: bool = False
    """Whether the judge scores queries by the tasks' supporting passages."""
    routed: bool = False
    """Whether the learner routes trained tokens as the engine did (learner.routing_replay)."""
    judges: dict[str, JudgeGives] = {}
    """What the run's own judges declare, by service."""
    inputs: dict[str, str] = {}
    """The files that trees are made from, by the keys that name them (``ledger.resume``)."""
