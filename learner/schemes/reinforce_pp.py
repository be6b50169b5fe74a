"""REINFORCE++: the return minus the mean return of its question, whitened over all tokens of the
batch (methods.md 4.3).

With baseline = "none" the return itself is whitened, which is the original method without groups
(Hu et al. 2025). ``leave_out_equal`` leaves a question out whose trajectories all earn the same,
which whitening would otherwise push; released code trains it too.
"""

from typing import Literal

import numpy as np

from coppice.common.declared import SchemeNeeds, reads
from coppice.common.numbers import Ddof
from coppice.common.statistics import centre, whiten, within
from coppice.learner.update.table import TurnTable, unequal

trains = unequal("column")


def needs(column: str, baseline: str, leave_out_equal: bool, **_: object) -> SchemeNeeds:
    if baseline == "none" and leave_out_equal:
        raise ValueError(
            "learner.scheme_options.leave_out_equal = true with baseline = 'none': the batch is"
            " compared, not a question; remove it, or set baseline = 'group'"
        )
    if baseline == "none":
        return reads(column, group="batch", aggregation="token")()
    unlike = "" if leave_out_equal else "learner.scheme_options.leave_out_equal = true"
    return reads(column, group="task", least=2, pushes_equal=unlike, aggregation="token")()


def advantages(
    table: TurnTable, column: str = "reward", baseline: Literal["group", "none"] = "group",
    whiten_ddof: Ddof = 0, leave_out_equal: bool = False,
) -> np.ndarray:  # fmt: skip
    trajectories, returns = table.returns(column)
    if baseline == "group":
        returns = within(trajectories.tree, returns, centre)
    return whiten(table.per_token(returns[trajectories.of]), table.mask(), whiten_ddof)
