"""Prefill tokens that the engine computes over the ideal, in which each distinct prefix is prefilled once per policy version."""

import asyncio
from typing import Any

from tools.defaults.models import DEFAULT
from tools.research.benches import slate_shape


async def _measure(model: str) -> dict[str, Any]:
    engine = await slate_shape.engine(slate_shape.model_folder(model))
    await slate_shape.trees(engine)
    await engine.close()
    counts = engine.counts
    ratio = counts["prefilled_tokens"] / counts["ideal_prefill_tokens"]
    row = {"name": "prefill tokens computed / ideal (SLATE trees)", "ratio": ratio, "goal": 1.02, "better": "lower"}
    return row | {
        key: counts[key] for key in ("prompt_tokens", "prefilled_tokens", "ideal_prefill_tokens", "decoded_tokens")
    }


def run(model: str = DEFAULT) -> dict[str, Any]:
    """Return counts of tokens and their ratio. Nothing depends on time."""
    return asyncio.run(_measure(model))
