"""Decide which requests start, and which of their prompt tokens a step computes.

    waiting -> prefilling (rows reserved, cached pieces copied) -> ready (the whole prompt is
    computed or was in the cache)

A request starts when there are places and memory for its samples. If another request is computing
the same prefix, the request waits until the prefix is in the cache, so that it is computed once. A
step computes all decoding rows and at most ``prefill_tokens`` prompt tokens, first come, first
served.
"""

import collections
import time

from coppice.actors.engines.attend import Chunk, grouped
from coppice.actors.engines.memory import Memory
from coppice.actors.engines.radix import RadixCache, common_length
from coppice.actors.engines.samples import Waiting

_IDEAL_BYTES = 2**26
"""Bytes of the record of prefixes that an ideal cache would hold: 16 million tokens."""


class Admission:
    """Waiting and prefilling requests. places: samples that may still start."""

    def __init__(
        self, memory: Memory, places: int, prefill_tokens: int, counts: collections.Counter[str]
    ):
        self.memory, self.prefill_tokens, self.counts = memory, prefill_tokens, counts
        self.places = self._all_places = places
        self.waiting: collections.deque[Waiting] = collections.deque()
        self.prefilling: list[Waiting] = []
        self.ideal = RadixCache(_IDEAL_BYTES)

    def __bool__(self) -> bool:
        return bool(self.waiting or self.prefilling)

    def admit(self, version: int) -> None:
        """Move the requests that can start from waiting to prefilling."""
        later: list[Waiting] = []
        tokens = sum(self._missing(waiting) for waiting in self.prefilling)
        while self.waiting and tokens < self.prefill_tokens:
            if self.waiting[0].request.n > self.places:
                break
            waiting = self.waiting.popleft()
            if self._computed_by_another(waiting):
                later.append(waiting)
                continue
            if not self._start(waiting, version):
                self.waiting.appendleft(waiting)
                break
            tokens += self._missing(waiting)
        self.waiting.extendleft(reversed(later))

    def chunks(self) -> list[Chunk]:
        """Return this step's prompt tokens, in the order of their rows."""
        left = self.prefill_tokens
        chunks: list[Chunk] = []
        for waiting in self.prefilling:
            count = min(left, self._missing(waiting))
            if count:
                chunks.append(Chunk(waiting.prefix, count))
                left -= count
        self.counts["prefilled_tokens"] += self.prefill_tokens - left
        return [chunk for group in grouped(chunks) for chunk in group]

    def ready(self) -> list[Waiting]:
        """Remove and return the requests whose whole prompt is computed."""
        done = [waiting for waiting in self.prefilling if not self._missing(waiting)]
        if done:
            self.prefilling = [waiting for waiting in self.prefilling if self._missing(waiting)]
        return done

    def remove(self, waiting: Waiting) -> None:
        """Forget a request of which no sample runs yet."""
        if waiting in self.waiting:
            self.waiting.remove(waiting)
        elif waiting in self.prefilling:
            self.prefilling.remove(waiting)
            waiting.tails.promised -= waiting.request.n
            waiting.prefix.shelf.drop(waiting.prefix)
            self.places += waiting.request.n

    def clear(self) -> None:
        """Forget all requests, after every request has failed."""
        self.waiting.clear()
        self.prefilling.clear()
        self.places = self._all_places

    def _computed_by_another(self, waiting: Waiting) -> bool:
        if not self.prefilling:
            return False
        shared = max(common_length(waiting.prompt, other.prompt) for other in self.prefilling)
        return shared > self.memory.cache.match(waiting.prompt).length

    def _start(self, waiting: Waiting, version: int) -> bool:
        request, prompt = waiting.request, waiting.prompt
        # before the reservation, because segments just used are evicted last
        match = self.memory.cache.match(prompt)
        shelves = self.memory.reserve(len(prompt), request.n, request.sampling.max_tokens)
        if shelves is None:
            return False
        prefix, waiting.tails = shelves
        waiting.prefix, waiting.version = prefix.put(waiting), version
        waiting.clock["prefill"] = time.monotonic()
        # the last token's hidden state is needed in any case
        if match.length == len(prompt) and match.ending is None:
            match.length -= 1
        for piece in match.pieces:
            waiting.prefix.write(piece[:, :, :, : match.length - waiting.prefix.length])
        waiting.cached, waiting.ending = match.length, match.ending
        self.places -= request.n
        self.prefilling.append(waiting)
        self.counts["prompt_tokens"] += len(prompt)
        self.counts["cached_tokens"] += match.length
        self.counts["ideal_prefill_tokens"] += self.ideal.insert(prompt)
        return True

    def _missing(self, waiting: Waiting) -> int:
        return len(waiting.prompt) - waiting.prefix.length
