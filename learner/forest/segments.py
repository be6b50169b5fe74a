"""The tree that the trajectories of a question form token by token, cut into segments: maximal runs
of tokens of the same trajectories. Two trajectories share a token if it and all that the policy saw
before it are equal. What all trajectories of a question share belongs to its root segment.
"""

import msgspec
import numpy as np

from coppice.learner.forest.trees import Path, Trie
from coppice.learner.update.table import TurnTable


class TreeSegments(msgspec.Struct, frozen=True):
    """The segments of all questions of a batch, parents before children.

    of: int64 [tokens], the segment of each token of the table. parent: int64 [segments], -1 for the
    root of a question. leaves: int64 [segments], the number of trajectories below. paths: the
    segments of each trajectory from the root to its leaf.
    """

    of: np.ndarray
    parent: np.ndarray
    leaves: np.ndarray
    paths: list[np.ndarray]

    def mean(self, values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """Return the weighted mean of ``values`` [trajectories] in each segment [segments]."""
        weights = np.ones(len(values)) if weights is None else weights
        of = np.concatenate(self.paths)
        owner = np.repeat(np.arange(len(values)), [len(path) for path in self.paths])
        total = np.bincount(of, (values * weights)[owner], len(self.parent))
        return total / np.bincount(of, weights[owner], len(self.parent))

    def first(self) -> np.ndarray:
        """Return the first trajectory through each segment, int64 [segments]."""
        first = np.zeros(len(self.parent), np.int64)
        for trajectory in reversed(range(len(self.paths))):
            first[self.paths[trajectory]] = trajectory
        return first

    def above(self, values: np.ndarray) -> np.ndarray:
        """Return the value of each segment's parent, and at a root its own [segments]."""
        return np.where(self.parent < 0, values, values[self.parent])


def segments(table: TurnTable) -> TreeSegments:
    """Return the segments of a table, which has the paths of its turns."""
    trajectories, seen = table.trajectories(), dict[bytes, int]()
    ends, paths, places = np.cumsum(table.tokens).tolist(), list[Path](), list[np.ndarray]()
    for rows, tree in zip(trajectories.rows, trajectories.tree, strict=True):
        # A turn's prompt becomes one number: turns with a prompt of their own have their history in
        # no prefix.
        pieces, where = [np.array([int(tree)])], [np.array([-1])]
        for row in rows:
            prefix, action = np.split(np.asarray(table.paths[row].tokens), [table.paths[row].start])
            prompt = seen.setdefault(prefix.tobytes(), len(seen))
            pieces += [np.array([-1 - prompt]), action]
            where += [np.array([-1]), np.arange(ends[row] - len(action), ends[row])]
        paths.append(Path(np.concatenate(pieces), 1))
        places.append(np.concatenate(where))
    spines = Trie(paths).spines
    count = np.bincount(np.concatenate(spines))
    # A node's trajectories are some of its parent's, so equal counts along a path are equal sets. A
    # segment is named by its first node.
    heads = [np.append(True, np.diff(count[spine]) != 0) for spine in spines]
    firsts = [spine[head] for spine, head in zip(spines, heads, strict=True)]
    names = np.unique(np.concatenate(firsts))
    own = [np.searchsorted(names, first) for first in firsts]
    of, parent = np.zeros(int(table.tokens.sum()), np.int64), np.full(len(names), -1)
    for path, head, place in zip(own, heads, places, strict=True):
        of[place[place >= 0]] = path[np.cumsum(head) - 1][place >= 0]
        parent[path[1:]] = path[:-1]
    return TreeSegments(of, parent, count[names], own)
