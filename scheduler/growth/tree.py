"""The prefix tree of one question. A node holds only the tokens it adds; the tokens from root to
node are exactly what the policy saw. The chosen nodes of a trajectory are its spine."""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from coppice.wire.messages import TreeNode

DROPPED = "dropped"
"""The note of an action that says why its episode was dropped."""
FATES = ("crashed", "ended", DROPPED)
"""Notes of an episode's last action that say what ended it: its process failed, its context was
full, or the episode was dropped, because of a refused request or an unreachable replay."""

Kind = Literal["prompt", "action", "observation"]


class Node(msgspec.Struct, gc=False, omit_defaults=True):
    """One node. logprobs, versions and sampled are [tokens], on actions only, as in
    ``wire.messages.TreeNode``.

    scores: named columns; invalid: columns that a judge could not give; notes: explanations, by
    judge, and of ``FATES``. state: the environment state after the node, as plain values. The
    pictures of a prompt are among its tokens by their numbers in the journal (``common.vision``).
    step: the number of actions up to and including this node. trajectory: which of several whole
    trajectories the node belongs to. cached: prompt tokens that the engine had in its cache. kept:
    the first tokens of an action that it shares with the action from which it was forked.
    entropies: float32 [tokens] of an action, if the strategy asked for them. support: as in
    ``wire.messages.Sample``. experts: as in ``wire.messages.TreeNode``.
    """

    id: int
    parent: int
    kind: Kind
    tokens: np.ndarray
    text: str
    step: int
    logprobs: np.ndarray | None = None
    versions: np.ndarray | None = None
    sampled: np.ndarray | None = None
    scores: dict[str, float] = {}
    invalid: list[str] = []
    notes: dict[str, str] = {}
    state: Any = None
    chosen: bool = False
    forced: bool = False
    trajectory: int = 0
    finish: str = ""
    cached: int = 0
    support: bytes = b""
    kept: int = 0
    entropies: np.ndarray | None = None
    experts: np.ndarray | None = None

    def travels(self, images: dict[int, bytes]) -> TreeNode:
        """The node as the learner receives it, with its pictures by number."""
        record = self.logprobs, self.versions, self.sampled
        more = images, self.support, self.experts
        return TreeNode(self.id, self.parent, self.kind, self.tokens, *record, *more)


class Fork(msgspec.Struct, frozen=True):
    """Where a trajectory leaves another: after ``kept`` tokens of ``action``; 0: at its prompt."""

    action: Node
    kept: int = 0


class Tree:
    """Nodes by id, in the order in which they were added. changed: nodes that the tree's next
    transaction writes. actions_read: the parsed actions by node id."""

    def __init__(self, id: int, task: str, split: str = "train"):
        self.id, self.task, self.split = id, task, split
        self.nodes: dict[int, Node] = {}
        self._below: dict[int, list[Node]] = {}
        self._lengths: dict[int, int] = {}
        self.groups: list[int] = []
        self.changed: dict[int, Node] = {}
        self.actions_read: dict[int, Any] = {}

    def add(
        self, parent: Node | None, kind: Kind, tokens: np.ndarray, text: str, **fields: Any
    ) -> Node:
        """Add a child of ``parent`` (None: the root). step: if not the parent's next turn."""
        step = fields.pop("step", (parent.step if parent is not None else 0) + (kind == "action"))
        trajectory = fields.pop("trajectory", parent.trajectory if parent is not None else 0)
        parent_id = parent.id if parent is not None else -1
        # not len(nodes): a journal may lack candidates of an unfinished step
        id = next(reversed(self.nodes), -1) + 1
        node = Node(id, parent_id, kind, tokens, text, step, trajectory=trajectory, **fields)
        self.put(node)
        return node

    def put(self, node: Node) -> None:
        """Add a node that has its id, after its parent."""
        self.nodes[node.id] = node
        self._lengths[node.id] = self._lengths.get(node.parent, 0) + len(node.tokens)
        self._below.setdefault(node.parent, []).append(node)

    def parent(self, node: Node) -> Node | None:
        """The parent of ``node``, None for the root."""
        return self.nodes.get(node.parent)

    def path(self, node: Node) -> list[Node]:
        """The nodes from the root to ``node``."""
        path = [node]
        while node.parent in self.nodes:
            node = self.nodes[node.parent]
            path.append(node)
        return path[::-1]

    def prefix(self, node: Node) -> np.ndarray:
        """int32 [tokens]: all tokens from the root to the end of ``node``."""
        return np.concatenate([n.tokens for n in self.path(node)]).astype(np.int32, copy=False)

    def length(self, node: Node) -> int:
        """The number of tokens from the root to the end of ``node``."""
        return self._lengths[node.id]

    def children(self, node: Node) -> list[Node]:
        """The children of ``node``, in the order in which they were added."""
        return list(self._below.get(node.id, ()))

    def tip(self, trajectory: int = 0) -> Node:
        """The end of one trajectory's spine: its last chosen node, or the root."""
        spine = [n for n in self.nodes.values() if n.chosen and n.trajectory == trajectory]
        return spine[-1] if spine else self.nodes[0]

    def actions(self, trajectory: int = 0) -> list[Node]:
        """The actions of a trajectory in order, including forced ones and those before its fork."""
        spine = [n for n in self.nodes.values() if n.chosen and n.trajectory == trajectory]
        own = [node for node in spine if node.kind == "action"]
        start = self.parent(own[0]) if own else None
        if start is None or start.trajectory == trajectory or not start.step:
            return own
        return [n for n in self.actions(start.trajectory) if n.step <= start.step] + own

    def acted_in(self, node: Node) -> Node | None:
        """The nearest ancestor with an environment state: the state in which ``node`` was added."""
        above = self.parent(node)
        while above is not None and above.state is None:
            above = self.parent(above)
        return above

    def state_before(self, node: Node) -> Any:
        """The environment state in which ``node`` was added, as plain values, or None."""
        above = self.acted_in(node)
        return above.state if above is not None else None


def turns_of(path: Sequence[Node]) -> list[tuple[str, str]]:
    """The actions on a path before its last node: the text of each, and what was read next."""
    pairs = itertools.pairwise(path)
    return [(node.text, after.text) for node, after in pairs if node.kind == "action"]
