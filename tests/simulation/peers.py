"""Scripted workers that speak the real wire messages and keep to the protocol of
``wire.service.Service``, and the faults of each on command."""

import random
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from coppice.wire import messages as wire
from coppice.wire.arrays import Frame, decode_body, decode_header, encode
from coppice.wire.service import PINNED_ROOM, REGISTER_AGAIN, service_types
from tests.simulation.network import Connection, Network

SILENCE_S = 15.0
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 5.0


class Manners(msgspec.Struct):
    """The share of answers with each fault. seconds: the mean time of an answer, by service."""

    error: float = 0.0
    data_fault: float = 0.0
    twice: float = 0.0
    garbage: float = 0.0
    hang: float = 0.0
    short: float = 0.0
    not_a_number: float = 0.0
    lie: float = 0.0
    forget: float = 0.0
    seconds: dict[str, float] = {}


def score(response: str, column: str) -> float:
    """What every judge gives, so that a check can tell whether a score belongs to its turn."""
    return float(zlib.crc32(f"{column}/{response}".encode()) & 1)


def first_logprob(prefix: np.ndarray) -> int:
    """Of a sample after a prefix, so that a check can tell whether they belong together. The parts
    after the point tell the version of each token."""
    return -(zlib.crc32(prefix.astype(np.int32).tobytes()) % 1024)


def mislabelled(sample: Any) -> bool:
    """Whether an action's versions are not those that its actor held."""
    if sample.logprobs is None:
        return False
    return not np.array_equal(-sample.logprobs % 1 * 64 - 1, sample.versions)


