"""SPO-tree: a segment earns the value at its end minus the value at its start (arXiv 2505.23564).

V(node) is the mean over its children, down to the outcome at a leaf: a mean over the leaves
weighted by the column ``weight`` of the strategy ``spo`` (equal weights without it). A(segment) =
V(end) - V(start), whitened over the trained tokens of the batch if ``whiten``. Tokens that the
policy sampled with a probability of ``certain`` or more are not trained.

form = "released" trains as the authors' trainer does: each segment once, none of advantage 0, at
most ``most`` of a question, drawn uniformly. "paper" has every leaf train its whole path
(docs/methods-table.md names the functions of the released code).
"""

import math
from typing import Literal

import numpy as np

from coppice.common.declared import SchemeNeeds, reads
from coppice.common.numbers import Count, Positive
from coppice.common.statistics import whiten as whiten_tokens
from coppice.learner.forest.segments import TreeSegments, segments
from coppice.learner.update.table import TurnTable, scored
from coppice.learner.update.targets import Advantages

trains = scored("column")


def needs(column: str, form: str, whiten: bool, **_: object) -> SchemeNeeds:
    unlike = "learner.scheme_options.form = 'released'" if form == "paper" and whiten else ""
    return reads(column, group="task", least=2, pushes_equal=unlike, aggregation="token")()


def advantages(
    table: TurnTable, column: str = "outcome", form: Literal["released", "paper"] = "released",
    most: Count = 32, certain: Positive = 0.9, whiten: bool = True,
) -> Advantages:  # fmt: skip
    """Return advantages and which tokens are trained. certain: more than 1 trains the tokens of
    every probability."""
    tree, (trajectories, returns) = segments(table), table.returns(column)
    leaf_weights = table.returns("weight")[1] if "weight" in table.scores else None
    value = tree.mean(returns, leaf_weights)
    gain = value - tree.above(value)
    logprobs = np.concatenate([path.logprobs for path in table.paths])
    trained = table.mask() & (logprobs < math.log(certain))
    if form == "released":
        once = tree.first()[tree.of] == table.per_token(trajectories.of)
        trained &= once & drawn(tree, trajectories.tree, gain, most)[tree.of]
    advantage = gain[tree.of]
    return Advantages(
        whiten_tokens(advantage, trained, ddof=1) if whiten else np.where(trained, advantage, 0.0),
        trained=trained,
    )


def drawn(tree: TreeSegments, questions: np.ndarray, gain: np.ndarray, most: int) -> np.ndarray:
    """Return, as bool [segments], at most ``most`` segments of each question among those of a gain.
    questions: int64 [trajectories]."""
    kept, question = np.abs(gain) > 1e-12, questions[tree.first()]
    for number in np.unique(question):
        own = np.flatnonzero(kept & (question == number))
        if len(own) > most:
            kept[np.random.default_rng(number).choice(own, len(own) - most, replace=False)] = False
    return kept
