"""The table of turns, which is all that a scheme sees of a batch: one row per turn, and one flat
axis of action tokens. A scheme's ``trains`` says which turns train (``scored``, ``unequal``)."""

import zlib
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec
import numpy as np

from coppice.common.statistics import within
from coppice.common.support import decode
from coppice.learner.forest.trees import Path
from coppice.wire.messages import NO_EXPERT, TrainGroup, TreeNode


class Trajectories(msgspec.Struct, frozen=True):
    """The trajectories of a table, numbered 0, 1, .. without gaps. of: int64 [turns], the
    trajectory of each turn. tree: int64 [trajectories], the question of each. rows: the indices of
    each trajectory's turns, first turn first."""

    of: np.ndarray
    tree: np.ndarray
    rows: list[np.ndarray]

    def total(self, values: np.ndarray) -> np.ndarray:
        """Sum a column over the turns of each trajectory [trajectories]; NaN if its score is
        missing: of a column that only last turns have, such as an outcome, if there is none; of one
        that earlier turns have too, such as a reward, if one turn lacks it."""
        lacking = np.isnan(values)
        sums = np.bincount(self.of, weights=np.where(lacking, 0.0, values))
        most = 0 if (~lacking & ~self.last()).any() else np.bincount(self.of) - 1
        return np.where(np.bincount(self.of, weights=lacking) > most, np.nan, sums)

    def last(self) -> np.ndarray:
        """Return, as bool [turns], whether each turn is the last of its trajectory."""
        is_last = np.zeros(len(self.of), bool)
        is_last[[rows[-1] for rows in self.rows]] = True
        return is_last