class Peer:
    """A worker process. outside: whether it outlives a crash. Subclasses answer by ``handle``."""

    outside = False

    def __init__(
        self, network: Network, rng: random.Random, name: str, services: list[str], capacity: int
    ):
        self.network, self.rng, self.name = network, rng, name
        self.agenda, self.note = network.agenda, network.note
        self.services, self.capacity = services, capacity
        self.manners = Manners()
        self.faulty: Callable[[], bool] = lambda: False
        self.violated: Callable[[str], None] = lambda reason: None
        self.life, self.alive, self.frozen_until = 0, False, 0.0

    def start(self) -> None:
        if self.alive:
            return
        self.life += 1
        self.alive, self.frozen_until = True, 0.0
        identity = f"{self.name}/{self.life}".encode()
        self.connection = Connection(self.name, identity, self._arrived)
        self.network.connections[identity] = self.connection
        self.calls: dict[int, wire.Request] = {}
        self.registered, self.draining = False, False
        self.admission: str | None = None
        self.echo = 0
        self.heard, self.beat_s, self.pause = self.agenda.now, 2.0, FIRST_RETRY_S
        self.note("start", self.name)
        self.born()
        self._beat()

    def born(self) -> None:
        """What a new process does first."""

    def die(self, restart_after: float | None = None) -> None:
        """Vanish without a word; a new process starts ``restart_after`` seconds later."""
        if self.alive:
            self.note("dies", self.name)
            self.alive = False
            if self.rng.random() < 0.5:
                self.network.connections.pop(self.connection.identity, None)
                self.network.tell()
            else:  # its machine is gone, which nothing tells
                self.connection.epoch += 1
                self.connection.arrive = lambda frames: None
        if restart_after is not None:
            self.agenda.after(restart_after, self.start)

    def freeze(self, seconds: float) -> None:
        self.note("freezes", self.name, f"{seconds:.1f} s")
        self.frozen_until = max(self.frozen_until, self.agenda.now + seconds)

    def later(self, delay: float, event: Callable[[], None]) -> None:
        """Run ``event`` in this process, if it still lives then."""
        life = self.life

        def due() -> None:
            if not self.alive or self.life != life:
                return
            if self.frozen_until > self.agenda.now:
                self.agenda.at(self.frozen_until, due)
            else:
                event()

        self.agenda.after(delay, due)

    def send(self, header: Any, body: msgspec.Struct | None = None) -> None:
        self.note("to scheduler", self.name, header)
        self.network.to_scheduler(self.connection, encode(header, body))

    def _beat(self) -> None:
        if self.registered and self.agenda.now - self.heard > SILENCE_S:
            self.registered, self.pause = False, FIRST_RETRY_S
        if not self.registered:
            self._register()
            self.later(self.pause, self._beat)
            self.pause = min(2 * self.pause, LAST_RETRY_S)
            return
        self.send(wire.Heartbeat(len(self.calls), self.stats(), list(self.calls), self.echo))
        self.later(self.beat_s, self._beat)

    def stats(self) -> dict[str, float]:
        return {}

    def _arrived(self, frames: list[Frame]) -> None:
        if self.frozen_until > self.agenda.now:
            self.later(0.0, lambda: self._receive(frames))
        elif self.alive:
            self._receive(frames)

    def _receive(self, frames: list[Frame]) -> None:
        header = decode_header(frames)
        self.heard = self.agenda.now
        self.note("from scheduler", self.name, header)
        match header:
            case wire.Request():
                self._accept(header, frames)
            case wire.Cancel(id=number):
                self.calls.pop(number, None)
            case wire.Registered(heartbeat_s=beat_s, admission=admission):
                if self.admission not in (None, admission):
                    self.calls.clear()
                    self.echo = 0
                self.admission, self.beat_s, self.registered = admission, beat_s, True
            case wire.Drain():
                self.draining = True
                self.send(wire.Drain())
                self._leave_if_done()
            case wire.Goodbye(reason=reason):
                if reason != REGISTER_AGAIN:
                    self.die(restart_after=1.0)
                elif self.registered:
                    self.registered, self.pause = False, FIRST_RETRY_S
                    self._register()
            case wire.Heartbeat(echo=echo):
                self.echo = echo

    def _register(self) -> None:
        self.send(wire.Register(self.name, self.services, self.capacity, self.life, "simulated"))

    def _leave_if_done(self) -> None:
        if self.draining and not self.calls:
            self.send(wire.Goodbye("drained"))
            self.alive = False

    def _accept(self, header: wire.Request, frames: list[Frame]) -> None:
        if len(self.calls) >= self.capacity + PINNED_ROOM:
            reason = f"{self.name} is over its capacity of {self.capacity}"
            self.send(wire.Error(header.id, "infrastructure", reason))
            return
        self.calls[header.id] = header
        unpinned = sum(call.service != "load" for call in self.calls.values())
        if header.service != "load" and unpinned > self.capacity:
            self.violated(f"{self.name} has more requests than its capacity of {self.capacity}")
        self.later(header.deadline_s, lambda: self._expire(header))
        body = decode_body(frames, service_types(header.service)[0])
        self.accepted(header, body)

    def accepted(self, header: wire.Request, body: Any) -> None:
        mean = self.manners.seconds.get(header.service.split(".")[0], 0.1)
        # a load that hangs may take 20 minutes
        if header.service != "load" and self._strikes(self.manners.hang):
            self.note("hangs", self.name, header.id)
            return
        self.later(self.rng.random() * 2 * mean, lambda: self._answer(header, body))

    def _expire(self, header: wire.Request) -> None:
        if self.calls.pop(header.id, None) is not None:
            reason = f"{header.service} on {self.name} passed its deadline"
            self.send(wire.Error(header.id, "infrastructure", reason))

    def _strikes(self, share: float) -> bool:
        return share > 0 and self.faulty() and self.rng.random() < share

    def _answer(self, header: wire.Request, body: Any) -> None:
        own = header.service in ("load", "train", "close")
        if header.id not in self.calls:
            return
        if self._strikes(self.manners.error):
            self.reply(header.id, wire.Error(header.id, "infrastructure", "an injected fault"))
        elif self._strikes(self.manners.data_fault) and not own:
            self.reply(header.id, wire.Error(header.id, "data", "this task cannot work"))
        elif self._strikes(self.manners.garbage):
            self.note("garbage", self.name, header.id)
            self.calls.pop(header.id)
            frames = [*encode(wire.Result(header.id)), b"\xc1garbage"]
            self.network.to_scheduler(self.connection, frames)
        else:
            self.reply(header.id, wire.Result(header.id), self.handle(header, body))

    def reply(
        self, number: int, header: wire.Result | wire.Error, body: msgspec.Struct | None = None
    ) -> None:
        if self.calls.pop(number, None) is None:
            return
        self.send(header, body)
        if self._strikes(self.manners.twice):
            self.later(self.rng.random() * 5, lambda: self.send(header, body))
        self._leave_if_done()

    def handle(self, header: wire.Request, body: Any) -> msgspec.Struct:
        raise NotImplementedError


