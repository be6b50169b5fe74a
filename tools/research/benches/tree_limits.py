"""The most that sharing prefixes can save in the learner, by arithmetic: multiplications of a forward, unshared over shared.

The token ratio (path tokens over packed tokens) is not that limit: every distinct trained target passes the head either way, which
lowers it, and a shared token's attention is computed once, which raises it where prefixes are long. A backward costs twice the forward in every
part, so the ratio is also that of a whole update. Nothing is run here; ``tree_training`` compares its times with these numbers.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from learner.trees import Path, pack
from tools.research.benches.tree_shapes import SHAPES


class Dense(msgspec.Struct, frozen=True):
    """The sizes of a model of the Llama or Qwen family that the count needs."""

    layers: int
    width: int
    inner: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int

    @property
    def per_token(self) -> int:
        """The weights that one token passes in all layers: queries and output, keys and values, and the three of the MLP."""
        attention = 2 * self.width * self.head_width * (self.heads + self.key_heads)
        return self.layers * (attention + 3 * self.width * self.inner)

    @property
    def per_pair(self) -> int:
        """The multiplications of one (query, key) pair in all layers: the score and the weighted value."""
        return 2 * self.layers * self.heads * self.head_width


MODELS = {
    "SmolLM2-135M": Dense(30, 576, 1536, 9, 3, 64, 49_152),
    "ten of its layers": Dense(10, 576, 1536, 9, 3, 64, 49_152),
    "Qwen2.5-7B": Dense(28, 3584, 18_944, 28, 4, 128, 152_064),
}


def limit(paths: Sequence[Path], model: Dense) -> float:
    """Return the multiplications of the unshared paths over those of their forest. Trained tokens that paths share pass the head once."""
    forest = pack(paths)
    targets = len(np.unique(np.stack([forest.read, forest.target]), axis=1).T)
    pairs, shared_pairs = sum(len(p.tokens) * (len(p.tokens) + 1) / 2 for p in paths), int((forest.depth + 1).sum())
    head = model.vocabulary * model.width
    unshared = forest.path_tokens * model.per_token + pairs * model.per_pair + len(forest.target) * head
    shared = forest.nodes * model.per_token + shared_pairs * model.per_pair + targets * head
    return unshared / shared


def run() -> dict[str, Any]:
    """Count every shape of ``tree_shapes`` at every model. The ratio is the smallest limit over its token ratio."""
    rows = []
    for name, shape in SHAPES.items():
        paths = shape(np.random.default_rng(0))
        rows.append(
            {"shape": name, "token_ratio": pack(paths).token_ratio}
            | {m: limit(paths, size) for m, size in MODELS.items()}
        )
    worst = min(row[name] / row["token_ratio"] for row in rows for name in MODELS)
    return {
        "name": "limit of sharing by arithmetic / token ratio (worst)",
        "ratio": worst,
        "goal": 0.0,
        "better": "higher",
        "shapes": rows,
    }
