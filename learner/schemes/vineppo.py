"""VinePPO: PPO whose values are means of Monte Carlo continuations instead of a critic's (arXiv
2410.01679).

A_t = V(s_{t+1}) - V(s_t), V of the end being the outcome: the differences of ``mc_pr``, on all
tokens of the turn, without its normalisation by turn. The released code whitens them over the
tokens of the batch.
"""

import numpy as np

from coppice.common.declared import reads
from coppice.common.statistics import whiten as whiten_tokens
from coppice.learner.schemes.mc_pr import COLUMNS, temporal_differences
from coppice.learner.update.table import TurnTable

needs = reads(*COLUMNS, group="batch", aggregation="token")


def advantages(table: TurnTable, whiten: bool = True) -> np.ndarray:
    """A turn next to a missing value has no difference: it enters no statistic and gets 0."""
    differences = table.per_token(temporal_differences(table))
    some = ~np.isnan(differences)
    if whiten:
        return whiten_tokens(differences, table.mask() & some, ddof=1)
    return np.where(some, differences, 0.0)
