"""Dynamic sampling (DAPO, Yu et al. 2025, section 3.2): a question whose trajectories all earn the
same is replaced by a fresh one.

The journal keeps a replaced tree with the status "replaced". The tree gives its admission back
(scheduler/ledger/pacing.py), and the learner counts it as no question of an update. Its groups enter the
frontier with the next update, without loss, so they too are trained exactly once.
"""

import math
from collections.abc import Iterable, Sequence

from coppice.common.declared import Equal
from coppice.wire.messages import Turn


def differs(groups: Iterable[Sequence[Turn]], column: str, equal: Equal) -> bool:
    """Return whether the trajectories of any group differ in their rewards, the scores of
    ``column``.

    equal: compare the sums over the turns ("returns"), or the rewards turn by turn ("turns"). A
    trajectory without any score is left out.
    """
    for group in groups:
        rewards: dict[int, list[float]] = {}
        for turn in group:
            if column in turn.scores:
                rewards.setdefault(turn.trajectory, []).append(turn.scores[column])
        if len({(math.fsum(r),) if equal == "returns" else tuple(r) for r in rewards.values()}) > 1:
            return True
    return False
