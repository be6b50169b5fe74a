"""GiGPO: the advantage of the episode plus the advantage among steps that answered the same
observation (methods.md 4.5).

G_t = sum_k gamma^k r_{t+k} sums the environment's rewards. Steps of one question with an identical
observation form a group, in which A_S = (G - mean) / F with F = 1 or the sample std; a single step
gets 0. A = A_E + alpha A_S, where A_E is GRPO over episode returns. An invalid step (column "valid"
= 0) costs ``invalid_penalty``, .1 in the paper's comparison.
"""

import msgspec
import numpy as np

from coppice.common.declared import reads
from coppice.common.numbers import Ddof, NotNegative, Share
from coppice.common.statistics import standardise, within
from coppice.learner.schemes import grpo
from coppice.learner.update.table import TurnTable, scored

trains = scored("column")
needs = reads("column", group="task", least=2, equal="turns", aggregation="trajectory")


def advantages(
    table: TurnTable, column: str = "reward", gamma: Share = 0.95, alpha: NotNegative = 1.0,
    episode_std: bool = False, step_std: bool = False, ddof: Ddof = 1,
    invalid_penalty: NotNegative = 0.0,
) -> np.ndarray:  # fmt: skip
    """Both std switches are off in the released code ("mean_norm")."""
    assert table.anchor is not None, "a table of a batch has the observations of its turns"
    # only last turns have an outcome
    rewards = np.nan_to_num(table.column(column), posinf=np.inf, neginf=-np.inf)
    rewards = rewards - invalid_penalty * (table.scores.get("valid", 1.0) == 0)
    table = msgspec.structs.replace(table, scores={**table.scores, column: rewards})
    returns = np.zeros(len(table))
    for rows in table.trajectories().rows:
        running = 0.0
        for row in rows[::-1]:
            running = returns[row] = rewards[row] + gamma * running
    _, groups = np.unique(np.stack([table.tree, table.anchor], 1), axis=0, return_inverse=True)
    steps = within(groups.reshape(-1), returns, lambda group: standardise(group, step_std, ddof))
    return grpo.advantages(table, column, episode_std, ddof) + alpha * table.per_token(steps)
