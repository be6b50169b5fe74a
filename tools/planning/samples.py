"""What a simulated policy says and reads: token ids of prompts and actions, made up by length or
taken from the journal of a run."""

import functools
import math
import random
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from coppice.actors.environments.base import Environment, Task
from coppice.scheduler.growth.tree import Node, Tree
from coppice.scheduler.ledger.journal import Journal

OURS = frozenset({"valid", "advantage", "truncated"})
"""Columns that the scheduler writes itself."""
MOST_TREES = 512
"""So many trees of a journal are read, evenly spread over the run."""


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


class Source(Protocol):
    """Where texts come from. horizon: no episode has more actions than this. trees: so many have
    texts of their own."""

    horizon: float
    trees: float

    def prompt(self, tree: int) -> np.ndarray:
        """Return the first prompt of a tree, int32."""
        ...

    def action(self, prefix: bytes, turn: int, number: int) -> Sampled:
        """Return the action that is drawn as number 0, 1, .. after a prefix, the bytes of int32,
        with ``turn`` actions before it."""
        ...


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


class MadeUp:
    """Texts of fixed lengths in tokens (``tools.planning.formulas.Assumed``), in which siblings
    share nothing. Which actions end their episode is drawn, so that its mean number of them is
    ``turns``."""

    def __init__(
        self,
        instruction: int,
        prompt: int,
        action: int,
        observation: int,
        turns: float,
        budget: int,
        fresh: bool,
    ):
        self.instruction, self.whole = instruction, prompt
        self.length, self.observation = action, observation
        self.fresh, most = fresh, max(budget, math.ceil(turns))
        self.horizon, self.trees, self.on = float(most), math.inf, going_on(turns, most)

    def prompt(self, tree: int) -> np.ndarray:
        """See ``Source``."""
        return self._prompt(random.Random(tree))

    def action(self, prefix: bytes, turn: int, number: int) -> Sampled:
        """See ``Source``."""
        rng = seeded(prefix, number)
        ends = turn + 1 >= self.horizon or rng.random() >= self.on
        tokens = _unlike(rng, self.length)
        then = self._prompt(rng) if self.fresh else _unlike(rng, self.observation)
        return Sampled(tokens, turn, True, ends, then)

    def _prompt(self, rng: random.Random) -> np.ndarray:
        own = _unlike(rng, self.whole - self.instruction)
        return np.concatenate([np.arange(self.instruction, dtype=np.int32), own])


def _unlike(rng: random.Random, count: int) -> np.ndarray:
    return np.array([rng.getrandbits(24) for _ in range(count)], np.int32)


class Recorded:
    """Texts of a run's training trees. A prefix of the run is answered as it was there, each time
    in turn; then, and where the prefix is a new one, as some prefix of the same turn was. Equal
    prompts of different trees are one prefix: in a game many trees come to the same position."""

    def __init__(self, run: Path, environment: Environment):
        self.environment = environment
        journal = Journal(run / "journal.sqlite", readonly=True)
        try:
            rows = journal.trees("split='train' AND status='closed'")
            trees = [journal.tree(row) for row in rows[:: -(-len(rows) // MOST_TREES) or 1]]
        finally:
            journal.close()
        if not trees:
            raise ValueError(f"{run} has no tree that ended: expected a run that made an update")
        random.Random(0).shuffle(trees)
        self.trees = float(len(trees))
        self.prompts: list[np.ndarray] = []
        self.known: defaultdict[bytes, list[Sampled]] = defaultdict(list)
        for tree in trees:
            self._read(tree)
        self.places: defaultdict[int, list[list[Sampled]]] = defaultdict(list)
        for actions in self.known.values():
            self.places[actions[0].turn].append(actions)
        self.horizon = max(self.places) + 1 if environment.fresh else math.inf
        self._complete()

    def prompt(self, tree: int) -> np.ndarray:
        """See ``Source``."""
        return self.prompts[tree % len(self.prompts)]

    def action(self, prefix: bytes, turn: int, number: int) -> Sampled:
        """See ``Source``."""
        actions, rng = self.known.get(prefix, []), seeded(prefix)
        while number >= len(actions):
            number -= len(actions)
            actions = rng.choice(self.places.get(turn) or self.places[max(self.places)])
        return actions[number]

    def _read(self, tree: Tree) -> None:
        """Note every action of a tree below what the policy had read before it."""
        fresh = self.environment.fresh
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
            if fresh:
                below = shown.get((node.trajectory, node.step))
                then = None if below is None else tree.prefix(below)
            else:
                observed = [n for n in tree.children(node) if n.kind == "observation"]
                then = observed[0].tokens if observed else None
            ends = node.id in last if node.chosen else self._answers(tree, node)
            scores = {name: node.scores[name] for name in node.scores.keys() - OURS}
            valid = bool(node.scores.get("valid", 1.0))
            sampled = Sampled(node.tokens, node.step - 1, valid, ends, then, scores)
            self.known[tree.prefix(place).tobytes()].append(sampled)

    def _answers(self, tree: Tree, node: Node) -> bool:
        """Return whether a candidate that was not continued would have ended its episode, as far as
        its text tells."""
        state = msgspec.convert(tree.state_before(node), self._state)
        return self.environment.read(state, node.text).kind == "answer"

    @functools.cached_property
    def _state(self) -> type:
        return type(self.environment.initial(Task("0", "?")))

    def _complete(self) -> None:
        """Give every action that nothing follows in the run what followed an equal one there, or
        another one of its turn."""
        for turn in sorted(self.places, reverse=True):
            every = [action for actions in self.places[turn] for action in actions]
            after = [action.then for action in every if action.then is not None]
            after = after or [np.zeros(0, np.int32)]
            for actions in self.places[turn]:
                followed = [action for action in actions if action.then is not None]
                alike = {action.tokens.tobytes(): action.then for action in followed}
                for action in actions:
                    if action.then is None:
                        key = action.tokens.tobytes()
                        action.then = alike[key] if key in alike else seeded(key).choice(after)
