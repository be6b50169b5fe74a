"""What a simulated policy says and reads: token ids of prompts, actions and observations, made up by length or taken from the journal of a run.

Every id ends in a digit (base ``DIGITS``) that says what it belongs to, so that a prefix alone tells how many actions it holds.
"""

import functools
import math
import random
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from actors.environments.base import Environment, Task
from scheduler.journal import Journal
from scheduler.tree import Node, Tree

DIGITS = 8
PROMPT, ACTION, SEEN, GOES_ON, ENDS, INVALID, TURN = range(7)
"""The digits. GOES_ON, ENDS and INVALID mark the last token of an action, TURN the first token of a fresh prompt, whose number is its turn."""
OURS = frozenset({"valid", "advantage", "truncated"})
"""Columns that the scheduler writes itself."""
MOST_TREES = 512
"""So many trees of a journal are read, evenly spread over the run."""


class Lengths(msgspec.Struct, frozen=True):
    """Expected lengths, in tokens. instruction: the part of a first prompt that all questions share; prompt: the whole. action: sampled by one action;
    observation: what the policy reads after it. turns: actions of an episode."""

    instruction: int
    prompt: int
    action: int
    observation: int
    turns: float


class Sampled(msgspec.Struct, frozen=True):
    """One action. tokens: int32 with digits. seen: what followed it, if it is known. scores: what judges gave it."""

    tokens: np.ndarray
    seen: np.ndarray | None = None
    scores: dict[str, float] = {}


class Source(Protocol):
    """Where texts come from. The same prefix always gives the same ``choices``, so that texts which siblings share stay shared."""

    def prompt(self, tree: int) -> np.ndarray:
        """Return the first prompt of a tree, or what all its prompts share if they are fresh, int32 with digits."""
        ...

    def tail(self, turn: int, rng: random.Random) -> np.ndarray:
        """Return the own part of a fresh prompt, int32 with digits."""
        ...

    def choices(self, prefix: bytes, turn: int, rng: random.Random) -> list[Sampled]:
        """Return actions that the policy may take after a prefix, int32 bytes; more may be drawn from other prefixes of this turn."""
        ...


def marked(content: np.ndarray | Sequence[int], digit: int, last: int | None = None) -> np.ndarray:
    """Return ids with their digit, int32; ``last`` is that of the last one, if it differs."""
    tokens = np.asarray(content, np.int32) * DIGITS + digit
    if last is not None:
        tokens[-1] += last - digit
    return tokens


