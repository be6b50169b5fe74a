"""What a simulated policy says and reads: token ids of prompts and actions, made up by length or
taken from the journal of a run."""

import contextlib
import math
import random
import zlib
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np

from coppice.actors.environments.base import Environment, Task
from coppice.scheduler.growth.tree import Node, Tree
from coppice.scheduler.ledger.journal import Journal

OURS = frozenset({"valid", "advantage", "truncated"})
"""Columns that the scheduler writes itself."""
MOST_TREES = 512
"""The most trees of a journal that are read, evenly spread over the run."""


class Sampled(msgspec.Struct):
    """One action. tokens: int32. turn: the number of actions before it. then: what the policy reads
    after it, an observation or the whole next prompt where prompts are fresh. scores: what judges
    gave it."""

    tokens: np.ndarray
    turn: int
    valid: bool
    ends: bool
    then: np.ndarray | None
    scores: dict[str, float] = {}


def going_on(turns: float, budget: int) -> float:
    """Return the probability p that an action is not the last, so that episodes of at most
    ``budget`` actions have ``turns`` in the mean: the p with 1 + p + p^2 + .. + p^(budget - 1) =
    turns."""
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        low, high = (p, high) if math.fsum(p**i for i in range(budget)) < turns else (low, p)
    return high


def seeded(prefix: bytes, number: int = 0) -> random.Random:
    """Return the randomness of a prefix, the same in every process."""
    return random.Random(zlib.crc32(prefix) + (number << 32))


class MadeUp(msgspec.Struct):
    """Texts of fixed lengths in tokens (``formulas.Assumed``), in which siblings share nothing.
    Which actions end their episode is drawn, so that its mean number of them is ``turns``. horizon:
    the most actions of an episode. trees: how many have texts of their own."""

    instruction: int
    prompt_length: int
    action_length: int
    observation: int
    turns: float
    budget: int
    fresh: bool
    horizon: float = 0.0
    trees: float = math.inf
    on: float = 0.0

    def __post_init__(self) -> None:
        self.horizon = float(max(self.budget, math.ceil(self.turns)))
        self.on = going_on(self.turns, int(self.horizon))

    def prompt(self, tree: int) -> np.ndarray:
        """Return the first prompt of a tree, int32."""
        return self._prompt(random.Random(tree))

    def action(self, prefix: bytes, turn: int, number: int) -> Sampled:
        """Return the action that is drawn as number 0, 1, .. after a prefix, the bytes of int32,
        with ``turn`` actions before it."""
        rng = seeded(prefix, number)
        ends = turn + 1 >= self.horizon or rng.random() >= self.on
        tokens = _unlike(rng, self.action_length)
        then = self._prompt(rng) if self.fresh else _unlike(rng, self.observation)
        return Sampled(tokens, turn, True, ends, then)

    def _prompt(self, rng: random.Random) -> np.ndarray:
        own = _unlike(rng, self.prompt_length - self.instruction)
        return np.concatenate([np.arange(self.instruction, dtype=np.int32), own])


def _unlike(rng: random.Random, count: int) -> np.ndarray:
    return np.array([rng.getrandbits(24) for _ in range(count)], np.int32)


class RecordedTexts:
    """Texts of a run's training trees, with the attributes and methods of ``MadeUp``. A prefix of
    the run is answered as it was there, each time in turn; then, and where the prefix is a new one,
    as some prefix of the same turn was. Equal prompts of different trees are one prefix: in a game
    many trees come to the same position."""

    def __init__(self, run: Path, environment: Environment):
        with contextlib.closing(Journal(run / "journal.sqlite", readonly=True)) as journal:
            rows = journal.trees("split='train' AND status='closed'")
            trees = [journal.tree(row) for row in rows[:: -(-len(rows) // MOST_TREES) or 1]]
        if not trees:
            raise ValueError(f"{run} has no tree that ended: expected a run that made an update")
        random.Random(0).shuffle(trees)
        self.environment, self.trees = environment, float(len(trees))
        self.prompts: list[np.ndarray] = []
        self.followed: defaultdict[bytes, list[Sampled]] = defaultdict(list)
        for tree in trees:
            self._read(tree)
        self.places: defaultdict[int, list[list[Sampled]]] = defaultdict(list)
        for actions in self.followed.values():
            self.places[actions[0].turn].append(actions)
        self.horizon = max(self.places) + 1 if environment.fresh else math.inf
        for places in self.places.values():
            _complete(places)

    def prompt(self, tree: int) -> np.ndarray:
        """See ``MadeUp``."""
        return self.prompts[tree % len(self.prompts)]

    def action(self, prefix: bytes, turn: int, number: int) -> Sampled:
        """See ``MadeUp``."""
        actions, rng = self.followed.get(prefix, []), seeded(prefix)
        while number >= len(actions):
            number -= len(actions)
            actions = rng.choice(self.places.get(turn) or self.places[max(self.places)])
        return actions[number]

    def _read(self, tree: Tree) -> None:
        """Note every action of a tree below what the policy had read before it."""
        prompts = [n for n in tree.nodes.values() if n.kind == "prompt" and n.parent >= 0]
        shown = {(n.trajectory, n.step): n for n in prompts}
        self.prompts.append(tree.prefix(shown.get((0, 0), tree.nodes[0])))
        actions = [node for node in tree.nodes.values() if node.kind == "action"]
        ended = [tree.actions(number) for number in {node.trajectory for node in actions}]
        last = {own[-1].id for own in ended if own}
        for node in actions:
            place = tree.parent(node)
            if place is None or node.forced or not len(node.tokens):
                continue
            if self.environment.fresh:
                below = shown.get((node.trajectory, node.step))
                then = None if below is None else tree.prefix(below)
            else:
                observed = [n for n in tree.children(node) if n.kind == "observation"]
                then = observed[0].tokens if observed else None
            ends = node.id in last if node.chosen else self._answers(tree, node)
            scores = {name: node.scores[name] for name in node.scores.keys() - OURS}
            valid = bool(node.scores.get("valid", 1.0))
            sampled = Sampled(node.tokens, node.step - 1, valid, ends, then, scores)
            self.followed[tree.prefix(place).tobytes()].append(sampled)

    def _answers(self, tree: Tree, node: Node) -> bool:
        """Whether a candidate that was not continued would have ended its episode, as far as its
        text tells."""
        kind = type(self.environment.initial(Task("0", "?")))
        state = msgspec.convert(tree.state_before(node), kind)
        return self.environment.read(state, node.text).kind == "answer"


def _complete(places: list[list[Sampled]]) -> None:
    """Give every action of a turn that nothing follows in the run what followed an equal one there,
    or another one of the turn."""
    after = [one.then for actions in places for one in actions if one.then is not None]
    after = after or [np.zeros(0, np.int32)]
    for actions in places:
        alike = {one.tokens.tobytes(): one.then for one in actions if one.then is not None}
        for action in (one for one in actions if one.then is None):
            key = action.tokens.tobytes()
            action.then = alike[key] if key in alike else seeded(key).choice(after)
