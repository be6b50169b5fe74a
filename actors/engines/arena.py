"""Memory for keys and values: one piece of the budget's size, of which parts are lent.

From torch they would come out of the heap, which grew with each policy version: glibc before 2.38
seldom uses a freed block again for a tensor of the same size.
"""

import contextlib
import math
import mmap
import weakref

import numpy as np
import torch

LINE = 64
"""Bytes of a line of the processor's cache, at which every part begins."""


class Arena:
    """``size`` bytes of main memory. A part comes back when no tensor holds it any more. token: of
    the number type and device of all tensors."""

    def __init__(self, token: torch.Tensor, size: int):
        self.token, self._pages, self._gaps = token, _pages(max(size, 1)), [(0, size)]
        self._bytes = np.frombuffer(self._pages, np.uint8)
        self._returned: list[tuple[int, int]] = []

    def empty(self, *shape: int) -> torch.Tensor:
        """Return a tensor. What does not fit comes from the system, and what is not for the CPU
        from torch."""
        size = math.prod(shape) * self.token.element_size()
        if self.token.device.type != "cpu" or not size:
            return self.token.new_empty(shape)
        taken = -(-size // LINE) * LINE
        if (start := self._take(taken)) is None:
            self._release()
            part = np.frombuffer(_pages(size), np.uint8)
        else:
            part = self._bytes[start : start + size]
            # torch lets go of this array when the last tensor that is a view of it is gone
            weakref.finalize(part, self._returned.append, (start, start + taken)).atexit = False
        return torch.from_numpy(part).view(self.token.dtype).view(shape)

    def copied(self, view: torch.Tensor) -> torch.Tensor:
        return self.empty(*view.shape).copy_(view)

    def _take(self, size: int) -> int | None:
        """Return the start of the first gap that is large enough, and take it."""
        while self._returned:
            self._gaps.append(self._returned.pop())
        gaps = list[tuple[int, int]]()
        for start, end in sorted(self._gaps):
            gaps.append((gaps.pop()[0] if gaps and gaps[-1][1] == start else start, end))
        self._gaps = gaps
        for index, (start, end) in enumerate(gaps):
            if end - start >= size:
                gaps[index] = start + size, end
                return start
        return None

    def _release(self) -> None:
        """Give the pages of all gaps back to the system, which holds little more than is in use
        then."""
        page = mmap.PAGESIZE
        for start, end in self._gaps:
            first, last = -(-start // page) * page, end // page * page
            if first < last:
                self._pages.madvise(mmap.MADV_DONTNEED, first, last - first)


def _pages(size: int) -> mmap.mmap:
    """Return ``size`` bytes of the system's, in large pages where it has them."""
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
