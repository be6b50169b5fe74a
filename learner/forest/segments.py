"""The tree that the trajectories of a question form token by token, cut into segments: maximal runs
of tokens of the same trajectories.

Two trajectories share a token if everything that the policy saw before it and the token itself are
equal, whoever sampled it. So a segment ends where trajectories part, be it at the end of a turn or
inside one. What all trajectories of a question share belongs to its root segment.
"""

import msgspec
import numpy as np

from coppice.learner.forest.trees import Path, Trie
from coppice.learner.update.table import TurnTable


class Segments(msgspec.Struct, frozen=True):
    """The segments of all questions of a batch, parents before children.

    of: int64 [tokens], the segment of each token of the table. parent: int64 [segments], -1 for the
    root of a question. leaves: int64 [segments], the number of trajectories below. paths: for each
    trajectory, its segments from the root to its leaf.
    """

    of: np.ndarray
    parent: np.ndarray
    leaves: np.ndarray
    paths: list[np.ndarray]

    def mean(self, values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """Return the weighted mean of ``values`` [trajectories] over the trajectories of each
        segment [segments]."""
        weights = np.ones(len(values)) if weights is None else weights
        of, owner = (
            np.concatenate(self.paths),
            np.repeat(np.arange(len(values)), [len(path) for path in self.paths]),
        )
        total, weight = (
            np.bincount(of, x[owner], len(self.parent)) for x in (values * weights, weights)
        )
        return total / weight

    def first(self) -> np.ndarray:
        """Return the first trajectory through each segment, int64 [segments]."""
        first = np.zeros(len(self.parent), np.int64)
        for trajectory in reversed(range(len(self.paths))):
            first[self.paths[trajectory]] = trajectory
        return first

    def above(self, values: np.ndarray) -> np.ndarray:
        """Return the value of each segment's parent, and at a root its own [segments]."""
        return np.where(self.parent < 0, values, values[self.parent])


def segments(table: TurnTable) -> Segments:
    """Return the segments of a table. Raises ValueError if the table was made without the tokens of
    its turns."""
    if len(table.actions) != len(table):
        raise ValueError(
            "this scheme compares tokens: expected a table with actions, as learner.table.build makes it"
        )
    trajectories, seen = table.trajectories(), dict[bytes, int]()
    ends, paths, places = np.cumsum(table.tokens).tolist(), list[Path](), list[np.ndarray]()
    for rows, tree in zip(trajectories.rows, trajectories.tree, strict=True):
        # A turn's prompt becomes one number: turns with a prompt of their own have their history in
        # no prefix.
        pieces, where = [np.array([int(tree)])], [np.array([-1])]
        for row in rows:
            prompt = seen.setdefault(table.actions[row].prefix.tobytes(), len(seen))
            pieces += [np.array([prompt]), table.actions[row].action.astype(np.int64)]
            where += [
                np.array([-1]),
                np.arange(ends[row] - len(table.actions[row].action), ends[row]),
            ]
        paths.append(Path(np.concatenate(pieces), 1))
        places.append(np.concatenate(where))
    spines = Trie(paths).spines
    count = np.bincount(np.concatenate(spines))
    # A node's trajectories are some of its parent's, so equal counts along a path are equal sets. A
    # segment is named by its first node.
    heads = [np.append(True, np.diff(count[spine]) != 0) for spine in spines]
    names = np.unique(
        np.concatenate([spine[head] for spine, head in zip(spines, heads, strict=True)])
    )
    own = [np.searchsorted(names, spine[head]) for spine, head in zip(spines, heads, strict=True)]
    of, parent = np.zeros(int(table.tokens.sum()), np.int64), np.full(len(names), -1)
    for path, head, place in zip(own, heads, places, strict=True):
        of[place[place >= 0]] = path[np.cumsum(head) - 1][place >= 0]
        parent[path[1:]] = path[:-1]
    return Segments(of, parent, count[names], own)
