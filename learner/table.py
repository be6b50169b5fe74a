"""The table of turns: all a scheme sees of a batch. One row a turn, one flat axis of action tokens."""

import msgspec
import numpy as np

from wire.messages import TrainGroup, TreeNode


class TurnTable(msgspec.Struct, frozen=True):
    """Columns, each [turns].

    tree, group, trajectory, turn: int64 identities (trajectory is unique within a group only). tokens: int64, action tokens
    of the turn. scores: name -> float64, NaN where a turn has no such score.
    """

    tree: np.ndarray
    group: np.ndarray
    trajectory: np.ndarray
    turn: np.ndarray
    tokens: np.ndarray
    scores: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.tree)

    def column(self, name: str) -> np.ndarray:
        """One score column; raises KeyError naming what exists."""
        if name not in self.scores:
            raise KeyError(f"no score column {name!r} in this batch: it has {sorted(self.scores)}")
        return self.scores[name]

    def per_token(self, values: np.ndarray) -> np.ndarray:
        """A value a turn [turns] broadcast to all of the turn's tokens [tokens]."""
        return np.repeat(values, self.tokens)


class TurnTokens(msgspec.Struct, frozen=True):
    """The tokens of one row: prefix (all that the policy saw) and action, with its sampling record, each [action tokens]."""

    prefix: list[int]
    action: list[int]
    logprobs: np.ndarray
    versions: np.ndarray
    sampled: np.ndarray


def build(groups: list[TrainGroup], nodes: dict[tuple[int, int], TreeNode]) -> tuple[TurnTable, list[TurnTokens]]:
    """Table and tokens of a batch. nodes: (tree, node id) -> node, holding every ancestor of every turn."""
    rows = [(group, turn, nodes[group.tree, turn.node]) for group in groups for turn in group.turns]
    names = sorted({name for _, turn, _ in rows for name in turn.scores})
    table = TurnTable(
        tree=np.array([group.tree for group, _, _ in rows], np.int64),
        group=np.array([group.id for group, _, _ in rows], np.int64),
        trajectory=np.array([turn.trajectory for _, turn, _ in rows], np.int64),
        turn=np.array([turn.turn for _, turn, _ in rows], np.int64),
        tokens=np.array([len(node.tokens) for _, _, node in rows], np.int64),
        scores={n: np.array([turn.scores.get(n, np.nan) for _, turn, _ in rows], np.float64) for n in names},
    )
    return table, [_tokens(group.tree, node, nodes) for group, _, node in rows]


def _tokens(tree: int, node: TreeNode, nodes: dict[tuple[int, int], TreeNode]) -> TurnTokens:
    pieces, parent = [], node.parent
    while parent >= 0:
        ancestor = nodes[tree, parent]
        pieces.append(ancestor.tokens)
        parent = ancestor.parent
    assert node.logprobs is not None and node.versions is not None, "a trained turn is an action"
    sampled = node.sampled if node.sampled is not None else np.ones(len(node.tokens), bool)
    prefix = np.concatenate(pieces[::-1]).tolist()
    return TurnTokens(prefix, node.tokens.tolist(), node.logprobs, node.versions, sampled)
