"""Settings of the scheduler."""

from typing import Annotated, Any

import msgspec

from scheduler.dispatch import DispatchConfig
from wire.numbers import Count, Natural, NotNegative, Positive

UNJUDGED = "none"
"""scheduler.judge of a run that learns from outcomes alone: no turn is judged."""


class EvaluationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [scheduler.evaluation]: held-out evaluation by whole trajectories.

    questions: size of the fixed held-out subset (the same for every seed; 0 switches evaluation off). every: updates between
    evaluations besides the first and the last (0: none). temperature 0 is greedy. options: of the environment, where they differ
    from data.options (a fixed opponent).
    """

    questions: Natural = 128
    every: Natural = 0
    temperature: NotNegative = 0.0
    options: dict[str, Any] = {}


class PlacementConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [scheduler.placement], see docs/placement.md.

    batch: samples that an actor should decode together; one that has fewer takes on trees for which its prefix cache has no room (0:
    the cache comes first).
    """

    batch: Natural = 16


class SchedulerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [scheduler].

    strategy: a module of scheduler/strategies, or module:grow; strategy_options: its keyword arguments. budget: steps B.
    judge: the service judge.<judge>, or "none". max_action_tokens: of one action. thinking: ask a chat template that knows the switch for
    a thinking block.
    updates: optimizer steps of the run. questions_per_update: trees that make
    one update. max_staleness: see scheduler/pacing.py. Deadlines and timeouts in seconds.
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
    evaluation: EvaluationConfig = EvaluationConfig()
    dispatch: DispatchConfig = DispatchConfig()
    placement: PlacementConfig = PlacementConfig()
    bind: str = "tcp://127.0.0.1:0"
    generate_deadline_s: Positive = 600.0
    judge_deadline_s: Positive = 120.0
    startup_timeout_s: Positive = 600.0
    watchdog_s: Positive = 120.0


class SchedulerProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The scheduler's process file. model: a Hugging Face folder, for its tokenizer and chat template.

    environment, options: see actors/environments/registry.py. train, heldout: task files, one or several ("" for an environment
    that makes its tasks). services: those of judges and opponents to wait for. most: samples of one generate call.
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
