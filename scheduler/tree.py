"""The prefix tree of one question: a node holds only the tokens it adds; root to node, concatenated, is what the policy saw.

The chosen nodes form one path from the root, the tree's spine; its tip is where the next step grows, also after a restart.
"""

from typing import Any, Literal

import msgspec
import numpy as np

from wire.messages import TreeNode

Kind = Literal["prompt", "action", "observation"]


class Node(msgspec.Struct):
    """One node. Times a node of an action: logprobs, versions and sampled are [tokens], as in ``wire.messages.TreeNode``.

    scores: named columns; invalid: columns a judge could not give; notes: its explanations by judge. state: the environment
    state after the node (plain values). step: actions up to and including this node. trajectory: which of several whole
    trajectories it belongs to. cached: prompt tokens the engine had in its cache.
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

    def travels(self) -> TreeNode:
        """The node as the learner gets it."""
        return TreeNode(self.id, self.parent, self.kind, self.tokens, self.logprobs, self.versions, self.sampled)


class Tree:
    """Nodes by id, in the order they were added. ``id`` is unique in the run.

    changed: nodes that the journal does not have yet as they are; its next transaction of this tree writes them. actions_read: the
    parsed action of each action node that was read; an action is parsed again only after a restart.
    """

    def __init__(self, id: int, task: str, split: str = "train", nodes: list[Node] | None = None):
        self.id, self.task, self.split = id, task, split
        self.nodes: dict[int, Node] = {node.id: node for node in nodes or []}
        self.groups: list[int] = []
        self.changed: dict[int, Node] = {}
        self.actions_read: dict[int, Any] = {}

    def add(self, parent: Node | None, kind: Kind, tokens: np.ndarray, text: str, **fields: Any) -> Node:
        """A new child of ``parent`` (None makes the root). ``step`` is given where the parent is not the turn before (a fresh prompt)."""
        step = fields.pop("step", (parent.step if parent is not None else 0) + (kind == "action"))
        trajectory = fields.pop("trajectory", parent.trajectory if parent is not None else 0)
        parent_id = parent.id if parent is not None else -1
        id = (
            next(reversed(self.nodes), -1) + 1
        )  # not their number: a journal may lack candidates whose step was never finished
        node = Node(id, parent_id, kind, tokens, text, step, trajectory=trajectory, **fields)
        self.nodes[node.id] = node
        return node

    def parent(self, node: Node) -> Node | None:
        """The node above, None for the root."""
        return self.nodes.get(node.parent)

    def path(self, node: Node) -> list[Node]:
        """Root to ``node``."""
        found = [node]
        while (above := self.parent(found[-1])) is not None:
            found.append(above)
        return found[::-1]

    def prefix(self, node: Node) -> np.ndarray:
        """int32 [tokens]: everything from the root to ``node``."""
        return np.concatenate([n.tokens for n in self.path(node)]).astype(np.int32, copy=False)

    def children(self, node: Node) -> list[Node]:
        """The nodes right below."""
        return [n for n in self.nodes.values() if n.parent == node.id]

    def tip(self, trajectory: int = 0) -> Node:
        """The end of the spine (of one trajectory): the last chosen node, or the root."""
        spine = [n for n in self.nodes.values() if n.chosen and n.trajectory == trajectory]
        return spine[-1] if spine else self.nodes[0]

    def actions(self, trajectory: int = 0) -> list[Node]:
        """The actions of one trajectory's spine in order, forced ones included."""
        return [n for n in self.nodes.values() if n.kind == "action" and n.chosen and n.trajectory == trajectory]

    def state_before(self, node: Node) -> Any:
        """The environment state in which ``node`` was added: that of its nearest ancestor which has one."""
        above = self.parent(node)
        while above is not None and above.state is None:
            above = self.parent(above)
        return above.state if above is not None else None


def encode_node(node: Node) -> bytes:
    """A node as msgpack; arrays inline as [dtype, bytes]."""
    return msgspec.msgpack.encode(node, enc_hook=lambda array: [array.dtype.name, array.tobytes()])


def decode_node(blob: bytes) -> Node:
    """Inverse of ``encode_node``."""
    return msgspec.msgpack.decode(blob, type=Node, dec_hook=lambda _, value: np.frombuffer(value[1], dtype=value[0]))
