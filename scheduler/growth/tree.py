"""The prefix tree of one question. A node holds only the tokens it adds; the tokens from root to
node are exactly what the policy saw.

The chosen nodes form one path from the root, the tree's spine. The next step grows at the tip of
the spine, also after a restart.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from coppice.wire.arrays import DTYPES, NAMES
from coppice.wire.messages import TreeNode

BESIDE = 1
"""The msgpack extension of a state that is stored as what it has beside another one."""

SEQUENCE = (list, tuple)

DROPPED = "dropped"
"""The note of an action that says why its episode was dropped."""
FATES = ("crashed", "ended", DROPPED)
"""Notes of an episode's last action that say what ended it: its process failed, its context was
full, or the episode was dropped, because its request was refused or a replay could not reach it
again."""

Kind = Literal["prompt", "action", "observation"]


class Node(msgspec.Struct, gc=False):
    """One node. logprobs, versions and sampled are [tokens], on actions only, as in
    ``wire.messages.TreeNode``.

    scores: named columns; invalid: columns that a judge could not give; notes: explanations, by
    judge, and of ``FATES``. state: the environment state after the node, as plain values. The
    pictures of a prompt are among its tokens by their numbers in the journal (``common.vision``).
    step: the number of actions up to and including this node. trajectory: which of several whole
    trajectories the node belongs to. cached: prompt tokens that the engine had in its cache. kept:
    the first tokens of an action that it shares with the action from which it was forked.
    entropies: float32 [tokens] of an action, if the strategy asked for them. support: as in
    ``wire.messages.Sample``.
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

    def travels(self, images: dict[int, bytes]) -> TreeNode:
        """The node as the learner receives it, with its pictures by number."""
        record = self.logprobs, self.versions, self.sampled
        return TreeNode(self.id, self.parent, self.kind, self.tokens, *record, images, self.support)


class Fork(msgspec.Struct, frozen=True):
    """Where a trajectory leaves another one: after the first ``kept`` tokens of ``action``, and
    with kept = 0 at the prompt of the action."""

    action: Node
    kept: int = 0


class Tree:
    """Nodes by id, in the order in which they were added. The tree's ``id`` is unique in the run.

    changed: nodes that the journal lacks or has in an older state; the tree's next transaction
    writes them. actions_read: the parsed actions by node id; an action is parsed again only after a
    restart.
    """

    def __init__(self, id: int, task: str, split: str = "train", nodes: list[Node] | None = None):
        self.id, self.task, self.split = id, task, split
        self.nodes: dict[int, Node] = {}
        self._below: dict[int, list[Node]] = {}
        self._lengths: dict[int, int] = {}
        for node in nodes or []:
            self._put(node)
            if isinstance(node.state, Ext):
                node.state = _whole(node.state, self.state_before(node))
        self.groups: list[int] = []
        self.changed: dict[int, Node] = {}
        self.actions_read: dict[int, Any] = {}

    def add(
        self, parent: Node | None, kind: Kind, tokens: np.ndarray, text: str, **fields: Any
    ) -> Node:
        """Add a child of ``parent`` (None: the root). Pass ``step`` if the parent is not the turn
        before, as for a fresh prompt."""
        step = fields.pop("step", (parent.step if parent is not None else 0) + (kind == "action"))
        trajectory = fields.pop("trajectory", parent.trajectory if parent is not None else 0)
        parent_id = parent.id if parent is not None else -1
        # not len(nodes): a journal may lack candidates of an unfinished step
        id = next(reversed(self.nodes), -1) + 1
        node = Node(id, parent_id, kind, tokens, text, step, trajectory=trajectory, **fields)
        self._put(node)
        return node

    def _put(self, node: Node) -> None:
        self.nodes[node.id] = node
        self._lengths[node.id] = self._lengths.get(node.parent, 0) + len(node.tokens)
        self._below.setdefault(node.parent, []).append(node)

    def parent(self, node: Node) -> Node | None:
        """The parent of ``node``, None for the root."""
        return self.nodes.get(node.parent)

    def path(self, node: Node) -> list[Node]:
        """The nodes from the root to ``node``."""
        path, known = [node], self.nodes
        while node.parent in known:
            node = known[node.parent]
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
        """The actions of one trajectory in order, including forced ones and those before its fork,
        which belong to another trajectory."""
        own = [
            n
            for n in self.nodes.values()
            if n.kind == "action" and n.chosen and n.trajectory == trajectory
        ]
        start = self.parent(own[0]) if own else None
        if start is None or start.trajectory == trajectory or not start.step:
            return own
        return [
            action for action in self.actions(start.trajectory) if action.step <= start.step
        ] + own

    def acted_in(self, node: Node) -> Node | None:
        """The nearest ancestor that has an environment state, which is the state in which ``node``
        was added."""
        above = self.parent(node)
        while above is not None and above.state is None:
            above = self.parent(above)
        return above

    def state_before(self, node: Node) -> Any:
        """The environment state in which ``node`` was added, as plain values; None if there is
        none."""
        above = self.acted_in(node)
        return above.state if above is not None else None


