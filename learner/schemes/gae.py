"""PPO with a critic: GAE on the outcome at the last token of a trajectory, whitened (methods.md 2.4
without step rewards).

targets = "vtrace" or "retrace" corrects the targets for off-policy data (update/targets.py);
rho_max and c_max are V-trace's bounds, rho-bar and c-bar. kl_coef weighs the k1 KL to the initial
policy, which is subtracted from the reward.
"""

from coppice.common.numbers import Ddof, NotNegative, Positive, Share
from coppice.learner.update.table import TurnTable, scored
from coppice.learner.update.targets import Advantages, Kind, estimate, estimated

trains = scored("column")
needs = estimated("column")


def advantages(
    table: TurnTable, column: str = "outcome", gamma: Share = 1.0, lam: Share = 1.0,
    whiten: bool = True, whiten_ddof: Ddof = 0, targets: Kind = "gae", kl_coef: NotNegative = 0.0,
    rho_max: Positive = 1.0, c_max: Positive = 1.0,
) -> Advantages:  # fmt: skip
    """Return advantages and value targets. Each score of ``column`` rewards the last token of its
    turn."""
    rewards = table.at_last_token(table.column(column))
    rewards[rewards != rewards] = 0.0  # turns before the last have no outcome
    return estimate(
        table, rewards, gamma, lam, whiten, targets, kl_coef, rho_max, c_max, whiten_ddof
    )
