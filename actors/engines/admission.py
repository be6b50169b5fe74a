"""Decide which requests start, and which of their prompt tokens a step computes.

    waiting -> prefilling (rows reserved, cached pieces copied) -> ready (the prompt is computed)

A request waits for places and memory for its samples, and while another computes its prefix.
"""

import time
from collections import Counter, deque

from coppice.actors.engines.attend import Chunk
from coppice.actors.engines.memory import KVMemory
from coppice.actors.engines.radix import RadixCache
from coppice.actors.engines.samples import ActiveRequest
from coppice.common.radix import common_length

_IDEAL_BYTES = 2**26
"""Bytes of the record of prefixes that an ideal cache would hold: 16 million tokens."""


class Admission:
    """Waiting and prefilling requests. places: samples that may still start."""

    def __init__(self, memory: KVMemory, places: int, prefill_tokens: int, counts: Counter[str]):
        self.memory, self.prefill_tokens, self.counts = memory, prefill_tokens, counts
        self.places = self._all_places = places
        self.waiting: deque[ActiveRequest] = deque()
        self.prefilling: list[ActiveRequest] = []
        self.ideal = RadixCache(_IDEAL_BYTES)

    def __bool__(self) -> bool:
        return bool(self.waiting or self.prefilling)

    def admit(self, version: int) -> None:
        """Move the requests that can start from waiting to prefilling. Those under way begin anew
        with other weights, because no sample reads keys of an older version than its first token's.
        """
        for active in self.prefilling:
            if active.version != version:
                self.counts["cached_tokens"] -= active.cached
                active.prefix.length = active.cached = 0
                active.ending, active.version = None, version
                active.experts.clear()
        later: list[ActiveRequest] = []
        tokens = sum(active.missing for active in self.prefilling)
        while self.waiting and tokens < self.prefill_tokens:
            if self.waiting[0].request.n > self.places:
                break
            active = self.waiting.popleft()
            if self._computed_by_another(active):
                later.append(active)
                continue
            if not self._start(active, version):
                self.waiting.appendleft(active)
                break
            tokens += active.missing
        self.waiting.extendleft(reversed(later))

    def chunks(self) -> list[Chunk]:
        """Return this step's prompt tokens, in the order of their rows."""
        left = self.prefill_tokens
        chunks: list[Chunk] = []
        for active in self.prefilling:
            if count := min(left, active.missing):
                chunks.append(Chunk(active.prefix, count))
                left -= count
        self.counts["prefilled_tokens"] += self.prefill_tokens - left
        return chunks

    def ready(self) -> list[ActiveRequest]:
        """Remove and return the requests whose whole prompt is computed."""
        done = [active for active in self.prefilling if not active.missing]
        self.prefilling = [active for active in self.prefilling if active.missing]
        return done

    def remove(self, active: ActiveRequest) -> None:
        if active in self.waiting:
            self.waiting.remove(active)
        elif active in self.prefilling:
            self.prefilling.remove(active)
            active.tails.promised -= active.request.n
            active.prefix.shelf.drop(active.prefix)
            self.places += active.request.n

    def clear(self) -> None:
        self.waiting.clear()
        self.prefilling.clear()
        self.places = self._all_places

    def _computed_by_another(self, active: ActiveRequest) -> bool:
        if not self.prefilling:
            return False
        prompts = (other.prompt.tobytes() for other in self.prefilling)
        shared = max(common_length(active.prompt.tobytes(), prompt) for prompt in prompts)
        return shared > self.memory.cache.match(active.prompt).length

    def _start(self, active: ActiveRequest, version: int) -> bool:
        request, prompt = active.request, active.prompt
        # before the reservation, because segments just used are evicted last
        match = self.memory.cache.match(prompt)
        shelves = self.memory.reserve(len(prompt), request.n, request.sampling.max_tokens)
        if shelves is None:
            return False
        prefix, active.tails = shelves
        active.prefix, active.version = prefix.put(active), version
        active.clock["prefill"] = time.monotonic()
        if active.routed:  # the experts of what is in the cache are forgotten
            match.length = min(match.length, request.sampling.experts_from)
            match.ending = None
        # the last token's hidden state is needed in any case
        if match.length == len(prompt) and match.ending is None:
            match.length -= 1
        for piece in match.pieces:
            active.prefix.write(piece[:, :, :, : match.length - active.prefix.length])
        active.cached, active.ending = match.length, match.ending
        self.places -= request.n
        self.prefilling.append(active)
        self.counts["prompt_tokens"] += len(prompt)
        self.counts["cached_tokens"] += match.length
        self.counts["ideal_prefill_tokens"] += self.ideal.insert(prompt)
        return True