def turn_of(prefix: np.ndarray) -> int:
    """Return the number of actions in a prefix with digits."""
    digits = prefix % DIGITS
    fresh = np.flatnonzero(digits == TURN)
    return int(prefix[fresh[-1]] // DIGITS) if len(fresh) else int(np.isin(digits, (GOES_ON, ENDS, INVALID)).sum())


def going_on(turns: float, budget: int) -> float:
    """Return the probability p that an action is not the last, so that episodes of at most ``budget`` actions have ``turns`` in the mean: the p with
    1 + p + p^2 + .. + p^(budget - 1) = turns."""
    low, high = 0.0, 1.0
    for _ in range(50):
        p = (low + high) / 2
        low, high = (p, high) if math.fsum(p**i for i in range(budget)) < turns else (low, p)
    return high


class MadeUp:
    """Texts of fixed lengths, in which siblings share nothing. Which actions end their episode is drawn."""

    def __init__(self, lengths: Lengths, budget: int, fresh: bool):
        self.fresh = fresh
        self.lengths, self.most = lengths, max(budget, math.ceil(lengths.turns))
        self.on = going_on(lengths.turns, self.most)

    def prompt(self, tree: int) -> np.ndarray:
        """See ``Source``."""
        size, shared = self.lengths, range(self.lengths.instruction)
        own = 0 if self.fresh else size.prompt - size.instruction
        return marked([*shared, *_unlike(random.Random(tree), own)], PROMPT)

    def tail(self, turn: int, rng: random.Random) -> np.ndarray:
        """See ``Source``."""
        return _fresh(turn, marked(_unlike(rng, max(1, self.lengths.prompt - self.lengths.instruction)), PROMPT))

    def choices(self, prefix: bytes, turn: int, rng: random.Random) -> list[Sampled]:
        """See ``Source``."""
        last = GOES_ON if turn + 1 < self.most and rng.random() < self.on else ENDS
        return [
            Sampled(
                marked(_unlike(rng, self.lengths.action), ACTION, last),
                marked(_unlike(rng, self.lengths.observation), SEEN),
            )
        ]


def _fresh(turn: int, tokens: np.ndarray) -> np.ndarray:
    tokens[:1] = turn * DIGITS + TURN
    return tokens


def _unlike(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(24) for _ in range(count)]


class Recorded:
    """Texts of a run's training trees. A prefix of the run is answered as it was there, another one as some prefix of the same turn was."""

    def __init__(self, run: Path, environment: Environment):
        self.environment = environment
        journal = Journal(run / "journal.sqlite", readonly=True)
        try:
            rows = journal.trees("split='train' AND status='closed'")
            chosen = rows[:: -(-len(rows) // MOST_TREES) or 1]
            trees = [journal.tree(row) for row in chosen]
        finally:
            journal.close()
        if not trees:
            raise ValueError(f"{run} has no tree that ended: expected a run that made an update")
        random.Random(0).shuffle(trees)
        self.prompts = [marked(tree.nodes[0].tokens, PROMPT) for tree in trees]
        self.tails: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self.known: defaultdict[bytes, list[Sampled]] = defaultdict(list)
        for tree in trees:
            self._read(tree)
        self.places: defaultdict[int, list[list[Sampled]]] = defaultdict(list)
        for prefix, actions in self.known.items():
            self.places[turn_of(np.frombuffer(prefix, np.int32))].append(actions)

    def prompt(self, tree: int) -> np.ndarray:
        """See ``Source``."""
        return self.prompts[tree % len(self.prompts)]

    def tail(self, turn: int, rng: random.Random) -> np.ndarray:
        """See ``Source``."""
        return rng.choice(self.tails.get(turn) or self.tails[max(self.tails)])

    def choices(self, prefix: bytes, turn: int, rng: random.Random) -> list[Sampled]:
        """See ``Source``."""
        return self.known.get(prefix) or rng.choice(self.places.get(turn) or self.places[max(self.places)])

    def _read(self, tree: Tree) -> None:
        """Note every action of a tree below its prefix, with digits."""
        whole: dict[int, np.ndarray] = {-1: np.zeros(0, np.int32)}
        actions = [node for node in tree.nodes.values() if node.kind == "action"]
        ends = {own[-1].id for one in {node.trajectory for node in actions} if (own := tree.actions(one))}
        for node in tree.nodes.values():
            if node.kind == "action" and not node.forced and len(node.tokens):
                tokens = marked(node.tokens, ACTION, self._digit(tree, node, ends))
                below = next((n for n in tree.children(node) if n.kind == "observation"), None)
                seen = None if below is None or self.environment.fresh else marked(below.tokens, SEEN)
                scores = {name: node.scores[name] for name in node.scores.keys() - OURS}
                self.known[whole[node.parent].tobytes()].append(Sampled(tokens, seen, scores))
            elif node.kind == "prompt" and node.parent >= 0:
                tokens = _fresh(node.step, marked(node.tokens, PROMPT))
                self.tails[node.step].append(tokens)
            else:
                tokens = marked(node.tokens, PROMPT if node.kind == "prompt" else SEEN)
            whole[node.id] = np.concatenate([whole[node.parent], tokens])

    def _digit(self, tree: Tree, node: Node, ends: set[int]) -> int:
        """Return the digit of an action's last token. What a candidate that was not continued does is read from its text."""
        if not node.scores.get("valid", 1.0):
            return INVALID
        if node.chosen:
            return ENDS if node.id in ends else GOES_ON
        before = msgspec.convert(tree.state_before(node), self._state)
        return ENDS if self.environment.read(before, node.text).kind == "answer" else GOES_ON

    @functools.cached_property
    def _state(self) -> type:
        return type(self.environment.initial(Task("0", "?")))


def seeded(prefix: bytes) -> random.Random:
    """Return the randomness of a prefix, the same in every process."""
    return random.Random(zlib.crc32(prefix))
