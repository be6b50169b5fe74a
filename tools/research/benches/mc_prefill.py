"""Prefill of MC-PR (methods.md 3.6): 100 continuations from every state, prompt tokens computed over the ideal.

These are whole games of the real strategy on the real engine, with a prompt that has all the rules and with a compact prompt of two dozen
tokens. The ideal computes each distinct prefix once. A prompt that was computed before (``repeated_prompts``) costs nothing, because the
cache keeps the hidden state at its end.

The compact prompt is also measured without sharing: one request per sample, and no prefix cache. asked_over_prefilled counts the prompt of
a request once; unshared_over_prefilled counts it once per sample.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from actors.engines import admission, memory
from actors.engines.radix import Match, RadixCache, Read
from judges.oracles.tictactoe import TicTacToeOracle
from scheduler.config import SchedulerConfig
from tools.research.benches import game_shape

WHOLE_GAMES, GAMES, CONTINUATIONS = 1, 4, 100
GOAL = 1.02


class NoCache(RadixCache):
    """Takes the place of the engine's prefix cache and keeps nothing."""

    def match(self, tokens: np.ndarray) -> Match:
        """Find nothing."""
        return Match(0, [], None)

    def insert(self, tokens: np.ndarray, read: Read | None = None, ending: torch.Tensor | None = None) -> int:
        """Keep nothing and report every token as new."""
        return len(tokens)


def _nothing_common(a: np.ndarray, b: np.ndarray) -> int:
    return 0


@contextmanager
def _unshared() -> Iterator[None]:
    """Make engines that start inside share no prefill. They do not wait for the prefix of another request either."""
    with (
        mock.patch.object(memory, "RadixCache", NoCache),
        mock.patch.object(admission, "common_length", _nothing_common),
    ):
        yield


async def _measure(
    model: Path, folder: Path, games: int, continuations: int, prompt: str, split: bool = False
) -> dict[str, Any]:
    judge = TicTacToeOracle(kind="minimax")
    settings = SchedulerConfig(
        strategy="mc_value",
        judge=judge.name,
        max_action_tokens=game_shape.ACTION_TOKENS,
        strategy_options={"continuations": continuations},
    )
    engine = game_shape.engine(model, max(continuations, 100))
    async with game_shape.opened(game_shape.Services(engine, [judge], split)) as services:
        counts = await game_shape.play(services, model, folder, games, settings, prompt=prompt)
        spent = time.monotonic() - services.start_s
        counters = ("prompt_tokens", "prefilled_tokens", "ideal_prefill_tokens", "decoded_tokens")
        counted: dict[str, Any] = {name: engine.counts[name] for name in counters}
        return counted | {
            "ratio": counted["prefilled_tokens"] / counted["ideal_prefill_tokens"],
            "excess_tokens": counted["prefilled_tokens"] - counted["ideal_prefill_tokens"],
            "asked_over_prefilled": counted["prompt_tokens"] / counted["prefilled_tokens"],
            "unshared_over_prefilled": services.unshared_tokens / counted["prefilled_tokens"],
            "requests": services.prompts.total(),
            "repeated_prompts": services.prompts.total() - len(services.prompts),
            "evicted_tokens": engine.cache.evicted_tokens,
            "continuation_steps": counts["continuation_steps"],
            "wall_s": spent,
            "busy_s": engine.busy_s,
        }


def run(whole_games: int = WHOLE_GAMES, games: int = GAMES, continuations: int = CONTINUATIONS) -> dict[str, Any]:
    """Return the counts, and the times with and without sharing per sampled token, since single requests draw other games."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = game_shape.policy(folder)
        whole = asyncio.run(_measure(model, folder, whole_games, continuations, game_shape.WHOLE))
        compact = asyncio.run(_measure(model, folder, games, continuations, game_shape.COMPACT))
        with _unshared():
            apart = asyncio.run(_measure(model, folder, games, continuations, game_shape.COMPACT, split=True))
    name = f"prefill tokens computed / ideal (MC-PR, {continuations} continuations)"
    return {
        "name": name,
        "ratio": whole["ratio"],
        "goal": GOAL,
        "better": "lower",
        "compact_ratio": compact["ratio"],
        "unshared_time_ratio": _pace(apart) / _pace(compact),
        "whole": whole,
        "compact": compact,
        "compact_unshared": apart,
    }


def _pace(counted: dict[str, Any]) -> float:
    return counted["wall_s"] / counted["decoded_tokens"]
