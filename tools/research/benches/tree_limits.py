"""The most that sharing prefixes can save in the learner, by arithmetic: multiplications of a forward, unshared over shared.

The token ratio (path tokens over packed tokens) is not that limit: every distinct trained target passes the head either way, which
lowers it, and a shared token's attention is computed once, which raises it where prefixes are long. A backward costs twice the forward in every
part, so the ratio is also that of a whole update. Nothing is run here; ``tree_training`` compares its times with these numbers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from learner.trees import Path, pack
from tools.planning import formulas
from tools.planning.formulas import Dense
from tools.planning.growth import packed
from tools.research.benches.tree_shapes import SHAPES

MODELS = {
    "SmolLM2-135M": Dense(30, 576, 1536, 9, 49_152, 3),
    "ten of its layers": Dense(10, 576, 1536, 9, 49_152, 3),
    "Qwen2.5-7B": formulas.SHAPES["Qwen2.5-7B"],
}


def limit(paths: Sequence[Path], model: Dense) -> float:
    """Return the multiplications of the unshared paths over those of their forest. Trained tokens that paths share pass the head once."""
    work = packed([paths], sum(len(path.tokens) for path in paths), 1)
    unshared = model.multiplications(work["path"], work["path_pairs"], work["path_targets"])
    return unshared / model.multiplications(work["packed"], work["pairs"], work["targets"])


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
