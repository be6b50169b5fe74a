"""Batches of token paths in the shapes on which the four methods train, for the learner's benchmarks. Tokens are random, because only
lengths and shared prefixes matter. The lengths of ``slate`` come from a real batch; the others have half of their real lengths, so that
the padded reference ends soon."""

from collections.abc import Callable
from typing import Literal

import numpy as np

from learner.trees import Path

VOCABULARY = 49152
"""Token ids are below this number. ``branching`` is used with a smaller model, modulo its vocabulary."""


def _words(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, VOCABULARY, count).tolist()


def slate(rng: np.random.Generator, question: int = 200, steps: int = 4, k: int = 5, action: int = 80, retrieved: int = 400) -> list[Path]:  # fmt: skip
    """Make one question with k actions from one prefix at every step, one of which is continued."""
    paths, prefix = [], _words(rng, question)
    for _ in range(steps):
        actions = [_words(rng, action) for _ in range(k)]
        paths += [Path(prefix + a, len(prefix)) for a in actions]
        prefix = prefix + actions[0] + _words(rng, retrieved)
    return paths


def grpo(rng: np.random.Generator, prompt: int = 500, k: int = 8, action: int = 100) -> list[Path]:
    """Make k answers to one prompt."""
    prefix = _words(rng, prompt)
    return [Path(prefix + _words(rng, action), prompt) for _ in range(k)]


def mc_pr(rng: np.random.Generator, prompt: int = 100, states: int = 4, n: int = 12, turn: int = 32) -> list[Path]:
    """Make n continuations of one turn from each state of a trajectory."""
    paths, prefix = [], _words(rng, prompt)
    for _ in range(states):
        paths += [Path(prefix + _words(rng, turn), len(prefix)) for _ in range(n)]
        prefix = prefix + _words(rng, 2 * turn)
    return paths


def episodes(rng: np.random.Generator, prompt: int = 100, count: int = 6, turns: int = 4, turn: int = 30) -> list[Path]:
    """Make whole game episodes that share only the prompt. Each is one path, trained from the end of the prompt on."""
    prefix = _words(rng, prompt)
    return [Path(prefix + _words(rng, turns * turn), prompt) for _ in range(count)]


def branching(rng: np.random.Generator, continued: int, steps: int = 4, k: int = 5, action: int = 40, retrieved: int = 200) -> list[Path]:  # fmt: skip
    """Make a tree with k actions at every step, of which ``continued`` are continued."""
    paths: list[Path] = []

    def grow(prefix: list[int], left: int) -> None:
        actions = [_words(rng, action) for _ in range(k)]
        paths.extend(Path(prefix + a, len(prefix)) for a in actions)
        for chosen in actions[:continued] if left > 1 else []:
            grow(prefix + chosen + _words(rng, retrieved), left - 1)

    grow(_words(rng, 100), steps)
    return paths


Name = Literal["slate", "grpo", "mc_pr", "episodes"]
SHAPES: dict[Name, Callable[..., list[Path]]] = {"slate": slate, "grpo": grpo, "mc_pr": mc_pr, "episodes": episodes}
