"""The limits of this machine, measured in the run that is compared with them: bytes read and operations done per CPU second.

CPU seconds of this process are counted, not wall time. One thread computes, and other programs on the machine then slow neither side
of a comparison.
"""

import time
from collections.abc import Callable

import torch

_BUFFER = 2**26
"""float32 numbers in the streamed buffer: 256 MiB, more than any cache holds."""
_SIDE = 1536
"""Rows and columns of the multiplied matrices: enough to reach the peak, few enough to repeat the product quickly."""


def cpu_s(work: Callable[[], object], times: int = 5) -> float:
    """Run ``work`` ``times`` times and return the least CPU seconds."""
    spent = []
    for _ in range(times):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return min(spent)


def bandwidth() -> float:
    """Return the bytes per second that this process's compute threads read from memory."""
    buffer = torch.ones(_BUFFER)
    return buffer.nbytes / cpu_s(buffer.sum)


def matrix_peak() -> float:
    """Return the float32 operations per second of a large matrix product (a multiplication and an addition are two)."""
    a, b = torch.rand(_SIDE, _SIDE), torch.rand(_SIDE, _SIDE)
    return 2 * _SIDE**3 / cpu_s(lambda: a @ b)
