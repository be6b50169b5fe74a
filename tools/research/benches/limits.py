"""What this machine can do at most, measured in the run that is compared with it: bytes read and operations done in a CPU second.

CPU seconds of this process are counted, not those of the clock: one thread computes, and what else runs on the machine then costs
neither side of a comparison its share.
"""

import time
from collections.abc import Callable

import torch

_BUFFER = 2**26
"""float32 numbers of the streamed buffer: 256 MiB, beyond every cache."""
_SIDE = 1536
"""Rows and columns of the matrices whose product shows the peak: large enough for it, quick enough to repeat."""


def cpu_s(work: Callable[[], object], times: int = 5) -> float:
    """The least CPU seconds of ``work`` among ``times``."""
    spent = []
    for _ in range(times):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return min(spent)


def bandwidth() -> float:
    """Bytes a second read from memory by this process's compute threads."""
    buffer = torch.ones(_BUFFER)
    return buffer.nbytes / cpu_s(buffer.sum)


def matrix_peak() -> float:
    """float32 operations a second (a multiplication and an addition are two) of a large matrix product."""
    a, b = torch.rand(_SIDE, _SIDE), torch.rand(_SIDE, _SIDE)
    return 2 * _SIDE**3 / cpu_s(lambda: a @ b)
