"""The estimator of VPR's released code (v2): candidates of one visited state, centred on their
mean, then whitened over the batch (methods.md 3.5).

A group whose rewards are all equal teaches nothing: it gets 0 and stays out of the whitening. An
update in which too many groups are equal would scale up the few that are left, so all its
advantages are 0. A KL or entropy term of the config acts all the same.
"""

import numpy as np

from coppice.common.declared import reads
from coppice.common.numbers import Ddof, Share
from coppice.common.statistics import centre, within
from coppice.learner.update.table import TurnTable

needs = reads("column", group="step", least=2, aggregation="token")


def advantages(
    table: TurnTable, column: str = "reward", most_equal: Share = 1.0, ddof: Ddof = 0
) -> np.ndarray:
    """most_equal: if a larger share of the groups is equal, all advantages are 0 (the v2 code has
    0.93 on Sudoku). A candidate without a reward enters no statistic and gets 0."""
    rewards = table.column(column)
    scored = ~np.isnan(rewards)
    groups = table.group[scored]
    differs = within(groups, rewards[scored], np.ptp) > 0
    first = np.unique(groups, return_index=True)[1]
    advantage = np.zeros(len(table))
    if differs.any() and (~differs[first]).mean() <= most_equal:
        centred = within(groups, rewards[scored], centre)
        scale = centred[differs].std(ddof=ddof) + 1e-8
        advantage[scored] = np.where(differs, centred / scale, 0.0)
    return table.per_token(advantage)
