"""Random trees of token paths for the learner's proofs."""

import random

from hypothesis import strategies as st

from coppice.learner.forest.trees import Path

random_paths = st.lists(
    st.lists(st.integers(0, 2), min_size=2, max_size=14), min_size=1, max_size=10
)
"""Token lists with many shared prefixes; some are prefixes of others."""


def forest(seed: int, trees: int = 2, steps: int = 2) -> list[Path]:
    """Paths of random trees: three candidates a step, of which the first is continued."""
    rng = random.Random(seed)

    def some(n: int) -> list[int]:
        return [rng.randrange(256) for _ in range(n)]

    paths, common = [], some(5)
    for _ in range(trees):
        prefix = common + some(rng.randrange(1, 6))
        for _ in range(steps):
            actions = [some(rng.randrange(1, 7)) for _ in range(3)]
            paths += [Path(prefix + action, len(prefix)) for action in actions]
            prefix = prefix + actions[0] + some(4)
    return paths
