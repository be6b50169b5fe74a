"""What schemes and strategies declare about themselves, so that one check compares them when a config is read (docs/extend.md)."""

from typing import Literal

import msgspec

Group = Literal["step", "task", "batch"]
"""What is compared: candidates sampled from one prefix, whole trajectories of one task, or whatever a batch of trajectories holds."""


class SchemeNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What an advantage scheme reads.

    columns: score columns of the turns. group: what the scheme compares. least: the fewest members of a group whose advantages can
    differ from 0. models: columns of the learner's models, one value per token: "value" (critic), "prm" (implicit reward model), "kl"
    (to the initial policy), "log_ratio" (of the policy when the update began to the one that sampled). prm_loss: the loss that the
    implicit reward model must be trained with, "" for any.
    """

    columns: frozenset[str]
    group: Group
    least: int = 1
    models: frozenset[str] = frozenset()
    prm_loss: str = ""


class StrategyGives(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout strategy emits.

    group: "step" (candidates of one prefix, each trained alone) or "task" (whole trajectories of one task). size: members of a group.
    columns: score columns that the strategy writes itself; purpose: those for whose sake it exists, of which the scheme must read one.
    judged: the judge's columns reach the turns. rewarded: so does a column "reward" made from them. reward_options: the strategy's options
    that only SLATE's composite reward reads. outcome: the last turn of each trajectory has the outcome. needs_judge: the strategy cannot
    do without a judge. needs_outcome_judge: the environment's outcomes must come from a judge.
    """

    group: Literal["step", "task"]
    size: int = 1
    columns: frozenset[str] = frozenset()
    purpose: frozenset[str] = frozenset()
    reward_options: frozenset[str] = frozenset()
    judged: bool = True
    rewarded: bool = True
    outcome: bool = True
    needs_judge: bool = False
    needs_outcome_judge: bool = False
