"""Rules for which turns a scheme trains on: the ``trains`` of its module. A missing score is no
score: a trajectory without it is left out of the whole update and enters no statistic."""

from collections.abc import Callable

import numpy as np

from coppice.learner.update.statistics import within
from coppice.learner.update.table import TurnTable

Rule = Callable[..., np.ndarray]
"""A function of the table and the scheme's options that returns which turns train, bool [turns]."""


def scored(name: str) -> Rule:
    """Return the rule that a trajectory trains if it has its score (``Trajectories.total``). name:
    the score column, or the option that names it."""

    def rule(table: TurnTable, **options: str) -> np.ndarray:
        trajectories = table.trajectories()
        totals = trajectories.total(table.column(options.get(name, name)))
        return ~np.isnan(totals)[trajectories.of]

    return rule


def unequal(name: str) -> Rule:
    """Return the rule of ``scored``, which also leaves a question out whose trajectories all score
    the same, if the option ``leave_out_equal`` is True: whitening over a batch would give it an
    advantage that compares nothing."""

    def rule(table: TurnTable, leave_out_equal: bool, **options: str) -> np.ndarray:
        kept = scored(name)(table, **options)
        if leave_out_equal:
            trajectories = table.trajectories()
            totals = trajectories.total(table.column(options.get(name, name)))
            some = ~np.isnan(totals)
            ranges = within(
                trajectories.tree[some], totals[some], lambda x: np.full(len(x), np.ptp(x))
            )
            differs = np.zeros(len(totals), bool)
            differs[some] = ranges > 0
            kept &= differs[trajectories.of]
        return kept

    return rule
