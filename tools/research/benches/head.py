"""The blockwise head against all logits at once: time and peak memory of forward and backward on the CPU, in float32.

Rounds alternate the two sides, with a frozen head (LoRA) and with a trained head. A ratio is the median over rounds of
the ratio in one round, so that other load meets both sides. Memory is the growth of the resident set to its peak, so it
includes the gradients and the buffers of the products' library. The peak is reset before each measurement (on Linux).
The goals are at most the same time and half of the memory. The row's ratio is the worst of all four over its goal.
"""

import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from learner.head import token_logprobs

ROWS, WIDTH, VOCABULARY = 1024, 576, 151_936
LEAST_ROUNDS, MOST_ROUNDS, SPENT_S = 2, 5, 30.0
TIME_GOAL, MEMORY_GOAL = 1.0, 0.5

Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _full(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.T).log_softmax(-1, dtype=torch.float32).gather(1, targets[:, None])[:, 0]


def _blockwise(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return token_logprobs(hidden, weight, targets)[0]


def _resident(mark: str) -> int:
    """Return the resident bytes. mark: "VmRSS" for now, "VmHWM" for the peak since the peak was reset."""
    line = next(li for li in Path("/proc/self/status").read_text().splitlines() if li.startswith(mark))
    return int(line.split()[1]) * 1024


def _measure(head: Head, inputs: list[torch.Tensor], trained: bool) -> tuple[float, int]:
    """Return the seconds and the extra bytes at the peak of one forward and backward."""
    hidden, weight, targets, upstream = inputs
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_(trained)
    ctypes.CDLL(None).malloc_trim(0)  # memory that the allocator still holds would hide new memory
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    start = time.perf_counter()
    (head(hidden, weight, targets) * upstream).sum().backward()
    return time.perf_counter() - start, _resident("VmHWM") - before


def _inputs(rows: int, width: int, vocabulary: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    weight = torch.randn(vocabulary, width).mul_(0.05)
    return [torch.randn(rows, width), weight, torch.randint(0, vocabulary, (rows,)), torch.randn(rows)]


def _compare(rows: int, width: int, vocabulary: int) -> dict[str, Any]:
    """Return the median over rounds of every measured value, named "frozen_..." or "trained_..."."""
    kinds = {"frozen": False, "trained": True}
    small, inputs = _inputs(8, width, 1024), _inputs(rows, width, vocabulary)
    for side in (_full, _blockwise):
        _measure(side, small, True)  # starts threads and libraries
    rounds: list[dict[str, float]] = []
    start = time.perf_counter()
    while len(rounds) < LEAST_ROUNDS or (len(rounds) < MOST_ROUNDS and time.perf_counter() - start < SPENT_S):
        row: dict[str, float] = {}
        for kind, trained in kinds.items():
            full_s, full_bytes = _measure(_full, inputs, trained)
            made_s, made_bytes = _measure(_blockwise, inputs, trained)
            row |= {f"{kind}_full_s": full_s, f"{kind}_s": made_s, f"{kind}_time_ratio": made_s / full_s}
            row |= {f"{kind}_full_mb": full_bytes / 1e6, f"{kind}_mb": made_bytes / 1e6}
            row |= {f"{kind}_memory_ratio": made_bytes / full_bytes}
        rounds.append(row)
    return {key: statistics.median(r[key] for r in rounds) for key in rounds[0]} | {"rounds": len(rounds)}


def run(rows: int = ROWS, width: int = WIDTH, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Run the benchmark, in about 45 s on two free cores."""
    medians = _compare(rows, width, vocabulary)
    time_ratio = max(medians["frozen_time_ratio"], medians["trained_time_ratio"])
    memory_ratio = max(medians["frozen_memory_ratio"], medians["trained_memory_ratio"])
    ratio = max(time_ratio / TIME_GOAL, memory_ratio / MEMORY_GOAL)
    row = {"name": "blockwise head / full logits (time; memory / 0.5)", "ratio": ratio, "goal": 1.0, "better": "lower"}
    row |= {"time_ratio": time_ratio, "memory_ratio": memory_ratio}
    return row | medians | {"rows": rows, "width": width, "vocabulary": vocabulary}
