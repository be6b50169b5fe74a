"""PPO with a critic: the outcome at the last token of a trajectory, GAE, advantages whitened (methods.md 2.4 without step rewards).

targets = "vtrace" or "retrace" corrects the targets for off-policy data (learner/targets.py). kl_coef puts the k1 KL to the initial
policy into the reward.
"""

from learner.table import TurnTable
from learner.targets import Estimate, Kind, estimate
from learner.targets import needs as target_needs
from wire.declared import SchemeNeeds
from wire.numbers import NotNegative, Share


def needs(column: str, targets: Kind, kl_coef: float, **_: object) -> SchemeNeeds:
    """Whole trajectories; a critic, and what the targets and the KL in the reward read of each token."""
    return SchemeNeeds(columns=frozenset({column}), group="batch", models=frozenset(target_needs(targets, kl_coef)))


def advantages(
    table: TurnTable,
    column: str = "outcome",
    gamma: Share = 1.0,
    lam: Share = 1.0,
    whiten: bool = True,
    targets: Kind = "gae",
    kl_coef: NotNegative = 0.0,
) -> Estimate:
    """Advantages and value targets. Every score of ``column`` is paid at the last token of its turn; a missing one is 0."""
    rewards = table.at_last_token(table.column(column))
    rewards[rewards != rewards] = 0.0
    return estimate(table, rewards, gamma, lam, whiten, targets, kl_coef)
