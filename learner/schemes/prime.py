"""PRIME: token rewards of an implicit reward model trained with cross-entropy, plus the outcome
(methods.md 4.5).

Token rewards are divided by the largest |return-to-go| of the batch. They and the outcomes each get
the leave-one-out form n / (n - 1) (x - mean over the n responses); for tokens this is the mean of
the responses' mean token rewards. Both are weighted (5 and 5), summed to returns-to-go and
whitened. Questions whose accuracy is outside [accuracy_low, accuracy_high] are left out.
"""

import numpy as np

from coppice.common.declared import SchemeNeeds, reads
from coppice.common.numbers import Ddof, NotNegative, Share
from coppice.common.statistics import leave_one_out, whiten, within
from coppice.learner.update.table import TurnTable


def needs(outcome: str, accuracy_low: float, accuracy_high: float, **_: object) -> SchemeNeeds:
    if accuracy_low > accuracy_high:
        raise ValueError(
            f"learner.scheme_options.accuracy_low = {accuracy_low}: expected at most accuracy_high"
            f" = {accuracy_high}, or no question trains"
        )
    option = "learner.scheme_options.accuracy_low above 0 and accuracy_high below 1"
    unlike = option if accuracy_low == 0 or accuracy_high == 1 else ""
    return reads(
        outcome, group="task", least=2, models=frozenset({"prm"}), prm_loss="cross_entropy",
        pushes_equal=unlike, aggregation="token",
    )()  # fmt: skip


def trains(
    table: TurnTable, outcome: str, accuracy_low: float, accuracy_high: float, threshold: float,
    **_: object,
) -> np.ndarray:  # fmt: skip
    """Return, as bool [turns], whether the accuracy of the turn's question (the share of outcomes
    above ``threshold``) is within the bounds and the trajectory has its outcome. Scale, whitening
    and the reward model's training are those of a batch without the other questions."""
    trajectories, returns = table.returns(outcome)
    accuracy, some = np.full(len(returns), np.nan), ~np.isnan(returns)
    accuracy[some] = within(trajectories.tree[some], returns[some] > threshold, np.mean)
    return ((accuracy_low <= accuracy) & (accuracy <= accuracy_high))[trajectories.of]


def advantages(
    table: TurnTable, outcome: str = "outcome", process_weight: NotNegative = 5.0,
    outcome_weight: NotNegative = 5.0, accuracy_low: Share = 0.2, accuracy_high: Share = 0.8,
    whiten_ddof: Ddof = 0, threshold: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """``trains`` has left out the questions outside [accuracy_low, accuracy_high]. threshold: that
    of the reward model (``learner.prm.threshold``)."""
    (trajectories, outcomes), mask = table.returns(outcome), table.mask()
    token_rewards = table.token_column("prm") * mask
    largest = np.abs(table.to_go(token_rewards)).max()
    token_rewards = token_rewards / largest if largest > 0 else token_rewards
    spans = table.token_spans()
    means = np.array([token_rewards[span].sum() / max(1, mask[span].sum()) for span in spans])
    tree, of = trajectories.tree, table.per_token(trajectories.of)
    baselines, sizes = within(tree, means, np.mean), within(tree, means, len)
    scales = np.where(sizes > 1, sizes / np.maximum(1, sizes - 1), 0.0)
    finals = within(tree, outcomes, leave_one_out)
    rewards = process_weight * scales[of] * (token_rewards - baselines[of]) * mask
    last = np.where(trajectories.last(), finals[trajectories.of], 0.0)
    rewards += outcome_weight * table.at_last_token(last)
    return whiten(table.to_go(rewards), mask, whiten_ddof)
