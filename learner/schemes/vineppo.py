"""VinePPO: PPO whose values are means of Monte Carlo continuations instead of a critic's (arXiv
2410.01679).

A_t = V(s_{t+1}) - V(s_t), V of the end being the outcome: the differences of ``mc_pr``, on all
tokens of the turn, without its normalisation by turn. The released code whitens them over the
tokens of the batch.
"""

import numpy as np

from coppice.common.declared import SchemeNeeds
from coppice.learner.schemes.mc_pr import temporal_differences
from coppice.learner.update.statistics import whiten as whiten_tokens
from coppice.learner.update.table import TurnTable


def needs(value: str, outcome: str, **_: object) -> SchemeNeeds:
    """The scheme needs all turns of whole trajectories, with Monte Carlo values."""
    return SchemeNeeds(columns=frozenset({value, outcome}), group="batch", aggregation="token")


def advantages(
    table: TurnTable, value: str = "mc_value", outcome: str = "outcome", whiten: bool = True
) -> np.ndarray:
    """Return float64 [tokens]. A turn next to a missing value has no difference: it enters no
    statistic and gets 0."""
    differences = table.per_token(temporal_differences(table, value, outcome))
    known = ~np.isnan(differences)
    return (
        whiten_tokens(differences, table.mask() & known, ddof=1)
        if whiten
        else np.where(known, differences, 0.0)
    )
