"""Schemes and strategies declare themselves with these structs, and one check compares them when a
config is read (docs/extend.md)."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

Group = Literal["step", "task", "batch"]
"""What is compared: "step": candidates sampled from one prefix; "task": whole trajectories of one
task; "batch": all trajectories of a batch."""

Equal = Literal["returns", "turns"]


class SchemeNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What an advantage scheme reads.

    columns: score columns of the turns. group: what the scheme compares. least: the smallest group
    whose advantages can differ from 0. models: columns that the learner's models compute, one value
    per token: "value" (critic), "prm" (implicit reward model), "kl" (divergence from the initial
    policy), "log_ratio" (policy at the start of the update over the policy that sampled). prm_loss:
    the loss that must train the implicit reward model; "" allows any. reward: the one of several
    columns that is the reward. shaped: whether another reward changes an advantage. equal: which
    trajectories of a group teach nothing by comparison: those with equal "returns" (sums of
    rewards), or with equal rewards in all "turns". pushes_equal: the setting that ends it, if a
    question whose trajectories all earn the same gets an advantage other than 0; "" if it gets
    none. aggregation: how the source of the method weighs the tokens of its loss
    (learner/update/objective.py).
    """

    columns: frozenset[str]
    group: Group
    least: int = 1
    models: frozenset[str] = frozenset()
    prm_loss: str = ""
    reward: str = ""
    shaped: bool = True
    equal: Equal = "returns"
    pushes_equal: str = ""
    aggregation: Literal["turn", "trajectory", "token"] = "turn"

    @property
    def reward_column(self) -> str:
        """The column that holds the reward, or "" if the scheme reads several columns and declares
        none of them as the reward."""
        return self.reward or (next(iter(self.columns)) if len(self.columns) == 1 else "")


def reads(*columns: str, **more: Any) -> Callable[..., SchemeNeeds]:
    """Return the ``needs`` of a scheme that reads these columns: each is the option that names the
    column, or the column itself. more: the other fields of ``SchemeNeeds``."""
    return lambda **options: SchemeNeeds(
        columns=frozenset(options.get(name, name) for name in columns), **more
    )


class StrategyGives(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout strategy emits.

    group: "step" (candidates of one prefix, each trained alone) or "task" (whole trajectories of
    one task). size: members of a group. columns: score columns that the strategy writes itself.
    purpose: columns of which the scheme must read one. judged: the turns get the judge's columns.
    rewarded: they also get a column "reward" made from these. reward_options: options that only
    SLATE's composite reward reads. outcome: the last turn of each trajectory has the outcome.
    needs_judge: the strategy works only with a judge. needs_outcome_judge: the environment's
    outcomes must come from a judge. needs_top: the engine must report the most probable tokens
    (``Sampling.top_logprobs``). selects_as: the scheme by whose advantage the strategy selects; a
    run with this scheme gives the strategy the scheme's options of the same names.
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
    needs_top: bool = False
    selects_as: str = ""
