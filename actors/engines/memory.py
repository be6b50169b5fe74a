"""Memory of keys and values under one budget: prefixes and tails of running requests stand on
shelves, everything else in the radix cache.

Invariant: the bytes of all shelves and of the cache never exceed the budget (while a shelf grows,
it is copied and briefly exists twice). All that a request may need is reserved when it is admitted.

Several samples have tails on a shelf of tails; the tail of an only sample stands behind the prefix
in the same row, so that one call of attention reads both.
"""

from typing import Any

import numpy as np
import torch

from coppice.actors.engines.arena import Arena
from coppice.actors.engines.radix import RadixCache, Read

SHORTEST_PREFIX, SHORTEST_TAIL = 128, 16
"""The least tokens in a row. Calls cost more than padding."""


class Stretch:
    """The first ``length`` tokens in a row of a shelf, from ``Shelf.put`` to ``Shelf.drop``."""

    __slots__ = ("length", "owner", "row", "shelf")

    def __init__(self, shelf: "Shelf", row: int, owner: Any):
        self.shelf, self.row, self.owner = shelf, row, owner
        self.length = 0

    def write(self, piece: torch.Tensor) -> None:
        """Append keys and values [layers, 2, kv_heads, tokens, head_dim]."""
        end = self.length + piece.shape[3]
        self.shelf.kv[:, :, self.row, :, self.length : end] = piece
        self.length = end

    def view(self, start: int, end: int) -> torch.Tensor:
        """Return a view of tokens ``start`` to ``end``, [layers, 2, kv_heads, tokens, head_dim]."""
        return self.shelf.kv[:, :, self.row, :, start:end]


class Tail(Stretch):
    """The tokens of a request's only sample, behind its prefix in the same row."""

    __slots__ = ()

    def view(self, start: int, end: int) -> torch.Tensor:
        prefix: Stretch = self.owner.owner.prefix
        return prefix.view(prefix.length + start, prefix.length + end)


class Shelf:
    """Rows of ``capacity`` tokens: kv [layers, 2, rows, kv_heads, capacity, head_dim]. Rows 0 to
    ``len(held) - 1`` are in use, so attention reads one view. ``promised`` counts used and reserved
    rows. arena: lends the memory. inline: the tails in the same rows."""

    stretch: type[Stretch] = Stretch

    def __init__(self, arena: Arena, capacity: int, inline: "InlineTails | None" = None):
        self.arena, self.capacity, self.promised, self.inline = arena, capacity, 0, inline
        self.row_bytes = capacity * arena.token.nbytes
        self.held: list[Stretch] = []
        self.kv = self._rows(0)

    @property
    def rows(self) -> int:
        return self.kv.shape[2]

    def resize(self, rows: int) -> None:
        """Make room for exactly ``rows`` rows."""
        kept, before = len(self.held), self.kv
        self.kv = self._rows(rows)
        self.kv[:, :, :kept] = before[:, :, :kept]

    def put(self, owner: Any) -> Stretch:
        """Return an empty row, which must have been promised."""
        stretch = self.stretch(self, len(self.held), owner)
        self.held.append(stretch)
        return stretch

    def drop(self, stretch: Stretch) -> None:
        """Free a row and its promise. The last row moves into it."""
        last = self.held.pop()
        if last is not stretch:
            end = last.length + (self.inline.tokens(last) if self.inline is not None else 0)
            self.kv[:, :, stretch.row, :, :end] = self.kv[:, :, last.row, :, :end]
            last.row = stretch.row
            self.held[last.row] = last
        self.promised -= 1
        stretch.owner = None  # or they would hold each other, and the shelf, until a collection

    def _rows(self, rows: int) -> torch.Tensor:
        # The rows are zeroed, because padding is masked but must still be finite.
        layers, _, heads, width = self.arena.token.shape
        return self.arena.empty(layers, 2, rows, heads, self.capacity, width).zero_()


class InlineTails(Shelf):
    """The tails in the rows of another shelf, behind its prefixes, with no rows of its own. The
    owner of a tail must be a sample when the tail is used."""

    stretch = Tail

    def tokens(self, prefix: Stretch) -> int:
        """Return the number of tokens behind ``prefix`` in its row."""
        return next((tail.length for tail in self.held if tail.owner.owner.prefix is prefix), 0)


