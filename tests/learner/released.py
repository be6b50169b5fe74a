"""The advantages of SPO-tree, TreeRL and TreePO as their released code computes them, written on
trees with float64 recursion.

Every result is a push: what an update multiplies the score function of a token by, summed over all
copies of that token (the same token after the same prefix of the same question).
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from coppice.learner import schemes
from coppice.learner.update.table import TurnTable
from tests.learner.tables import acted

Key = tuple[int, ...]
"""The question, and the tokens up to and including one of them."""
Push = dict[Key, float]


class Node(msgspec.Struct):
    """What one request of the sampler gave: an edge of the tree and the node at its end. outcome:
    of a leaf."""

    tokens: list[int]
    children: list["Node"] = []
    outcome: float = 0.0


def grown(rng: np.random.Generator, widths: Sequence[int], segment: int = 3) -> Node:
    """Draw a tree: every node has ``widths`` children, level by level, and ends early with
    probability 0.2. No token comes twice, so no two siblings have an equal token."""

    def child(level: int) -> Node:
        ends = level == len(widths) or rng.random() < 0.2
        length = int(rng.integers(1, segment + 1)) if ends else segment
        fresh = rng.integers(1, 2**30, length)
        below = [] if ends else [child(level + 1) for _ in range(widths[level])]
        return Node(fresh.tolist(), below, float(rng.random() < 0.5))

    return Node([], [child(1) for _ in range(widths[0])])


def paths(node: Node, above: tuple[Node, ...] = ()) -> Iterator[tuple[Node, ...]]:
    here = (*above, node)
    if not node.children:
        yield here
    for child in node.children:
        yield from paths(child, here)


def leaves(node: Node) -> list[float]:
    return [path[-1].outcome for path in paths(node)]


def unsure(token: int) -> bool:
    return token % 3 != 0


def table(questions: Sequence[Node]) -> TurnTable:
    """The leaves as trajectories of one turn, with the columns ``outcome`` and ``weight``."""
    rows = [(number, path) for number, root in enumerate(questions) for path in paths(root)]
    tokens = [np.array([x for node in path for x in node.tokens], np.int32) for _, path in rows]
    weight = [1 / math.prod(len(node.children) for node in path[:-1]) for _, path in rows]
    numbers, turns = np.array([number for number, _ in rows]), np.arange(len(rows))
    scores = {
        "outcome": np.array([path[-1].outcome for _, path in rows]), "weight": np.array(weight)
    }  # fmt: skip
    return TurnTable(
        numbers, numbers, turns, np.ones_like(turns), np.array(list(map(len, tokens))), scores,
        paths=[acted([0], own, [-1.0 if unsure(x) else -0.01 for x in own]) for own in tokens],
    )  # fmt: skip


def ours(questions: Sequence[Node], scheme: str, **options: object) -> Push:
    """Return the push of one of this project's schemes with ``aggregation = "token"``."""
    batch = table(questions)
    loaded = schemes.load(scheme, options)
    batch = batch.only(loaded.trains(batch))
    estimate = loaded(batch)
    kept = batch.mask() if estimate.trained is None else estimate.trained
    push, at = defaultdict[Key, float](float), 0
    for tree, path in zip(batch.tree, batch.paths, strict=True):
        action = path.tokens[path.start :]
        for i in range(len(action)):
            push[(int(tree), *map(int, action[: i + 1]))] += (
                estimate.advantages[at] * kept[at] / kept.sum()
            )
            at += 1
    return push


def _whitened(terms: Sequence[tuple[Key, float]]) -> Push:
    push, values = defaultdict[Key, float](float), np.array([value for _, value in terms])
    white = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    for (key, _), value in zip(terms, white, strict=True):
        push[key] += value / len(terms)
    return push


def spo(questions: Sequence[Node]) -> Push:
    """SPO-tree: ``extract_edges_from_tree`` and the trainer's probability mask."""
    terms: list[tuple[Key, float]] = []

    def value(node: Node) -> float:
        if not node.children:
            return node.outcome
        return float(np.mean([value(child) for child in node.children]))

    def walk(node: Node, key: Key) -> None:
        for child in node.children:
            gain, at = value(child) - value(node), key
            for token in child.tokens:
                at = (*at, token)
                if unsure(token) and abs(gain) > 1e-12:
                    terms.append((at, gain))
            walk(child, at)

    for number, root in enumerate(questions):
        walk(root, (number,))
    return _whitened(terms)


def treerl(questions: Sequence[Node]) -> Push:
    """TreeRL: ``leaf_normalize``, ``compute_weighted_update`` ("sqrt"), ``path_from_root_to_node``,
    ``fill_in_paths`` and the state's value."""
    push, tokens = defaultdict[Key, float](float), 0
    for number, root in enumerate(questions):
        every = leaves(root)

        def own(node: Node, every: list[float] = every) -> float:
            compared = [x - (sum(every) - x) / (len(every) - 1) for x in leaves(node)]
            return float(np.mean(compared)) / math.sqrt(len(compared))

        for path in paths(root):
            gains = [own(node) - own(before) for before, node in itertools.pairwise(path)]
            for i in range(1, len(gains)):
                gains[i] = gains[i - 1] if abs(gains[i]) < 1e-8 else gains[i]
            key: Key = (number,)
            for node, gain in zip(path[1:], gains, strict=True):
                for token in node.tokens:
                    key, tokens = (*key, token), tokens + 1
                    push[key] += gain + own(node)
    return {key: value / tokens for key, value in push.items()}


def treepo(questions: Sequence[Node]) -> Push:
    """TreePO: ``compute_tree_reinforce_plus_plus_baseline_outcome_advantage`` after the filter of
    equal groups."""
    terms: list[tuple[Key, float]] = []
    for number, root in enumerate(questions):
        if len(set(leaves(root))) == 1:
            continue
        for path in paths(root):
            groups = [leaves(node) for node in path if len(leaves(node)) > 1]
            advantage = np.mean([path[-1].outcome - np.mean(group) for group in groups])
            key: Key = (number,)
            for token in (x for node in path for x in node.tokens):
                key = (*key, token)
                terms.append((key, float(advantage)))
    return _whitened(terms)
