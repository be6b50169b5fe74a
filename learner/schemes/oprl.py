"""OPRL: the advantage of the episode plus that of the implicit step rewards, A = A_E + alpha A_S
(methods.md 4.3, 4.4).

The step score r is the implicit reward model's beta x log-ratio, summed over the action's tokens.
base chooses both normalisations: "grpo" is (x - mean) / std; "rloo" leaves one out; "reinforce_pp"
is x - mean, then whitened over the batch; "ppo" is token GAE on the outcome for A_E and "grpo" for
A_S. Trajectories are compared within their question, and step scores over all steps of all its
trajectories. variant: "step" is the method; "process" is A_S alone, which no shaped outcome
changes; "merged" normalises outcome + alpha r once over the steps (neither of them has base "ppo");
"token" takes the per-token return-to-go of the implicit reward; "environment" takes the
environment's own step rewards instead of r.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np

from coppice.common.declared import SchemeNeeds
from coppice.common.numbers import Ddof, NotNegative
from coppice.common.statistics import centre, leave_one_out, standardise, whiten, within
from coppice.learner.schemes import gae
from coppice.learner.update.table import TurnTable, scored
from coppice.learner.update.targets import Advantages

Base = Literal["grpo", "rloo", "reinforce_pp", "ppo"]
Variant = Literal["step", "process", "merged", "token", "environment"]
Change = Callable[[np.ndarray], np.ndarray]
Finish = Callable[[np.ndarray, np.ndarray], np.ndarray]

trains = scored("outcome")


def needs(base: Base, variant: Variant, outcome: str, step_reward: str, **_: object) -> SchemeNeeds:
    if base == "ppo" and variant in ("process", "merged"):
        raise ValueError(
            f"learner.scheme_options.variant = {variant!r} has no critic's advantage: expected"
            " another base than 'ppo'"
        )
    environments = variant == "environment"
    models = {"value"} if base == "ppo" else set()
    models |= set() if environments else {"prm"}
    columns = {outcome, step_reward} if environments else {outcome}
    unlike = "learner.scheme_options.base = 'grpo' or 'rloo'"
    return SchemeNeeds(
        columns=frozenset(columns), reward=outcome, group="task", least=2, models=frozenset(models),
        shaped=variant != "process",
        pushes_equal=unlike if base == "reinforce_pp" else "", aggregation="trajectory",
    )  # fmt: skip


def advantages(
    table: TurnTable, base: Base = "grpo", variant: Variant = "step", alpha: NotNegative = 1.0,
    outcome: str = "outcome", step_reward: str = "step_reward", invalid_penalty: NotNegative = 0.1,
    ddof: Ddof = 1, whiten_ddof: Ddof = 0,
) -> Advantages:  # fmt: skip
    """Return advantages, and value targets for base "ppo". An invalid step (column "valid" = 0)
    lowers only the outcome of its own turn.

    A step without its ``step_reward`` enters no statistic of the steps and gets A_S = 0. ddof
    divides within questions, whiten_ddof over the batch.
    """
    others = {"rloo": leave_one_out, "reinforce_pp": centre}
    change: Change = others.get(base, partial(standardise, ddof=ddof))
    whitened = partial(whiten, ddof=whiten_ddof)
    finish: Finish = whitened if base == "reinforce_pp" else lambda values, _: values
    penalties = np.zeros(len(table))
    if "valid" in table.scores:
        penalties[table.scores["valid"] == 0] = invalid_penalty
    episode = _episode(table, base, outcome, penalties, ddof, whitened)
    if variant == "token":
        process = _token_level(table, change, finish)
    else:
        own = variant == "environment"
        steps = table.column(step_reward) if own else table.per_turn(table.token_column("prm"))
        if variant == "merged":
            trajectories, returns = table.returns(outcome)
            steps = returns[trajectories.of] - penalties + alpha * steps
        process = _compared(table, steps, change, finish)
    if variant == "merged":
        return Advantages(process, episode.returns)
    start = 0.0 if variant == "process" else episode.advantages
    return Advantages(start + alpha * process, episode.returns)


def _compared(table: TurnTable, values: np.ndarray, change: Change, finish: Finish) -> np.ndarray:
    """Compare values [turns] over all turns of the question's trajectories, and broadcast them to
    the tokens [tokens]. NaN gives 0."""
    some, compared = ~np.isnan(values), np.zeros(len(values))
    compared[some] = within(table.tree[some], values[some], change)
    return finish(table.per_token(compared), table.mask() & table.per_token(some))


def _episode(
    table: TurnTable, base: Base, outcome: str, penalties: np.ndarray, ddof: int, whitened: Finish
) -> Advantages:
    """Return A_E: the outcome of each turn, compared with the unpenalised outcomes of the
    question's trajectories."""
    if base == "ppo":
        estimate = gae.advantages(table, outcome, whiten=False)
        lowered = estimate.advantages - table.per_token(penalties)
        return Advantages(whitened(lowered, table.mask()), estimate.returns)
    trajectories, returns = table.returns(outcome)
    baseline = leave_one_out if base == "rloo" else centre
    per_turn = within(trajectories.tree, returns, baseline)[trajectories.of] - penalties
    if base == "rloo":
        return Advantages(table.per_token(per_turn))
    if base == "reinforce_pp":
        return Advantages(whitened(table.per_token(per_turn), table.mask()))

    def scale(group: np.ndarray) -> float:
        return group.std(ddof=ddof) + 1e-6 if np.ptp(group) > 1e-9 else 1.0

    scales = within(trajectories.tree, returns, scale)[trajectories.of]
    # outcomes that hardly differ do not make much of a penalty
    capped = penalties / np.maximum(scales, min(0.1, penalties.max(initial=0.0)))
    return Advantages(table.per_token((per_turn + penalties) / scales - capped))


def _token_level(table: TurnTable, change: Change, finish: Finish) -> np.ndarray:
    """Return the return-to-go of the implicit token rewards, compared over all sampled tokens of
    the question [tokens]."""
    mask = table.mask()
    to_go = table.to_go(table.token_column("prm") * mask)
    compared = np.zeros_like(to_go)
    compared[mask] = within(table.per_token(table.tree)[mask], to_go[mask], change)
    return finish(compared, mask)