class KVMemory:
    """The cache and the shelves. token: [layers, 2, kv_heads, head_dim], of the shape, number type
    and device of one token's keys and values. longest: most tokens of a prompt and its
    continuation."""

    def __init__(self, token: torch.Tensor, budget: int, longest: int):
        self.token, self.budget, self.longest = token, budget, longest
        self.arena = Arena(token, budget)
        self.cache = RadixCache(budget, self.arena.copied)
        self.prefixes: dict[tuple[int, ...], Shelf] = {}
        self.tails: dict[tuple[int, ...], Shelf] = {}

    @property
    def running_bytes(self) -> int:
        return sum(shelf.kv.nbytes for shelf in self._shelves())

    def needed(self, prompt: int, n: int, new: int) -> int:
        """Return the bytes that one request needs when nothing else runs."""
        rows, inline, tail = self._rows(prompt, n, new)
        return (rows + inline + n * tail) * self.token.nbytes

    def reserve(self, prompt: int, n: int, new: int) -> tuple[Shelf, Shelf] | None:
        """Promise rows and return the shelves of a request's prefix and of its ``n`` tails. Return
        None when the request must wait."""
        rows, inline, tail_rows = self._rows(prompt, n, new)
        key = (rows, inline, _power(n, 1))
        if (prefix := self.prefixes.get(key)) is None:
            tails = InlineTails(self.arena, 0) if inline else None
            prefix = self.prefixes[key] = Shelf(self.arena, rows + inline, tails)
        if prefix.inline is not None:
            tail = self.tails[key] = prefix.inline
        elif (tail := self.tails.get((tail_rows,))) is None:
            tail = self.tails[tail_rows,] = Shelf(self.arena, tail_rows)
        if not self._grow({prefix: 1, tail: n}):
            return None
        prefix.promised += 1
        tail.promised += n
        return prefix, tail

    def keep(self, tokens: np.ndarray, read: Read, ending: torch.Tensor | None = None) -> None:
        """Put tokens into the cache. If the cache is full, unused shelves are freed first."""
        full = self.cache.bytes + len(tokens) * self.token.nbytes > self.cache.budget
        if full and any(shelf.rows and not shelf.promised for shelf in self._shelves()):
            self.prefixes = {key: shelf for key, shelf in self.prefixes.items() if shelf.promised}
            self.tails = {key: shelf for key, shelf in self.tails.items() if shelf.promised}
            self.cache.limit(self.budget - self.running_bytes)
        self.cache.insert(tokens, read, ending)

    def clear(self) -> None:
        """Free all rows and the cache after a failure, which may have left them half changed."""
        self.prefixes.clear()
        self.tails.clear()
        self.cache.clear()
        self.cache.limit(self.budget)

    def _grow(self, wanted: dict[Shelf, int]) -> bool:
        """Make room for these rows: double the shelves, or take just enough from the cache."""
        exact = {shelf: max(shelf.promised + n, shelf.rows) for shelf, n in wanted.items()}
        grown = {shelf: rows for shelf, rows in exact.items() if rows > shelf.rows}
        if not grown:
            return True
        ample = {shelf: max(rows, 2 * shelf.rows) for shelf, rows in grown.items()}
        if self._after(ample) + self.cache.bytes <= self.budget:
            chosen = ample
        elif self._after(exact) <= self.budget:
            chosen = exact
        else:  # as a last resort, take the unused rows of other shelves
            chosen = {shelf: shelf.promised + wanted.get(shelf, 0) for shelf in self._shelves()}
        if self._after(chosen) > self.budget:
            return False
        # shrink before growing
        for shelf, rows in sorted(chosen.items(), key=lambda item: item[1] - item[0].rows):
            room = min(self.cache.budget, self.budget - self._after({shelf: rows}))
            self.cache.limit(max(0, room))
            if rows != shelf.rows:
                shelf.resize(rows)
        self.cache.limit(self.budget - self.running_bytes)
        return True

    def _after(self, rows: dict[Shelf, int]) -> int:
        """Return the bytes of all shelves if these shelves had ``rows`` rows."""
        return sum(rows.get(shelf, shelf.rows) * shelf.row_bytes for shelf in self._shelves())

    def _shelves(self) -> list[Shelf]:
        return [*self.prefixes.values(), *self.tails.values()]

    def _rows(self, prompt: int, n: int, new: int) -> tuple[int, int, int]:
        """Return the tokens of a prefix's row, of a tail behind it, and of a tail's own row."""
        rows = min(_power(prompt, SHORTEST_PREFIX), max(prompt, self.longest))
        tail = min(_power(new, SHORTEST_TAIL), max(new, self.longest))
        return (rows, tail, 0) if n == 1 else (rows, 0, tail)


def _power(count: int, least: int) -> int:
    """Return the smallest ``least`` * 2^k that is at least ``count``."""
    return least << max(0, -(-count // least) - 1).bit_length()
