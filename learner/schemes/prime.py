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
from coppice.learner.update.trained import trains_on


def needs(outcome: str, **_: object) -> SchemeNeeds:
    """The scheme needs at least two whole trajectories of each task and an implicit reward model
    trained with cross-entropy."""
    return SchemeNeeds(
        columns=frozenset({outcome}),
        group="task",
        least=2,
        models=frozenset({"prm"}),
        prm_loss="cross_entropy",
        aggregation="token",
    )


def filtered(
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


@trains_on(filtered)
def advantages(
    table: TurnTable,
    outcome: str = "outcome",
    process_weight: NotNegative = 5.0,
    outcome_weight: NotNegative = 5.0,
    accuracy_low: Share = 0.2,
    accuracy_high: Share = 0.8,
    whiten_ddof: Ddof = 0,
) -> np.ndarray:
    """Return float64 [tokens]. ``filtered`` has left out the questions outside [accuracy_low,
    accuracy_high]."""
    trajectories, spans, mask = table.trajectories(), table.token_spans(), table.mask()
    returns = trajectories.total(table.column(outcome))
    token_rewards = _scaled(table.token_column("prm") * mask, spans)
    means = np.array([token_rewards[span].sum() / max(1, mask[span].sum()) for span in spans])
    finals = within(trajectories.tree, returns, leave_one_out)
    rewards = np.zeros(len(mask))
    for tree in np.unique(trajectories.tree):
        members = np.flatnonzero(trajectories.tree == tree)
        n = len(members)
        for i in members:
            span, scale = spans[i], n / (n - 1) if n > 1 else 0.0
            rewards[span] = (
                process_weight * scale * (token_rewards[span] - means[members].mean()) * mask[span]
            )
            rewards[span[-1]] += outcome_weight * finals[i]
    for span in spans:
        rewards[span] = np.cumsum(rewards[span][::-1])[::-1]
    return whiten(rewards, mask, whiten_ddof)


def _scaled(token_rewards: np.ndarray, spans: list[np.ndarray]) -> np.ndarray:
    largest = max(np.abs(np.cumsum(token_rewards[span][::-1])).max() for span in spans)
    return token_rewards / largest if largest > 0 else token_rewards
