"""OPRL: the advantage of the episode plus that of the implicit step rewards, A = A_E + alpha A_S (methods.md 4.3, 4.4).

The step score r is the implicit reward model's beta x log-ratio, summed over the action's tokens. base chooses both normalisations:
"grpo" is (x - mean) / std; "rloo" leaves one out; "reinforce_pp" is x - mean, then whitened over the batch; "ppo" is token GAE on the outcome
for A_E and "grpo" for A_S. Trajectories are compared within their question, and step scores over all steps of all its trajectories.
variant: "step" is the method; "process" is A_S alone; "merged" normalises outcome + alpha r once over the steps; "token" takes the per-token
return-to-go of the implicit reward; "environment" takes the environment's own step rewards instead of r.
"""

from typing import Literal

import msgspec
import numpy as np

from learner.schemes import gae
from learner.statistics import Ddof, centre, leave_one_out, standardise, whiten, within
from learner.table import TurnTable
from learner.targets import Estimate
from learner.trained import scored, trains_on
from wire.declared import SchemeNeeds
from wire.numbers import NotNegative, Positive

Base = Literal["grpo", "rloo", "reinforce_pp", "ppo"]
Variant = Literal["step", "process", "merged", "token", "environment"]


def needs(base: Base, variant: Variant, outcome: str, step_reward: str, **_: object) -> SchemeNeeds:
    """The scheme needs at least two whole trajectories of each task, the implicit reward model, and a critic for base "ppo"."""
    models = ({"value"} if base == "ppo" else set()) | ({"prm"} if variant != "environment" else set())
    columns = {outcome, step_reward} if variant == "environment" else {outcome}
    return SchemeNeeds(columns=frozenset(columns), group="task", least=2, models=frozenset(models))


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
    """Return advantages, and value targets for base "ppo". An invalid step (column "valid" = 0) lowers only the outcome of its own turn.

    A step without its ``step_reward`` enters no statistic of the steps and gets A_S = 0. ddof divides within questions, whiten_ddof over the batch.
    """
    spread = _Spread(ddof, whiten_ddof, eps)
    episode = _episode(table, base, outcome, invalid_penalty, spread)
    steps = table.column(step_reward) if variant == "environment" else table.per_turn(table.token_column("prm"))
    if variant == "merged":
        rows = _returns(table, outcome) - invalid_penalty * _invalid(table) + alpha * steps
        return Estimate(_compared(table, rows, base, spread), episode.returns)
    process = _token_level(table, base, spread) if variant == "token" else _compared(table, steps, base, spread)
    start = 0.0 if variant == "process" else episode.advantages
    return Estimate(start + alpha * process, episode.returns)


class _Spread(msgspec.Struct, frozen=True):
    """How values are divided by their spread: within a question by ``ddof`` and ``eps``, over the batch by ``whiten_ddof``."""

    ddof: int
    whiten_ddof: int
    eps: float


def _compared(table: TurnTable, values: np.ndarray, base: Base, spread: _Spread) -> np.ndarray:
    """Compare values [turns] over all turns of the question's trajectories, and broadcast them to the tokens [tokens]. NaN gives 0."""
    change = lambda group: standardise(group, True, spread.ddof, spread.eps)  # noqa: E731
    change = {"rloo": leave_one_out, "reinforce_pp": centre}.get(base, change)
    known, compared = ~np.isnan(values), np.zeros(len(values))
    compared[known] = within(table.tree[known], values[known], change)
    if base == "reinforce_pp":
        return whiten(table.per_token(compared), table.mask() & table.per_token(known), spread.whiten_ddof)
    return table.per_token(compared)


def _episode(table: TurnTable, base: Base, outcome: str, penalty: float, spread: _Spread) -> Estimate:
    """Return A_E: the outcome of each turn, compared with the unpenalised outcomes of the question's trajectories."""
    penalties, mask, ddof = penalty * _invalid(table), table.mask(), spread.ddof
    if base == "ppo":
        estimate = gae.advantages(table, outcome, whiten=False)
        fined = estimate.advantages - table.per_token(penalties)
        return Estimate(whiten(fined, mask, spread.whiten_ddof), estimate.returns)
    trajectories = table.trajectories()
    returns = trajectories.total(table.column(outcome))
    if base == "rloo":
        per_turn = within(trajectories.tree, returns, leave_one_out)[trajectories.of] - penalties
        return Estimate(table.per_token(per_turn))
    centred = within(trajectories.tree, returns, centre)[trajectories.of] - penalties
    if base == "reinforce_pp":
        return Estimate(whiten(table.per_token(centred), mask, spread.whiten_ddof))
    # Equal outcomes have no spread to divide by, so the penalty of an invalid step is not scaled there.
    divisor = within(
        trajectories.tree,
        returns,
        lambda g: np.full(len(g), g.std(ddof=ddof) + spread.eps if np.ptp(g) > 0 else 1.0),
    )
    return Estimate(table.per_token(centred / divisor[trajectories.of]))


def _token_level(table: TurnTable, base: Base, spread: _Spread) -> np.ndarray:
    """Return the return-to-go of the implicit token rewards, compared over all sampled tokens of the question [tokens]."""
    rewards = table.token_column("prm") * table.mask()
    to_go = np.zeros_like(rewards)
    for span in table.token_spans():
        to_go[span] = np.cumsum(rewards[span][::-1])[::-1]
    mask, compared = table.mask(), np.zeros_like(to_go)

    def scaled(group: np.ndarray) -> np.ndarray:
        return standardise(group, base != "reinforce_pp", spread.ddof, spread.eps)

    change = leave_one_out if base == "rloo" else scaled
    compared[mask] = within(table.per_token(table.tree)[mask], to_go[mask], change)
    return whiten(compared, mask, spread.whiten_ddof) if base == "reinforce_pp" else compared


def _returns(table: TurnTable, outcome: str) -> np.ndarray:
    trajectories = table.trajectories()
    return trajectories.total(table.column(outcome))[trajectories.of]


def _invalid(table: TurnTable) -> np.ndarray:
    return (table.scores["valid"] == 0).astype(np.float64) if "valid" in table.scores else np.zeros(len(table))
