"""The experts that the engine chose for the tokens of a tree (``common.routing``). The first sample
behind a node tells the node's: the engine reports those of every position that no node knows."""

from collections.abc import Sequence

import numpy as np

from coppice.scheduler.growth.tree import Node
from coppice.wire.messages import NO_EXPERT


def first_unknown(path: Sequence[Node]) -> int:
    """The first position of ``path`` (from the root) whose experts its nodes do not know."""
    end = 0
    for node in path:
        if node.experts is None and len(node.tokens):
            break
        end += len(node.tokens)
    return max(end - 1, 0)


def fill(
    path: Sequence[Node], experts: np.ndarray, tokens: int
) -> tuple[np.ndarray, list[Node], int]:
    """Return the experts of a sampled action of ``tokens`` tokens after ``path``, the nodes of the
    path that have got theirs, and the positions of others for which the engine chose differently
    before: the first choice stays. experts: as in ``Sample``."""
    length = sum(len(node.tokens) for node in path)
    start = length + tokens - 1 - len(experts)
    filled, conflicts, end = list[Node](), 0, 0
    for node in path:
        begin, end = end, end + len(node.tokens)
        first = max(begin - 1, 0)
        if first < start or begin == end:  # a root may have no tokens
            continue
        rows = experts[first - start : max(end - 1, 0) - start]
        if not begin:  # nothing is before the first token
            rows = np.concatenate([np.full_like(experts[:1], NO_EXPERT), rows])
        if node.experts is None:
            node.experts = rows.reshape(-1)
            filled.append(node)
        else:
            conflicts += int((node.experts.reshape(rows.shape) != rows).any(1).sum())
    return experts[length - 1 - start :].reshape(-1), filled, conflicts
