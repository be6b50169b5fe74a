"""PRIME: token rewards of an implicit reward model trained with cross-entropy, plus the outcome (methods.md 4.5).

Token rewards are divided by the largest |return-to-go| of the batch. They and the outcomes each get the leave-one-out form
n / (n - 1) (x - mean over the n responses); for tokens this is the mean of the responses' mean token rewards. Both are weighted (5 and 5),
summed to returns-to-go and whitened. Questions whose accuracy is outside [accuracy_low, accuracy_high] are left out.
"""

import numpy as np

from learner.statistics import leave_one_out, whiten, within
from learner.table import TurnTable
from wire.declared import SchemeNeeds
from wire.numbers import NotNegative, Share


def needs(outcome: str, **_: object) -> SchemeNeeds:
    """The scheme needs at least two whole trajectories of each task and an implicit reward model trained with cross-entropy."""
    return SchemeNeeds(
        columns=frozenset({outcome}), group="task", least=2, models=frozenset({"prm"}), prm_loss="cross_entropy"
    )


def advantages(
    table: TurnTable,
    outcome: str = "outcome",
    process_weight: NotNegative = 5.0,
    outcome_weight: NotNegative = 5.0,
    accuracy_low: Share = 0.2,
    accuracy_high: Share = 0.8,
) -> np.ndarray:
    """Return float64 [tokens]. A trajectory counts as accurate if its outcome is above 0."""
    trajectories, spans, mask = table.trajectories(), table.token_spans(), table.mask()
    returns = trajectories.total(table.column(outcome))
    token_rewards = _scaled(table.token_column("prm") * mask, spans)
    means = np.array([token_rewards[span].sum() / max(1, mask[span].sum()) for span in spans])
    finals = within(trajectories.tree, returns, leave_one_out)
    rewards, kept = np.zeros(len(mask)), np.zeros(len(mask), bool)
    for tree in np.unique(trajectories.tree):
        members = np.flatnonzero(trajectories.tree == tree)
        n, accuracy = len(members), (returns[members] > 0).mean()
        for i in members:
            span, scale = spans[i], n / (n - 1) if n > 1 else 0.0
            rewards[span] = process_weight * scale * (token_rewards[span] - means[members].mean()) * mask[span]
            rewards[span[-1]] += outcome_weight * finals[i]
            kept[span] = accuracy_low <= accuracy <= accuracy_high
    for span in spans:
        rewards[span] = np.cumsum(rewards[span][::-1])[::-1]
    return whiten(rewards, mask & kept)


def _scaled(token_rewards: np.ndarray, spans: list[np.ndarray]) -> np.ndarray:
    largest = max(np.abs(np.cumsum(token_rewards[span][::-1])).max() for span in spans)
    return token_rewards / largest if largest > 0 else token_rewards
