"""What must hold whenever the scheduler rests, and of each thing that it does, by the peers' own
records. ``Watch`` follows one life of the scheduler."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from coppice.scheduler.dispatch.calls import PARTS, Pending, Worker
from coppice.scheduler.dispatch.placement import PATIENCE_S, Generation
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.main import Run
from tests.simulation.network import Network, Socket
from tests.simulation.peers import mislabelled
from tests.simulation.scripted_learner import Learner

ASTRAY_S = 5.5
"""A failed call waits for less than this before it is queued again."""


class Disk(msgspec.Struct):
    """What a power cut leaves of the journal, as SQLite's image. closed, groups: what is in it."""

    image: bytes = b""
    closed: set[int] = set()
    groups: set[int] = set()


def number(pending: Pending) -> int:
    """The tree of a call, -1 of one without."""
    return int(pending.caller.split()[1].rstrip(",")) if pending.caller else -1


class Watch:
    """versions: of the weights in a process, by its connection. violated: told of each broken
    invariant. Every life has a new one."""

    def __init__(
        self,
        run: Run,
        socket: Socket,
        learner: Learner,
        disk: Disk,
        held: Callable[[bytes], int | None],
        violated: Callable[[str], None],
    ):
        self.run, self.socket, self.learner, self.disk = run, socket, learner, disk
        self.held, self.violated = held, violated
        self.adopted, self.messages = False, -1
        self.begun: set[int] = set()
        self.until: dict[object, float] = {}  # of each open call, when it must have ended
        self.astray: dict[Pending, float] = {}
        self.before: tuple[Any, ...] = ()
        d, trees = run.dispatcher, run.open_trees
        self._around(d, "call", self._call)
        self._around(d, "_start", self._start)
        self._around(d.roster, "on_leave", self._leave)
        self._around(run.journal, "start_tree", self._admit)
        self._around(trees, "begin", self._begin)

    def _around(self, owner: Any, name: str, step: Callable[..., Any]) -> None:
        setattr(owner, name, partial(step, getattr(owner, name)))

    async def _call(self, call: Any, service: str, request: Any, **more: Any) -> Any:
        row = "SELECT 1 FROM groups WHERE id=?"
        if service == "close" and self.socket.alive:
            safe = request.tree in self.disk.closed and self.disk.groups >= set(request.groups)
            if not safe:
                self.violated(f"tree {request.tree} is told as closed and is not on the disk")
        elif service == "train" and self.socket.alive:
            if not self.run.journal._db.execute(row, (request.id,)).fetchone():
                self.violated(f"group {request.id} is sent and is not in the journal")
        oldest, mark = self.run.weight_sync.versions.proven, object()
        self.until[mark] = self.run._clock() + more["deadline"] * (1 + 1 / PARTS) + 0.01
        try:
            result = await call(service, request, **more)
        finally:
            del self.until[mark]
        for sample in result.samples if service == "generate" else ():
            if mislabelled(sample) or sample.versions.min() < oldest:
                told = f"tokens of the versions {set(sample.versions.tolist())}"
                self.violated(f"{told} are accepted: every actor had proven {oldest}")
        return result

    def _start(self, start: Any, pending: Pending, worker: Worker, *more: Any) -> None:
        for other in self.run.dispatcher._waiting[pending.service]:
            if pending.worker is None and self._overtaken(other, pending, worker):
                older, younger = number(other), number(pending)
                told = f"a call of {pending.service} of tree {younger} overtakes one of {older}"
                self.violated(f"{told} that waits since {other.since:.3f}")
        if pending.service == "generate":
            self.begun.add(number(pending))
        start(pending, worker, *more)

    def _overtaken(self, other: Pending, by: Pending, worker: Worker) -> bool:
        """Whether ``other`` should have been started first on ``worker``."""
        if other.done.done() or worker.name in other.failed_on or by.failed_on:
            return False
        older, younger = number(other), number(by)
        if by.service == "generate":
            begun = older in self.begun or younger not in self.begun
            return not self._cached() and older < younger and begun
        return other.since < by.since and older <= younger

    def _cached(self) -> bool:
        residency = self.run.runtime.fleet.residency
        return any(not math.isinf(cache.capacity) for cache in residency._caches.values())

    def _leave(self, leave: Any, worker: Worker, reason: str) -> None:
        leave(worker, reason)
        if worker.name in self._remembered():
            self.violated(f"{worker.name} has left, and the fleet remembers it")

    def _remembered(self) -> set[str]:
        """The workers of which the fleet keeps anything."""
        fleet = self.run.runtime.fleet
        tables = fleet.seats, fleet.sums, fleet.decoding, fleet._low_since
        return {*fleet.residency._caches, *fleet.residency._versions}.union(*tables)

    def _actors(self) -> list[tuple[Worker, int]]:
        """The ready actors whose processes live, with the versions that they hold."""
        actors = self.run.dispatcher.workers("load")
        pairs = ((worker, self.held(worker.identity)) for worker in actors)
        return [(worker, held) for worker, held in pairs if held is not None]

    def _admit(self, start_tree: Any, tree: Tree, position: int, version: int) -> None:
        proven = self.run.weight_sync.versions.proven
        held = min((held for _, held in self._actors()), default=proven)
        if version != proven or version > min(held, self.learner.version):
            told = f"the learner is at {self.learner.version}, actors hold {held}"
            self.violated(f"tree {tree.id} is admitted at {version}: {told}, proven is {proven}")
        start_tree(tree, position, version)

    def _begin(self, begin: Any, pacing: Any, newest: dict[int, int]) -> None:
        durable, journal = self.learner.durable, self.run.journal
        if newer := [name for v, name, _ in journal.evaluations() if v > durable]:
            self.violated(f"the evaluations {newer} are newer than the checkpoint {durable}")
        marks = dict(journal._rows("SELECT id, trained FROM groups WHERE trained IS NOT NULL"))
        trained = {group: v for group, v in self.learner.trained.items() if v <= durable}
        if marks != trained:
            self.violated(f"the journal marks {marks}, and the checkpoint has trained {trained}")
        begin(pacing, newest)
        self.adopted = True

    def at_rest(self, now: float) -> Iterator[str]:
        """The invariants that are broken now."""
        yield from self._calls(now)
        if self.messages == self.socket.messages:
            return
        self.messages = self.socket.messages
        yield from self._fleet()
        yield from self._weights()
        if not self.adopted:
            return
        trees, stream, pacing = self.run.open_trees, self.run.stream, self.run.pacing
        counts = pacing.admitted, trees.done, self.run.journal.changes()
        now_held = *counts, *trees.growing, -1, *stream.replaced, -1, len(trees.unfinished)
        if now_held != self.before:
            self.before = now_held
            yield from self._trees()

    def _calls(self, now: float) -> Iterator[str]:
        dispatcher, here = self.run.dispatcher, self.run.dispatcher.roster.by_identity
        for worker in here.values():
            for attempt in worker.in_flight.values():
                if attempt.pending.done.done() or attempt.pending.attempt is not attempt:
                    yield f"{worker.name} keeps an ended call of {attempt.pending.service}"
        waiting = Counter(call for queue in dispatcher._waiting.values() for call in queue)
        for service, queue in dispatcher._waiting.items():
            if queue:
                yield from self._free(service, now)
        astray = dict[Pending, float]()
        for call in {*dispatcher.open_calls(), *waiting}:
            attempt = call.attempt
            if waiting[call] + (attempt is not None) > 1 or (waiting[call] and call.done.done()):
                yield f"a call of {call.service} that runs, has ended or waits already is queued"
            if attempt is not None and here.get(attempt.worker.identity) is not attempt.worker:
                yield f"a call of {call.service} runs on {attempt.worker.name}, which has left"
            if not waiting[call] and attempt is None:
                astray[call] = self.astray.get(call, now)
                if now - astray[call] > ASTRAY_S:
                    yield f"a call of {call.service} runs nowhere and does not wait"
        self.astray = astray
        if now > min(self.until.values(), default=now):
            yield "a call is open after its deadline"

    def _free(self, service: str, now: float) -> Iterator[str]:
        """Calls that wait beside a worker that could serve them."""
        fleet, usable = self.run.runtime.fleet, []
        for worker in self.run.dispatcher.workers(service):
            # a worker that has rested is noticed with its next heartbeat
            if worker.usable(now) and worker.breaker.open_until <= worker.beat_at:
                usable.append(worker)
        for call in self.run.dispatcher._waiting[service]:
            able = [w for w in usable if w.name not in call.failed_on] or usable
            free = [w for w in able if w.has_room]
            if isinstance(call.place, Generation) and self._cached():
                low = (fleet._low_since.get(w.name, math.inf) for w in free)
                if max(low, default=0.0) > now - PATIENCE_S - 0.1:
                    continue  # it may wait for cache room
            if free:
                yield f"a call of {service} of tree {number(call)} waits, and {free[0].name} is free"

    def _fleet(self) -> Iterator[str]:
        roster, fleet = self.run.dispatcher.roster, self.run.runtime.fleet
        decoding, seats = Counter[str](), defaultdict[str, Counter[int]](Counter)
        fresh = set[str]()
        for worker in roster.by_identity.values():
            places = [attempt.pending.place for attempt in worker.in_flight.values()]
            if not any(isinstance(place, Generation) for place in places):
                fresh |= {worker.name} - {event.worker for event in worker.recent if event.version}
            for place in places:
                if isinstance(place, Generation):
                    decoding[worker.name] += place.request.n
                    seats[worker.name][place.tree] += 1
        believed = {
            name: +Counter({tree: seat.calls for tree, seat in by_tree.items()})
            for name, by_tree in fleet.seats.items()
        }
        if {name: calls for name, calls in believed.items() if calls} != seats:
            yield f"the calls of trees on actors are {believed}, expected {dict(seats)}"
        if +fleet.decoding != decoding or min(fleet.decoding.values(), default=0) < 0:
            yield f"actors decode {fleet.decoding} samples, expected {decoding}"
        if gone := self._remembered() - roster.by_name.keys():
            yield f"{gone} have left, and the fleet remembers them"
        workers = roster.workers()
        for service, pool in roster.pools.items():
            ready = {w.name for w in workers if service in w.hello.services}
            if pool.members.keys() != ready:
                yield f"the pool of {service} has {[*pool.members]}, ready are {ready}"

    def _weights(self) -> Iterator[str]:
        dispatcher, sync = self.run.dispatcher, self.run.weight_sync
        for worker, held in self._actors():
            if held < sync.versions.proven:
                yield f"{worker.name} gets calls with version {held}, not {sync.versions.proven}"
        newest, proven = sync.versions.newest, sync.versions.proven
        if newest != sync.weights.version or newest > self.learner.version:
            yield f"the newest version is {newest}, and that of the learner {self.learner.version}"
        loading = any(call.service == "load" for call in dispatcher.open_calls())
        if proven != newest and not loading:
            yield f"version {newest} is everywhere, and {proven} counts as proven"

    def _trees(self) -> Iterator[str]:
        run, trees, journal = self.run, self.run.open_trees, self.run.journal
        growing, unfinished = list(trees.growing), [row.id for row in trees.unfinished]
        if growing != sorted(growing) or (unfinished and max(growing, default=-1) > unfinished[0]):
            yield f"the trees {growing} have begun, and the older {unfinished} wait"
        rows = journal.trees("split='train'")
        begun = {row.id for row in rows if row.status == "growing"}
        if begun - {*unfinished} != {*growing}:
            yield f"the trees {growing} grow, and the journal says {begun}, with {unfinished}"
        grouped = {tree for (tree,) in journal._rows("SELECT tree FROM groups")}
        counted = [row for row in rows if row.status in ("growing", "closed") or row.id in grouped]
        counted = [row for row in counted if row.status != "replaced"]
        if run.pacing.admitted != len(counted) - len(unfinished):
            told = f"{run.pacing.admitted} trees count as admitted"
            yield f"{told}, and the journal has {len(counted)} with {len(unfinished)} unfinished"
        replaced = {row.id for row in rows if row.status == "replaced"}
        marked = {t for (t,) in journal._rows("SELECT tree FROM groups WHERE trained IS NOT NULL")}
        taken = {self.learner.owners.get(group) for group in self.learner.trained}
        if run.stream.replaced - (replaced - marked) or replaced - taken - run.stream.replaced:
            told = f"of {replaced} updates have taken {replaced & taken}, and {marked} are marked"
            yield f"the credits of {run.stream.replaced} are taken: {told}"