class TurnTable(msgspec.Struct, frozen=True):
    """The columns of a batch, each [turns] unless said otherwise.

    tree, group, trajectory, turn: int64 identities (a trajectory number is unique only within its
    group; turns count from 1). tokens: int64, the action tokens of each turn. scores: name ->
    float64, NaN where a turn lacks the score. anchor: int64, equal for turns of a tree in which the
    policy answered the same observation, or in which the environment says that it did. sampled:
    bool [tokens], False for forced tokens. token_scores: name -> float64 [tokens], values of the
    learner's models: "value" (critic), "prm" (beta x log-ratio of the implicit reward model), "kl"
    (log behaviour - log reference), "log_ratio" (log proximal - log behaviour). paths: the tokens
    of each turn, for schemes that compare token by token.
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
    paths: list[Path] = []

    def __len__(self) -> int:
        return len(self.tree)

    def only(self, kept: np.ndarray) -> "TurnTable":
        """Return the table of some of the turns. kept: bool [turns]."""
        tokens = self.per_token(kept)
        identities = (self.tree, self.group, self.trajectory, self.turn, self.tokens)
        tree, group, trajectory, turn, count = (column[kept] for column in identities)
        return TurnTable(
            tree, group, trajectory, turn, count,
            {name: column[kept] for name, column in self.scores.items()},
            None if self.anchor is None else self.anchor[kept],
            None if self.sampled is None else self.sampled[tokens],
            {name: column[tokens] for name, column in self.token_scores.items()},
            [self.paths[row] for row in np.flatnonzero(kept)] if self.paths else [],
        )  # fmt: skip

    def column(self, name: str) -> np.ndarray:
        """Return one score column. Raises KeyError that names the existing columns."""
        if name not in self.scores:
            raise KeyError(f"no score column {name!r} in this batch: it has {sorted(self.scores)}")
        return self.scores[name]

    def token_column(self, name: str) -> np.ndarray:
        """Return one token column. Raises KeyError that names the existing columns."""
        if name not in (columns := self.token_scores):
            raise KeyError(f"no token column {name!r} in this batch: it has {sorted(columns)}")
        return columns[name]

    def per_token(self, values: np.ndarray) -> np.ndarray:
        """Broadcast one value per turn [turns] to all tokens of the turn [tokens]."""
        return np.repeat(values, self.tokens)

    def per_turn(self, values: np.ndarray) -> np.ndarray:
        """Sum one value per token over the sampled tokens of each turn [turns]."""
        return np.bincount(self.row(), weights=values * self.mask(), minlength=len(self))

    def at_last_token(self, values: np.ndarray) -> np.ndarray:
        """Put one value per turn [turns] on the turn's last token; the others get 0 [tokens]."""
        placed = np.zeros(int(self.tokens.sum()))
        placed[np.cumsum(self.tokens) - 1] = values
        return placed

    def row(self) -> np.ndarray:
        """Return the row of each token's turn, int64 [tokens]."""
        return np.repeat(np.arange(len(self)), self.tokens)

    def mask(self) -> np.ndarray:
        """Return, as bool [tokens], whether the policy sampled each token."""
        return np.ones(int(self.tokens.sum()), bool) if self.sampled is None else self.sampled

    def trajectories(self) -> Trajectories:
        """Return the trajectories: turns of one tree and group that share a trajectory number."""
        keys = np.stack([self.tree, self.group, self.trajectory], 1)
        names, of = np.unique(keys, axis=0, return_inverse=True)
        of = of.reshape(-1)
        order = np.lexsort((self.turn, of))
        rows = np.split(order, np.cumsum(np.bincount(of, minlength=len(names)))[:-1])
        return Trajectories(of, names[:, 0], rows)

    def returns(self, column: str) -> tuple[Trajectories, np.ndarray]:
        """Return the trajectories and the sum of a score column over each [trajectories]."""
        trajectories = self.trajectories()
        return trajectories, trajectories.total(self.column(column))

    def questions(self, parts: int, seed: Sequence[int]) -> list[np.ndarray]:
        """Return the questions (values of ``tree``) of each minibatch: at most ``parts`` random
        parts of equal size."""
        trees = np.unique(self.tree)
        if parts > 1:
            trees = np.random.default_rng(seed).permutation(trees)
        return np.array_split(trees, min(parts, len(trees)))

    def token_spans(self) -> list[np.ndarray]:
        """Return the indices of each trajectory's tokens in the order of their generation."""
        turns = np.split(np.arange(int(self.tokens.sum())), np.cumsum(self.tokens)[:-1])
        return [np.concatenate([turns[row] for row in rows]) for rows in self.trajectories().rows]

    def to_go(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of ``values`` from each token to the end of its trajectory [tokens]."""
        sums = np.zeros_like(values)
        for span in self.token_spans():
            sums[span] = np.cumsum(values[span][::-1])[::-1]
        return sums


def scored(name: str) -> Callable[..., np.ndarray]:
    """Return the rule that a trajectory trains if it has its score (``Trajectories.total``). If
    not, the trajectory is left out of the whole update and enters no statistic. name: the score
    column, or the option that names it. The rule returns bool [turns]."""

    def rule(table: TurnTable, **options: str) -> np.ndarray:
        trajectories, totals = table.returns(options.get(name, name))
        return ~np.isnan(totals)[trajectories.of]

    return rule


def unequal(name: str) -> Callable[..., np.ndarray]:
    """Return the rule of ``scored``, which also leaves a question out whose trajectories all score
    the same, if the option ``leave_out_equal`` is True: whitening over a batch would give it an
    advantage that compares nothing."""

    def rule(table: TurnTable, leave_out_equal: bool, **options: str) -> np.ndarray:
        trajectories, totals = table.returns(options.get(name, name))
        kept = ~np.isnan(totals)
        if leave_out_equal:
            kept[kept] = within(trajectories.tree[kept], totals[kept], np.ptp) > 0
        return kept[trajectories.of]

    return rule


def build(
    groups: list[TrainGroup], nodes: dict[tuple[int, int], TreeNode], columns: Collection[str] = ()
) -> TurnTable:
    """Return the table of a batch. nodes: (tree, node id) -> node; it must hold every ancestor of
    every turn. columns: scores that the table has even if no turn has them, as while a judge
    fails."""
    rows = [(group, turn, nodes[group.tree, turn.node]) for group in groups for turn in group.turns]
    names = sorted({name for _, turn, _ in rows for name in turn.scores}.union(columns))
    pictures = {number: png for node in nodes.values() for number, png in node.images.items()}
    paths = [_path(group.tree, node, nodes, pictures) for group, _, node in rows]

    def column(values: Iterable[float], kind: type = np.int64) -> np.ndarray:
        return np.array(list(values), kind)

    return TurnTable(
        tree=column(group.tree for group, _, _ in rows),
        group=column(group.id for group, _, _ in rows),
        trajectory=column(turn.trajectory for _, turn, _ in rows),
        turn=column(turn.turn for _, turn, _ in rows),
        tokens=column(len(node.tokens) for _, _, node in rows),
        scores={n: column((t.scores.get(n, np.nan) for _, t, _ in rows), float) for n in names},
        anchor=column(
            zlib.crc32(nodes[g.tree, n.parent].tokens.tobytes()) if t.anchor is None else t.anchor
            for g, t, n in rows
        ),
        sampled=np.concatenate([path.sampled for path in paths]) if paths else np.zeros(0, bool),
        paths=paths,
    )


def _path(
    tree: int, node: TreeNode, nodes: dict[tuple[int, int], TreeNode], pictures: dict[int, bytes]
) -> Path:
    line = [node]
    while line[-1].parent >= 0:
        line.append(nodes[tree, line[-1].parent])
    if not len(node.tokens):
        raise ValueError(
            f"tree {tree}, node {node.id}: a trained turn without a token; a strategy may emit none"
        )
    assert node.logprobs is not None and node.versions is not None, "a trained turn is an action"
    sampled = node.sampled if node.sampled is not None else np.ones(len(node.tokens), bool)
    support = decode(node.support, len(node.tokens))
    if support is not None and not (support.has(node.tokens) | ~sampled).all():
        raise ValueError(
            f"tree {tree}, node {node.id}: a sampled token is not among those that top-p and top-k"
            " left: mend the engine's Sample.support"
        )
    tokens = np.concatenate([one.tokens for one in reversed(line)]).astype(np.int64)
    start = len(tokens) - len(node.tokens)
    record = node.logprobs, node.versions, sampled
    return Path(tokens, start, pictures, support, *record, _experts(line[::-1]))


def _experts(line: list[TreeNode]) -> np.ndarray | None:
    """Return the experts of each token of a path, int16 [tokens, layers * k]. A node tells those of
    the position before each of its tokens."""
    line = [one for one in line if len(one.tokens)]
    widths = [len(one.experts) // len(one.tokens) for one in line if one.experts is not None]
    if not widths:
        return None
    ends = np.cumsum([len(one.tokens) for one in line])
    told = np.full((ends[-1] + 1, max(widths)), NO_EXPERT, np.int16)
    for one, end in zip(line, ends, strict=True):
        if one.experts is not None:
            told[end - len(one.tokens) : end] = one.experts.reshape(len(one.tokens), max(widths))
    return told[1:]
