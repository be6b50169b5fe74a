"""SAO: one trajectory per question and a critic; longer trajectories trust the outcome more (arXiv
2607.07508).

The outcome rewards the last token. The critic learns the return (lambda = 1). The policy's
advantage is GAE with lambda = 1 - 1 / (alpha l) for a trajectory of l sampled tokens, at least 0.
Observations are no steps: the value after a turn is that of the next turn's first sampled token.
The paper's mask of stale tokens is the correction ``icepop`` at level "token".
"""

import numpy as np

from coppice.common.declared import reads
from coppice.common.numbers import Positive
from coppice.common.statistics import whiten as whiten_tokens
from coppice.learner.update.table import TurnTable, scored
from coppice.learner.update.targets import Advantages, gae, steps

trains = scored("column")
needs = reads("column", group="batch", models=frozenset({"value"}), aggregation="token")


def advantages(
    table: TurnTable, column: str = "outcome", alpha: Positive = 0.05, whiten: bool = True
) -> Advantages:
    """Return advantages and value targets. alpha: not published; the default is VAPO's (arXiv
    2504.05118)."""
    outcomes = np.nan_to_num(table.column(column), posinf=np.inf, neginf=-np.inf)
    rewards, values = table.at_last_token(outcomes), table.token_column("value")
    result, returns = np.zeros_like(rewards), np.zeros_like(rewards)
    for span, earned in steps(table, rewards):
        lam = max(0.0, 1 - 1 / (alpha * len(span)))
        result[span] = gae(earned, values[span], 1.0, lam)[0]
        returns[span] = gae(earned, values[span], 1.0, 1.0)[1]
    return Advantages(whiten_tokens(result, table.mask()) if whiten else result, returns)
