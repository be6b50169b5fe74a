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
from coppice.scheduler.ledger.node_codec import deflated
from coppice.scheduler.main import Run
from coppice.wire.faults import InfrastructureFault
from tests.simulation.network import Socket
from tests.simulation.peers import mislabelled
from tests.simulation.scripted_learner import Learner

REPLACED = "replaced"
ASTRAY_S = 5.5
"""A failed call waits for less than this before it is queued again."""


class Disk(msgspec.Struct):
    """What a power cut leaves of the journal, as SQLite's image. ends: the status of each tree that
    has ended; owners: the tree of each group."""

    image: bytes = b""
    ends: dict[int, str] = {}
    owners: dict[int, int] = {}


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
        self.adopted, self.messages, self.process, self.newest = False, -1, 0, 0
        self.credits = run.settings.dynamic_sampling_budget
        self.begun, self.failed = set[int](), set[int]()
        self.until: dict[object, float] = {}  # of each open call, when it must have ended
        self.astray: dict[Pending, float] = {}
        self.before: tuple[Any, ...] = ()
        d, trees = run.dispatcher, run.open_trees
        self._around(d, "call", self._call)
        self._around(d, "_start", self._start)
        self._around(d.roster, "on_leave", self._leave)
        self._around(run.journal, "start_tree", self._admit)
        self._around(run.journal, "remove", self._remove)
        self._around(trees, "begin", self._begin)

    def _around(self, owner: Any, name: str, step: Callable[..., Any]) -> None:
        setattr(owner, name, partial(step, getattr(owner, name)))

    async def _call(self, call: Any, service: str, request: Any, **more: Any) -> Any:
        if service == "close" and self.socket.alive:
            groups = [group for group, tree in self.disk.owners.items() if tree == request.tree]
            end = self.disk.ends.get(request.tree)
            if not end or sorted(request.groups) != groups or request.replaced != (end == REPLACED):
                self.violated(f"{request} is told, and the disk has {end} with the groups {groups}")
        elif service == "train" and self.socket.alive:
            row = "SELECT turns FROM groups WHERE id=? AND tree=?", (request.id, request.tree)
            turns = (deflated(msgspec.msgpack.encode(request.turns)),)
            if [*self.run.journal._db.execute(*row)] != [turns]:
                self.violated(f"group {request.id} is sent and is not in the journal")
            needed = {t.node for t in request.turns} | {n.parent for n in request.nodes} - {-1}
            if request.id in self.failed and needed - {n.id for n in request.nodes}:
                self.violated(f"group {request.id} is sent again without its nodes")
        oldest, mark = self.run.weight_sync.versions.proven, object()
        self.until[mark] = self.run._clock() + more["deadline"] * (1 + 1 / PARTS) + 0.01
        try:
            result = await call(service, request, **more)
        except InfrastructureFault:
            if service == "train":
                self.failed.add(request.id)
            raise
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
        if pending.worker is None:
            self._check_choice(pending, worker)
        if pending.service == "generate":
            self.begun.add(number(pending))
        start(pending, worker, *more)

    def _check_choice(self, pending: Pending, worker: Worker) -> None:
        usable = self._usable(pending.service)
        if worker.name in pending.failed_on and {w.name for w in usable} - pending.failed_on:
            self.violated(f"a call of {pending.service} is made on {worker.name} again")
        free = [w for w in usable if w.has_room and w.name not in pending.failed_on]
        judged = not isinstance(pending.place, Generation)
        if judged and worker.share > min((w.share for w in free), default=worker.share):
            self.violated(f"{worker.name} gets a call of {pending.service} and has the most calls")
        if pending.tries >= self.run.dispatcher.config.max_attempts or not worker.ready:
            self.violated(f"a call of {pending.service} is made too often, or before a join")

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
        return any(not math.isinf(cache.budget) for cache in residency._caches.values())

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

    def _admit(
        self, start_tree: Any, tree: Tree, position: int, version: int, digest: str = ""
    ) -> None:
        proven = self.run.weight_sync.versions.proven
        held = min((held for _, held in self._actors()), default=proven)
        if version != proven or version > min(held, self.learner.version):
            told = f"the learner is at {self.learner.version}, actors hold {held}"
            self.violated(f"tree {tree.id} is admitted at {version}: {told}, proven is {proven}")
        start_tree(tree, position, version, digest)

    def _remove(self, remove: Any, tree: int) -> None:
        keep, durable = self.run.settings.keep_versions, self.learner.durable
        ((row,), groups) = self.run.journal.trees("id=?", tree), self.run.journal.groups(tree)
        gone = row.split == "train" and row.status in ("closed", REPLACED) and not row.reason
        newest = min(durable, self.learner.version - keep)
        if not gone or not all(version and version <= newest for _, version in groups):
            self.violated(f"{row} is removed, with {groups}, at checkpoint {durable}")
        remove(tree)

    def _begin(self, begin: Any, pacing: Any, newest: dict[int, int]) -> None:
        durable, journal = self.learner.durable, self.run.journal
        if newer := [name for v, name, _ in journal.evaluations() if v > durable]:
            self.violated(f"the evaluations {newer} are newer than the checkpoint {durable}")
        marks = dict(journal._rows("SELECT id, trained FROM groups WHERE trained IS NOT NULL"))
        trained = {group: v for group, v in self.learner.trained.items() if v <= durable}
        if pacing.version == self.learner.version and marks != trained:
            self.violated(f"the journal marks {marks}, and the checkpoint has trained {trained}")
        untrained = "tree=trees.id AND trained IS NULL"
        query = f"split='train' AND (status='growing' OR EXISTS (SELECT 1 FROM groups WHERE {untrained}))"
        left = {row.id for row in journal.trees(query)}
        if left != (taken := {row.id for row in journal.untrained_trees()}):
            self.violated(f"the trees {taken} are taken up, and {left} have something to train")
        begin(pacing, newest)
        self.adopted, self.process = True, self.learner.life
        self.credits = max(len(self.run.stream.replaced), self.credits)

    def at_rest(self, now: float) -> Iterator[str]:
        """The invariants that are broken now."""
        yield from self._calls(now)
        if self.messages == self.socket.messages:
            return
        self.messages = self.socket.messages
        yield from self._fleet()
        if self.adopted and self.process != self.learner.life:
            return  # a new process of the learner will end the run
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
        config, active = dispatcher.config, Counter[Pending]()
        for worker in here.values():
            if now - worker.heard > config.dead_after_s + 3 * config.heartbeat_s:
                yield f"{worker.name} has been silent for {now - worker.heard:.0f} s and is kept"
            for attempt in worker.in_flight.values():
                active[attempt.pending] += 1
                if attempt.pending.done.done():
                    yield f"{worker.name} keeps an ended call of {attempt.pending.service}"
        waiting = Counter(call for queue in dispatcher._waiting.values() for call in queue)
        for service, queue in dispatcher._waiting.items():
            if queue:
                yield from self._free(service, now)
        astray = dict[Pending, float]()
        for call in {*dispatcher.open_calls(), *waiting}:
            most = 1 + getattr(call, "hedged", False)
            if waiting[call] + active[call] > most or (waiting[call] and call.done.done()):
                yield f"a call of {call.service} that runs, has ended or waits already is queued"
            if not waiting[call] and not active[call]:
                astray[call] = self.astray.get(call, now)
                if now - astray[call] > ASTRAY_S:
                    yield f"a call of {call.service} runs nowhere and does not wait"
        self.astray = astray
        if now > min(self.until.values(), default=now):
            yield "a call is open after its deadline"

    def _free(self, service: str, now: float) -> Iterator[str]:
        """Calls that wait beside a worker that could serve them."""
        fleet, usable = self.run.runtime.fleet, self._usable(service)
        for call in self.run.dispatcher._waiting[service]:
            able = [w for w in usable if w.name not in call.failed_on] or usable
            free = [w for w in able if w.has_room]
            if isinstance(call.place, Generation) and self._cached():
                low = (fleet._low_since.get(w.name, math.inf) for w in free)
                if max(low, default=0.0) > now - PATIENCE_S - 0.1:
                    continue  # it may wait for cache room
            if free:
                yield f"a call of {service} of tree {number(call)} waits beside {free[0].name}"

    def _usable(self, service: str) -> list[Worker]:
        """A worker that has rested is noticed with its next heartbeat."""
        workers, now = self.run.dispatcher.workers(service), self.run._clock()
        return [w for w in workers if w.usable(now) and w.breaker.open_until <= w.beat_at]

    def _fleet(self) -> Iterator[str]:
        roster, fleet = self.run.dispatcher.roster, self.run.runtime.fleet
        decoding, seats = Counter[str](), defaultdict[str, Counter[int]](Counter)
        for worker in roster.by_identity.values():
            places = [attempt.pending.place for attempt in worker.in_flight.values()]
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
        idle = [
            s.sampling for by_tree in fleet.seats.values() for s in by_tree.values() if not s.calls
        ]
        if max(map(abs, idle), default=0.0) > 1e-6:
            yield f"seats without a call keep {idle} tokens"
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
        if newest < self.newest:
            yield f"actors get the version {newest} after {self.newest}"
        self.newest = newest
        if newest != sync.weights.version or newest > self.learner.version:
            yield f"the newest version is {newest}, and that of the learner {self.learner.version}"
        if any(call.service == "load" for call in dispatcher.open_calls()):
            return
        if proven != newest:
            yield f"version {newest} is everywhere, and {proven} counts as proven"
        for worker, _ in self._actors() if newest else ():
            if sync.residency._versions.get(worker.name) != newest:
                yield f"the cache of {worker.name} is believed to be of older weights"

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
        counted = [row for row in counted if row.status != REPLACED]
        unfinished = [row.id for row in trees.unfinished if row.status != REPLACED]
        if run.pacing.admitted != len(counted) - len(unfinished):
            told = f"{run.pacing.admitted} trees count as admitted"
            yield f"{told}, and the journal has {len(counted)} with {len(unfinished)} unfinished"
        query = "SELECT id, tree, trained FROM groups WHERE trained IS NOT NULL"
        marks = list(journal._rows(query))
        if wrong := [mark for mark in marks if self.learner.trained.get(mark[0]) != mark[2]]:
            yield f"the groups {wrong} are marked as trained"
        replaced = {row.id for row in rows if row.status == REPLACED}
        marked = {tree for _, tree, _ in marks}
        taken = {self.learner.owners.get(group) for group in self.learner.trained}
        if run.stream.replaced - (replaced - marked) or replaced - taken - run.stream.replaced:
            told = f"of {replaced} updates have taken {replaced & taken}, and {marked} are marked"
            yield f"the credits of {run.stream.replaced} are taken: {told}"
        if len(run.stream.replaced) > self.credits:
            yield f"{len(run.stream.replaced)} credits are taken, at most {self.credits}"