def turns_of(path: Sequence[Node]) -> list[tuple[str, str]]:
    """The actions on a path before its last node: the text of each, and what the policy read next."""
    return [
        (node.text, then.text) for node, then in itertools.pairwise(path) if node.kind == "action"
    ]


def encode_node(node: Node, tree: Tree | None = None) -> bytes:
    """Encode a node as msgpack, with arrays inline as [dtype, bytes]. Of its state only what it has
    beside the state in which the node was added to ``tree``, because a state tends to hold the
    whole episode. ``Tree`` makes the states of its nodes whole again."""
    if node.state is not None and tree is not None:
        node = _shortened(node, tree.state_before(node))
    return msgspec.msgpack.encode(
        node, enc_hook=lambda array: [NAMES[array.dtype], array.tobytes()]
    )


def _shortened(node: Node, above: Any) -> Node:
    state = node.state
    if not isinstance(state, dict) or not isinstance(above, dict) or state.keys() != above.keys():
        return node
    return msgspec.structs.replace(
        node, state=Ext(BESIDE, msgspec.msgpack.encode(_beside(state, above)))
    )


def _beside(state: dict[str, Any], above: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The items that sequences have beyond those of ``above``, and the other values that differ."""
    longer, other = {}, {}
    for key, value in state.items():
        old = above[key]
        if (
            isinstance(value, SEQUENCE)
            and isinstance(old, SEQUENCE)
            and [*value[: len(old)]] == [*old]
        ):
            longer[key] = value[len(old) :]
        elif type(value) is not type(old) or value != old:
            other[key] = value
    return {key: items for key, items in longer.items() if items}, other


def _whole(stored: Ext, above: Any) -> Any:
    """The state of which ``stored`` is what it has beside the state ``above`` it; None if the
    journal has lost that one (``coppice watch --audit`` tells). Raises ValueError if it is damaged."""
    if above is None:
        return None
    try:
        longer, other = msgspec.msgpack.decode(stored.data)
        return above | other | {key: above[key] + items for key, items in longer.items()}
    except (msgspec.DecodeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"a state of the journal is damaged ({error}): restore journal.sqlite from a copy"
        ) from None


def decode_node(blob: bytes) -> Node:
    """Decode what ``encode_node`` returned. Raises ValueError when the blob is damaged."""
    try:
        return msgspec.msgpack.decode(blob, type=Node, dec_hook=_stored)
    except (msgspec.DecodeError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(
            f"a node of the journal is damaged ({error}): restore journal.sqlite from a copy"
        ) from None


def _stored(_: type, value: Any) -> np.ndarray:
    name, raw = value
    if name not in DTYPES:  # numpy would parse any other text as a description of a type
        raise ValueError(f"dtype {name!r}, expected one of {sorted(DTYPES)}")
    return np.frombuffer(raw, dtype=name)
