"""Batches from the stream: as soon as ``questions`` trees are closed, the oldest of them form one
update, in the order of their ids; of several schedulers in equal parts, so that what
scheduler/ledger/pacing.py says of the staleness holds for each.

A group enters once (its id is the key), leaves in exactly one batch, and is then part of the
trained frontier. A tree that dynamic sampling replaced is no question; its groups leave without
their turns.
"""

import itertools

from coppice.common import frontier
from coppice.common.shards import Shard
from coppice.learner.update.trainer import Batch
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import TrainGroup, TreeClosed, TreeNode


class Inbox:
    """Groups, nodes and closed trees that wait for an update. Life cycle: ``add`` and ``close``
    until ``ready`` names trees, then ``take``. trained: the version that trained each group, by the
    group's id, and ``runs`` says it as a checkpoint does. shards: the number of schedulers."""

    def __init__(self, questions: int, trained: dict[int, int], shards: int = 1):
        self.share, self.trained = questions // shards, trained
        self.runs = frontier.runs(trained)
        self.shards = [Shard(number, shards) for number in range(shards)]
        self._nodes: dict[int, dict[int, TreeNode]] = {}
        self._groups: dict[int, TrainGroup] = {}
        self._closed: dict[int, list[int]] = {}
        self._replaced: dict[int, list[int]] = {}
        self._done_trees: set[int] = set()

    def add(self, group: TrainGroup) -> bool:
        """Add a group, or return False if it is already trained. Raises InfrastructureFault if an
        ancestor of a turn is missing."""
        if group.id in self.trained:
            return False
        nodes = self._nodes.setdefault(group.tree, {})
        nodes.update((node.id, node) for node in group.nodes)
        for turn in group.turns:
            node = nodes.get(turn.node)
            while node is not None and node.parent >= 0:
                node = nodes.get(node.parent)
            if node is None:
                raise InfrastructureFault(
                    f"group {group.id}: nodes of tree {group.tree} must be resent"
                )
        self._groups[group.id] = group
        return True

    def close(self, closed: TreeClosed) -> None:
        """Record that a tree is complete. Repeated calls for one tree count once."""
        if closed.tree not in self._done_trees:
            (self._replaced if closed.replaced else self._closed)[closed.tree] = closed.groups

    def ready(self) -> list[int] | None:
        """Return the trees of the next batch, ascending, or None while there are too few complete
        trees."""
        whole = sorted(self._whole(self._closed))  # ids ascend in the order of admission
        shares = [[*filter(shard.owns, whole)][: self.share] for shard in self.shards]
        complete = all(len(share) == self.share for share in shares)
        return sorted(itertools.chain(*shares)) if complete else None

    def take(self, trees: list[int], version: int) -> Batch:
        """Remove the trees, and all complete replaced trees, from the inbox and return them as a
        batch. Its groups belong to the frontier from now on."""
        away = [self._leave(tree, self._replaced)[0] for tree in self._whole(self._replaced)]
        replaced = [group.id for group in itertools.chain(*away)]
        groups, nodes = [], []
        for tree in trees:
            own, below = self._leave(tree, self._closed)
            groups += own
            nodes += [(tree, node) for node in below.values()]
        left_ids = [*replaced, *(group.id for group in groups)]
        left = dict.fromkeys(left_ids, version + 1)
        self.trained |= left
        self.runs += frontier.runs(left)
        return Batch(version, len(trees), groups, nodes, replaced)

    def _whole(self, closed: dict[int, list[int]]) -> list[int]:
        """Return the trees whose groups are all here or trained."""
        here, trained = self._groups, self.trained
        return [t for t, groups in closed.items() if all(g in here or g in trained for g in groups)]

    def _leave(
        self, tree: int, closed: dict[int, list[int]]
    ) -> tuple[list[TrainGroup], dict[int, TreeNode]]:
        groups = [self._groups.pop(group) for group in closed.pop(tree) if group in self._groups]
        self._done_trees.add(tree)
        return groups, self._nodes.pop(tree, {})
