"""PRIME: token rewards of an implicit reward model trained with cross-entropy, plus the outcome
(methods.md 4.5).

Token rewards are divided by the largest |return-to-go| of the batch. They and the outcomes each get
the leave-one-out form n / (n - 1) (x - mean over the n responses); for tokens this is the mean of
the responses' mean token rewards. Both are weighted (5 and 5), summed to returns-to-go and
whitened. Questions whose accuracy is outside [accuracy_low, accuracy_high] are left out.
"""

import numpy as np

from coppice.common.declared import SchemeNeeds
from coppice.common.numbers import NotNegative, Share
from coppice.learner.update.statistics import Ddof, leave_one_out, whiten, within
from coppice.learner.update.table import TurnTable


def needs(outcome: str, **_: object) -> SchemeNeeds:
    return SchemeNeeds(
        columns=frozenset({outcome}),
        group="task",
        least=2,
        models=frozenset({"prm"}),
        prm_loss="cross_entropy",
        aggregation="token",
    )


def trains(
    table: TurnTable, outcome: str, accuracy_low: float, accuracy_high: float, **_: object
) -> np.ndarray:
    """Return, as bool [turns], whether the accuracy of the turn's question is within the bounds and
    the trajectory has its outcome.

    A trajectory counts as accurate if its outcome is above 0. The filter comes first: the scale,
    the whitening and the reward model's training are those of a batch without the other questions.
    """
    trajectories = table.trajectories()
    returns = trajectories.total(table.column(outcome))
    accuracy, known = np.full(len(returns), np.nan), ~np.isnan(returns)
    accuracy[known] = within(
        trajectories.tree[known],
        returns[known] > 0,
        lambda group: np.full(len(group), group.mean()),
    )
    return ((accuracy_low <= accuracy) & (accuracy <= accuracy_high))[trajectories.of]


def advantages(
    table: TurnTable, outcome: str = "outcome", process_weight: NotNegative = 5.0,
    outcome_weight: NotNegative = 5.0, accuracy_low: Share = 0.2, accuracy_high: Share = 0.8,
    whiten_ddof: Ddof = 0,
) -> np.ndarray:  # fmt: skip
    """``trains`` has left out the questions outside [accuracy_low, accuracy_high]."""
    trajectories, mask = table.trajectories(), table.mask()
    token_rewards = table.token_column("prm") * mask
    largest = np.abs(table.to_go(token_rewards)).max()
    token_rewards = token_rewards / largest if largest > 0 else token_rewards
    spans = table.token_spans()
    means = np.array([token_rewards[span].sum() / max(1, mask[span].sum()) for span in spans])
    tree, of = trajectories.tree, table.per_token(trajectories.of)
    baselines = within(tree, means, lambda group: np.full(len(group), group.mean()))
    scales = within(tree, means, _leave_one_out_scale)
    finals = within(tree, trajectories.total(table.column(outcome)), leave_one_out)
    rewards = process_weight * scales[of] * (token_rewards - baselines[of]) * mask
    last = np.where(trajectories.last(), finals[trajectories.of], 0.0)
    rewards += outcome_weight * table.at_last_token(last)
    return whiten(table.to_go(rewards), mask, whiten_ddof)


def _leave_one_out_scale(group: np.ndarray) -> np.ndarray:
    n = len(group)
    return np.full(n, n / (n - 1) if n > 1 else 0.0)
