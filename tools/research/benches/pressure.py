"""Prefill tokens over the ideal, for each way of placement, when the actors' caches hold all, half or a quarter of what the trees need.

The ideal computes each distinct prompt token once on one engine. Two actors compute the common head twice.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from scheduler.fleet import Fleet
from tools.research.benches import fleet_shape
from tools.research.benches.fleet_shape import Outcome, Setting
from tools.research.benches.routers import Arrival, Home, RoundRobin, Router

QUESTIONS, ACTORS = 32, 2
"""QUESTIONS is the number of questions in SLATE's batch."""
SCALES = (1.0, 0.5, 0.25)
Way = Literal["ours", "arrival", "round_robin", "home", "router", "router_at_0.7"]
WAYS: dict[Way, Callable[[], Fleet]] = {
    "ours": lambda: Fleet(fleet_shape.STEPS, fleet_shape.BATCH),
    "arrival": Arrival,
    "round_robin": RoundRobin,
    "home": Home,
    "router": Router,
    "router_at_0.7": lambda: Router(threshold=0.7),
}
GOAL = 1.02


def whole(model: Path, questions: int) -> Setting:
    """Return the setting in which the actors' caches together hold every token that the trees bring into one unbounded cache."""
    return Setting(questions, ACTORS, fleet_shape.measure(model, Fleet(), Setting(questions, actors=1)).held)


def part(setting: Setting, scale: float, judge_s: float = 0.0) -> Setting:
    """Return the same setting with the share ``scale`` of its prefix cache."""
    assert setting.tokens is not None
    return msgspec.structs.replace(setting, tokens=scale * setting.tokens, judge_s=judge_s)


def row(outcome: Outcome) -> dict[str, Any]:
    """Return the values of one way at one size. hit_rate and predicted are shares of the prompt tokens (predicted: our placement only)."""
    cells: dict[str, Any] = {
        "ratio": outcome.ratio,
        "prefilled": outcome.prefilled,
        "ideal": outcome.ideal,
        "hit_rate": 1 - outcome.prefilled / outcome.prompt,
        "requests": list(outcome.requests.values()),
        "seconds": outcome.seconds,
    }
    if outcome.forecast.prompt:
        cells["predicted"] = outcome.forecast.predicted / outcome.forecast.prompt
    return cells


def run(
    questions: int = QUESTIONS,
    ways: tuple[Way, ...] = tuple(WAYS),
    scales: tuple[float, ...] = SCALES,
    judge_s: float = 0.0,
) -> dict[str, Any]:
    """Return the counts. scales: must include 1. judge_s: the judge's median latency. The seconds can be compared only within one run."""
    with tempfile.TemporaryDirectory() as scratch:
        model = fleet_shape.policy(Path(scratch))
        setting = whole(model, questions)
        table: dict[str, dict[str, Any]] = {}
        for scale in scales:
            options = part(setting, scale, judge_s)
            table[f"{scale:g}x"] = {name: row(fleet_shape.measure(model, WAYS[name](), options)) for name in ways}
    return {
        "name": f"prefill tokens / ideal, {ACTORS} actors, cache of all trees",
        "ratio": table["1x"]["ours"]["ratio"],
        "goal": GOAL,
        "better": "lower",
        "questions": questions,
        "needed_tokens": setting.tokens,
        **table,
    }