class Actor(Peer):
    """texts: token ids of what it samples. kv: tokens that its cache holds, 0 if it tells none."""

    def __init__(self, *peer: Any, texts: list[np.ndarray], kv: int = 0):
        super().__init__(*peer)
        self.texts, self.kv = texts, kv

    newest: Callable[[], int]
    """The learner's version, beyond which a lie goes."""

    def born(self) -> None:
        self.version, self.began = 0, dict[int, int]()

    def accepted(self, header: wire.Request, body: Any) -> None:
        self.began[header.id] = self.version
        super().accepted(header, body)

    def stats(self) -> dict[str, float]:
        return {"kv_capacity_tokens": float(self.kv)} if self.kv else {}

    def handle(self, header: wire.Request, body: Any) -> msgspec.Struct:
        if isinstance(body, wire.LoadRequest):
            self.version = body.version
            return wire.LoadResult(body.version, body.digest, 0.0)
        assert isinstance(body, wire.GenerateRequest)
        first, began = first_logprob(body.tokens), self.began.pop(header.id)
        samples = [self._sample(first, began) for _ in range(body.n)]
        short = self._strikes(self.manners.short)
        return wire.GenerateResult(samples[:-1] if short else samples, len(body.tokens), 0)

    def _sample(self, first: int, began: int) -> wire.Sample:
        """Half of the tokens are of the version at the call's beginning. A liar samples by weights
        that it should have given up, or tells a version that nobody has."""
        tokens = self.rng.choice(self.texts)
        versions = np.full(len(tokens), self.version, np.int32)
        versions[: len(tokens) // 2] = began
        lies = self.rng.choice(("old", "new")) if self._strikes(self.manners.lie) else ""
        versions -= lies == "old"
        logprobs = -(versions + 1).astype(np.float32) / 64
        logprobs[0] += first
        told = np.full_like(versions, self.newest() + 1) if lies == "new" else versions
        return wire.Sample(tokens, logprobs, told, "stop")


class Judge(Peer):
    """Scores turns by ``score``, for the services ``judge.<name>`` with the columns of each."""

    columns = {"judge.slate_rules": "think query answer", "judge.exact_match": "outcome f1"}

    def handle(self, header: wire.Request, body: Any) -> msgspec.Struct:
        assert isinstance(body, wire.JudgeRequest)
        judgements = [self._judged(header.service, turn.response) for turn in body.turns]
        short = self._strikes(self.manners.short)
        return wire.JudgeResult(judgements[:-1] if short else judgements)

    def _judged(self, service: str, response: str) -> wire.Judgement:
        scores = {column: score(response, column) for column in self.columns[service].split()}
        if self._strikes(self.manners.not_a_number):
            del scores[column := self.rng.choice(sorted(scores))]
            return wire.Judgement(scores, [column])
        return wire.Judgement(scores)


class Retriever(Peer):
    def handle(self, header: wire.Request, body: Any) -> msgspec.Struct:
        assert isinstance(body, wire.RetrieveRequest)
        passages = [[wire.Passage("1", "Peru", "Capital: Lima", 1.0)] for _ in body.queries]
        return wire.RetrieveResult(passages[:-1] if self._strikes(self.manners.short) else passages)
