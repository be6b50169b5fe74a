"""Other ways to place the calls of trees, for comparison with ``scheduler.fleet``.

``Router`` is our own implementation of the cache-aware policy that SGLang's router (sgl-model-gateway) publishes.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from scheduler.fleet import AFFINITY_SLACK, Fleet
from scheduler.placement import Load, Place, choose, roomy
from scheduler.residency import Prefixes
from wire.messages import GenerateRequest


class Arrival(Fleet):
    """Serves calls in order of arrival on the least loaded actor, without knowledge of prefixes."""

    def call(self, tree: int, request: GenerateRequest, beside: bool = False) -> Place:
        """See ``Fleet.call``."""
        return Place()


class RoundRobin(Fleet):
    """Serves calls in order of arrival on the actors in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = itertools.count()

    def call(self, tree: int, request: GenerateRequest, beside: bool = False) -> Place:
        """See ``Fleet.call``."""
        return _Turn(next(self._turns))


class _Turn(Place):
    def __init__(self, turn: int):
        self.turn = turn

    def choose(self, loads: Sequence[Load], avoid: frozenset[str]) -> str | None:
        free = sorted(load.worker for load in roomy(loads, avoid))
        return free[self.turn % len(free)] if free else None


class Home(Fleet):
    """Serves calls in order of arrival on the actor that last served the tree, unless it is overloaded. The scheduler once did this."""

    def __init__(self) -> None:
        super().__init__()
        self.served: dict[int, str] = {}

    def call(self, tree: int, request: GenerateRequest, beside: bool = False) -> Place:
        """See ``Fleet.call``."""
        return _AtHome(self.served, tree)


class _AtHome(Place):
    def __init__(self, served: dict[int, str], tree: int):
        self.served, self.tree = served, tree

    def choose(self, loads: Sequence[Load], avoid: frozenset[str]) -> str | None:
        free = roomy(loads, avoid)
        least = min((load.share for load in free), default=0.0)
        for load in free:
            if load.worker == self.served.get(self.tree) and load.share <= least + AFFINITY_SLACK:
                return load.worker
        return choose(loads, avoid)

    def ended(self, worker: str, result: Any | None) -> None:
        if result is not None:
            self.served[self.tree] = worker


class Router(Fleet):
    """The cache-aware policy as published. It keeps one tree per worker of the prompts sent there, and does not see outputs.

    If the load is imbalanced (the fullest worker has over ``absolute`` requests more than the emptiest, and over ``relative`` times as
    many), the shortest queue is chosen. Otherwise it is the worker that got the longest prefix of this prompt, if that exceeds the share
    ``threshold``, or else the worker that got the least text. Defaults are those of sglang-router 0.3.2, whose trees would hold all texts here.
    """

    def __init__(self, threshold: float = 0.3, absolute: int = 64, relative: float = 1.5):
        super().__init__()
        self.threshold, self.absolute, self.relative = threshold, absolute, relative
        self.sent: dict[str, Prefixes] = {}

    def call(self, tree: int, request: GenerateRequest, beside: bool = False) -> Place:
        """See ``Fleet.call``."""
        return _Routed(self, request)

    def pick(self, tokens: bytes, length: int, loads: Sequence[Load]) -> str:
        """Choose the worker of one request."""
        for load in loads:
            self.sent.setdefault(load.worker, Prefixes())
        most = max(load.in_flight for load in loads)
        shortest = min(loads, key=lambda load: load.in_flight)
        if most - shortest.in_flight > self.absolute and most > self.relative * shortest.in_flight:
            return shortest.worker
        best = max(loads, key=lambda load: self.sent[load.worker].match(tokens)).worker
        if self.sent[best].match(tokens) > self.threshold * length:
            return best
        return min(loads, key=lambda load: self.sent[load.worker].tokens).worker


class _Routed(Place):
    def __init__(self, router: Router, request: GenerateRequest):
        self.router, self.length, self.tokens = router, len(request.tokens), request.tokens.tobytes()

    def choose(self, loads: Sequence[Load], avoid: frozenset[str]) -> str | None:
        usable = sorted((load for load in loads if load.worker not in avoid), key=lambda load: load.worker)
        return self.router.pick(self.tokens, self.length, usable) if usable else None

    def started(self, worker: str) -> None:
        self.router.sent[worker].insert(self.tokens)
