"""The table of turns: all a scheme sees of a batch. One row a turn, one flat axis of action tokens."""

import zlib

import msgspec
import numpy as np

from wire.messages import TrainGroup, TreeNode


class Trajectories(msgspec.Struct, frozen=True):
    """The trajectories of a table, numbered densely.

    of: int64 [turns], the trajectory of each turn. tree: int64 [trajectories], the question each belongs to.
    rows: for each trajectory the indices of its turns, first turn first.
    """

    of: np.ndarray
    tree: np.ndarray
    rows: list[np.ndarray]

    def total(self, values: np.ndarray) -> np.ndarray:
        """Sum of a column over each trajectory's turns [trajectories]; a missing score (NaN) adds nothing."""
        return np.bincount(self.of, weights=np.where(np.isnan(values), 0.0, values), minlength=len(self.tree))

    def last(self) -> np.ndarray:
        """bool [turns]: whether a turn is its trajectory's last."""
        made = np.zeros(len(self.of), bool)
        made[[rows[-1] for rows in self.rows]] = True
        return made


class TurnTable(msgspec.Struct, frozen=True):
    """Columns, each [turns] unless said otherwise.

    tree, group, trajectory, turn: int64 identities (trajectory is unique within a group only; turn counts from 1). tokens: int64,
    action tokens of the turn. scores: name -> float64, NaN where a turn has no such score. anchor: int64, equal where the
    policy answered the same observation. sampled: bool [tokens], False for forced tokens.
    token_scores: name -> float64 [tokens], what models of the learner say of each token: "value" (critic), "prm" (beta x log-ratio
    of the implicit reward model), "kl" (log behaviour - log reference), "log_ratio" (log proximal - log behaviour).
    """

    tree: np.ndarray
    group: np.ndarray
    trajectory: np.ndarray
    turn: np.ndarray
    tokens: np.ndarray
    scores: dict[str, np.ndarray]
    anchor: np.ndarray | None = None
    sampled: np.ndarray | None = None
    token_scores: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.tree)

    def column(self, name: str) -> np.ndarray:
        """One score column; raises KeyError naming what exists."""
        if name not in self.scores:
            raise KeyError(f"no score column {name!r} in this batch: it has {sorted(self.scores)}")
        return self.scores[name]

    def token_column(self, name: str) -> np.ndarray:
        """One token column; raises KeyError naming what exists."""
        if name not in self.token_scores:
            raise KeyError(f"no token column {name!r} in this batch: it has {sorted(self.token_scores)}")
        return self.token_scores[name]

    def per_token(self, values: np.ndarray) -> np.ndarray:
        """A value a turn [turns] broadcast to all of the turn's tokens [tokens]."""
        return np.repeat(values, self.tokens)

    def per_turn(self, values: np.ndarray) -> np.ndarray:
        """A value a token [tokens] summed over the policy's own tokens of each turn [turns]."""
        return np.bincount(self.row(), weights=values * self.mask(), minlength=len(self))

    def at_last_token(self, values: np.ndarray) -> np.ndarray:
        """A value a turn [turns] put on the turn's last token, 0 elsewhere [tokens]."""
        made = np.zeros(int(self.tokens.sum()))
        made[np.cumsum(self.tokens) - 1] = values
        return made

    def row(self) -> np.ndarray:
        """The turn of each token, int64 [tokens]."""
        return np.repeat(np.arange(len(self)), self.tokens)

    def mask(self) -> np.ndarray:
        """bool [tokens]: the tokens the policy sampled."""
        return np.ones(int(self.tokens.sum()), bool) if self.sampled is None else self.sampled

    def trajectories(self) -> Trajectories:
        """The trajectories: turns of one tree and group that share a trajectory number."""
        keys = np.stack([self.tree, self.group, self.trajectory], 1)
        names, of = np.unique(keys, axis=0, return_inverse=True)
        of = of.reshape(-1)
        order = np.lexsort((self.turn, of))
        rows = np.split(order, np.cumsum(np.bincount(of, minlength=len(names)))[:-1])
        return Trajectories(of, names[:, 0], rows)

    def token_spans(self) -> list[np.ndarray]:
        """For each trajectory the indices of its tokens in the flat token axis, in the order they were generated."""
        turns = np.split(np.arange(int(self.tokens.sum())), np.cumsum(self.tokens)[:-1])
        return [np.concatenate([turns[row] for row in rows]) for rows in self.trajectories().rows]


class TurnTokens(msgspec.Struct, frozen=True):
    """The tokens of one row: prefix (all that the policy saw) and action, int32, with its sampling record, each [action tokens]."""

    prefix: np.ndarray
    action: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    sampled: np.ndarray


def build(groups: list[TrainGroup], nodes: dict[tuple[int, int], TreeNode]) -> tuple[TurnTable, list[TurnTokens]]:
    """Table and tokens of a batch. nodes: (tree, node id) -> node, holding every ancestor of every turn."""
    rows = [(group, turn, nodes[group.tree, turn.node]) for group in groups for turn in group.turns]
    names = sorted({name for _, turn, _ in rows for name in turn.scores})
    turns = [_tokens(group.tree, node, nodes) for group, _, node in rows]
    table = TurnTable(
        tree=np.array([group.tree for group, _, _ in rows], np.int64),
        group=np.array([group.id for group, _, _ in rows], np.int64),
        trajectory=np.array([turn.trajectory for _, turn, _ in rows], np.int64),
        turn=np.array([turn.turn for _, turn, _ in rows], np.int64),
        tokens=np.array([len(node.tokens) for _, _, node in rows], np.int64),
        scores={n: np.array([turn.scores.get(n, np.nan) for _, turn, _ in rows], np.float64) for n in names},
        anchor=np.array([_anchor(nodes[group.tree, node.parent]) for group, _, node in rows], np.int64),
        sampled=np.concatenate([turn.sampled for turn in turns]) if turns else np.zeros(0, bool),
    )
    return table, turns


def _anchor(observation: TreeNode) -> int:
    return zlib.crc32(observation.tokens.tobytes())


def _tokens(tree: int, node: TreeNode, nodes: dict[tuple[int, int], TreeNode]) -> TurnTokens:
    pieces, parent = [], node.parent
    while parent >= 0:
        ancestor = nodes[tree, parent]
        pieces.append(ancestor.tokens)
        parent = ancestor.parent
    if not len(node.tokens):
        raise ValueError(f"tree {tree}, node {node.id}: a trained turn without a token; the strategy must not emit it")
    assert node.logprobs is not None and node.versions is not None, "a trained turn is an action"
    sampled = node.sampled if node.sampled is not None else np.ones(len(node.tokens), bool)
    return TurnTokens(np.concatenate(pieces[::-1]), node.tokens, node.logprobs, node.versions, sampled)
