"""OPRL: the advantage of the episode plus that of the implicit step rewards, A = A_E + alpha A_S
(methods.md 4.3, 4.4).

The step score r is the implicit reward model's beta x log-ratio, summed over the action's tokens.
base chooses both normalisations: "grpo" is (x - mean) / std; "rloo" leaves one out; "reinforce_pp"
is x - mean, then whitened over the batch; "ppo" is token GAE on the outcome for A_E and "grpo" for
A_S. Trajectories are compared within their question, and step scores over all steps of all its
trajectories. variant: "step" is the method; "process" is A_S alone; "merged" normalises outcome +
alpha r once over the steps; "token" takes the per-token return-to-go of the implicit reward;
"environment" takes the environment's own step rewards instead of r.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np

from coppice.common.declared import SchemeNeeds
from coppice.common.numbers import NotNegative, Positive
from coppice.learner.schemes import gae
from coppice.learner.update.statistics import (
    Ddof,
    centre,
    leave_one_out,
    standardise,
    whiten,
    within,
)
from coppice.learner.update.table import TurnTable
from coppice.learner.update.targets import Estimate
from coppice.learner.update.trained import scored, trains_on

Base = Literal["grpo", "rloo", "reinforce_pp", "ppo"]
Variant = Literal["step", "process", "merged", "token", "environment"]
Change = Callable[[np.ndarray], np.ndarray]
Finish = Callable[[np.ndarray, np.ndarray], np.ndarray]


def needs(base: Base, variant: Variant, outcome: str, step_reward: str, **_: object) -> SchemeNeeds:
    """The scheme needs at least two whole trajectories of each task, the implicit reward model, and
    a critic for base "ppo"."""
    models = ({"value"} if base == "ppo" else set()) | (
        {"prm"} if variant != "environment" else set()
    )
    columns = {outcome, step_reward} if variant == "environment" else {outcome}
    return SchemeNeeds(
        columns=frozenset(columns),
        reward=outcome,
        group="task",
        least=2,
        models=frozenset(models),
        pushes_equal="learner.scheme_options.base = 'grpo' or 'rloo'"
        if base == "reinforce_pp"
        else "",
        aggregation="trajectory",
    )


@trains_on(scored("outcome"))
def advantages(
    table: TurnTable,
    base: Base = "grpo",
    variant: Variant = "step",
    alpha: NotNegative = 1.0,
    outcome: str = "outcome",
    step_reward: str = "reward",
    invalid_penalty: NotNegative = 0.1,
    ddof: Ddof = 1,
    whiten_ddof: Ddof = 0,
    eps: Positive = 1e-6,
) -> Estimate:
    """Return advantages, and value targets for base "ppo". An invalid step (column "valid" = 0)
    lowers only the outcome of its own turn.

    A step without its ``step_reward`` enters no statistic of the steps and gets A_S = 0. ddof
    divides within questions, whiten_ddof over the batch.
    """
    change = {"rloo": leave_one_out, "reinforce_pp": centre}.get(
        base, partial(standardise, ddof=ddof, eps=eps)
    )
    whitened = partial(whiten, ddof=whiten_ddof)
    finish: Finish = whitened if base == "reinforce_pp" else lambda values, _: values
    episode = _episode(table, base, outcome, invalid_penalty, ddof, eps, whitened)
    steps = (
        table.column(step_reward)
        if variant == "environment"
        else table.per_turn(table.token_column("prm"))
    )
    if variant == "merged":
        rows = _returns(table, outcome) - invalid_penalty * _invalid(table) + alpha * steps
        return Estimate(_compared(table, rows, change, finish), episode.returns)
    process = (
        _token_level(table, change, finish)
        if variant == "token"
        else _compared(table, steps, change, finish)
    )
    start = 0.0 if variant == "process" else episode.advantages
    return Estimate(start + alpha * process, episode.returns)


def _compared(table: TurnTable, values: np.ndarray, change: Change, finish: Finish) -> np.ndarray:
    """Compare values [turns] over all turns of the question's trajectories, and broadcast them to
    the tokens [tokens]. NaN gives 0."""
    known, compared = ~np.isnan(values), np.zeros(len(values))
    compared[known] = within(table.tree[known], values[known], change)
    return finish(table.per_token(compared), table.mask() & table.per_token(known))


def _episode(
    table: TurnTable,
    base: Base,
    outcome: str,
    penalty: float,
    ddof: int,
    eps: float,
    whitened: Finish,
) -> Estimate:
    """Return A_E: the outcome of each turn, compared with the unpenalised outcomes of the
    question's trajectories."""
    penalties = penalty * _invalid(table)
    if base == "ppo":
        estimate = gae.advantages(table, outcome, whiten=False)
        return Estimate(
            whitened(estimate.advantages - table.per_token(penalties), table.mask()),
            estimate.returns,
        )
    trajectories = table.trajectories()
    returns = trajectories.total(table.column(outcome))
    if base == "rloo":
        per_turn = within(trajectories.tree, returns, leave_one_out)[trajectories.of] - penalties
        return Estimate(table.per_token(per_turn))
    centred = within(trajectories.tree, returns, centre)[trajectories.of] - penalties
    if base == "reinforce_pp":
        return Estimate(whitened(table.per_token(centred), table.mask()))
    # Equal outcomes have no spread to divide by, so the penalty of an invalid step is not scaled
    # there.
    spread = within(
        trajectories.tree,
        returns,
        lambda g: np.full(len(g), g.std(ddof=ddof) + eps if np.ptp(g) > 0 else 1.0),
    )
    return Estimate(table.per_token(centred / spread[trajectories.of]))


def _token_level(table: TurnTable, change: Change, finish: Finish) -> np.ndarray:
    """Return the return-to-go of the implicit token rewards, compared over all sampled tokens of
    the question [tokens]."""
    rewards = table.token_column("prm") * table.mask()
    to_go = np.zeros_like(rewards)
    for span in table.token_spans():
        to_go[span] = np.cumsum(rewards[span][::-1])[::-1]
    mask, compared = table.mask(), np.zeros_like(to_go)
    compared[mask] = within(table.per_token(table.tree)[mask], to_go[mask], change)
    return finish(compared, mask)


def _returns(table: TurnTable, outcome: str) -> np.ndarray:
    trajectories = table.trajectories()
    return trajectories.total(table.column(outcome))[trajectories.of]


def _invalid(table: TurnTable) -> np.ndarray:
    return (
        (table.scores["valid"] == 0).astype(np.float64)
        if "valid" in table.scores
        else np.zeros(len(table))
    )
