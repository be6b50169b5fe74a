"""The simulated network, as ZeroMQ's ROUTER and DEALER over TCP: order is kept within a connection;
while it is down, what the scheduler sends is lost, what a peer sends waits."""

import asyncio
import random
from collections.abc import Callable, Iterable

import msgspec

from coppice.wire.arrays import Frame
from coppice.wire.keys import Grant, RunKeys
from coppice.wire.messages import SERVICES
from tests.simulation.virtual_time import Agenda

Note = Callable[..., None]


class Connection(msgspec.Struct, eq=False):
    """epoch: counts the losses. down, up: when the newest message to the peer, and from it, arrives:
    later messages arrive after it."""

    name: str
    identity: bytes
    arrive: Callable[[list[Frame]], None]
    epoch: int = 0
    up_at: float = 0.0
    down: float = 0.0
    up: float = 0.0


class Network:
    """slow: mean delay in seconds; spikes: the share of messages that take up to 20 times as long."""

    def __init__(self, agenda: Agenda, rng: random.Random, note: Note, slow: float, spikes: float):
        self.agenda, self.rng, self.note = agenda, rng, note
        self.slow, self.spikes = slow, spikes
        self.connections: dict[bytes, Connection] = {}
        self.socket: Socket | None = None

    def bind(self) -> "Socket":
        self.socket = Socket(self)
        return self.socket

    def cut(self, connection: Connection, seconds: float) -> None:
        connection.epoch += 1
        connection.up_at = self.agenda.now + seconds
        self.tell()

    def tell(self) -> None:
        """The scheduler's socket sees that a connection broke."""
        if self.socket is not None and self.socket.alive:
            self.socket.broken()

    def to_scheduler(self, connection: Connection, frames: list[Frame]) -> None:
        start = max(self.agenda.now, connection.up_at)
        connection.up = max(connection.up, start + self._delay())
        epoch = connection.epoch

        def arrive() -> None:
            if self._lost(connection, epoch):
                self.note("lost", connection.name, "to the scheduler")
            elif self.socket is not None:
                self.socket.arrived([connection.identity, *frames])

        self.agenda.at(connection.up, arrive)

    def _lost(self, connection: Connection, epoch: int) -> bool:
        current = self.connections.get(connection.identity) is connection
        return not current or epoch != connection.epoch

    def to_peer(self, identity: bytes, frames: list[Frame]) -> bool:
        """Returns whether the scheduler has a connection to the peer."""
        connection = self.connections.get(identity)
        if connection is None or connection.up_at > self.agenda.now:
            name = connection.name if connection else identity.decode()
            self.note("lost", name, "from the scheduler")
            return False
        connection.down = max(connection.down, self.agenda.now + self._delay())
        epoch = connection.epoch

        def arrive() -> None:
            if self._lost(connection, epoch):
                self.note("lost", connection.name, "from the scheduler")
            else:
                connection.arrive(frames)

        self.agenda.at(connection.down, arrive)
        return True

    def _delay(self) -> float:
        delay = self.rng.random() * 2 * self.slow
        return delay * 20 * self.rng.random() if self.rng.random() < self.spikes else delay


class Socket:
    """The scheduler's end: ``wire.sockets.Router``. on_send: called before each message. messages:
    how many were sent and have come."""

    endpoint = "simulated"
    keys: RunKeys | None = None
    sender = ""
    messages = 0

    def __init__(self, network: Network):
        self.network = network
        self.alive, self.on_send = True, lambda: None
        self.broken: Callable[[], None] = lambda: None
        self._deliver: Callable[[list[Frame]], None] | None = None
        self._ended: asyncio.Future[None] | None = None

    def grant(self, public: str) -> Grant:
        return Grant(public, tuple(SERVICES))

    def listen(self, deliver: Callable[[list[Frame]], None]) -> asyncio.Future[None]:
        self._deliver = deliver
        self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def send(self, frames: Iterable[Frame]) -> bool:
        if not self.alive:
            return True
        self.messages += 1
        self.on_send()
        identity, *rest = frames
        return self.network.to_peer(bytes(identity), rest)

    def arrived(self, frames: list[Frame]) -> None:
        """A message has come for the scheduler; it is lost if nobody listens."""
        if self._deliver is None or not self.alive:
            return
        self.messages += 1
        try:
            self._deliver(frames)
        except Exception as error:  # noqa: BLE001
            self._deliver = None
            if self._ended is not None and not self._ended.done():
                self._ended.set_exception(error)

    def close(self) -> None:
        self.alive, self._deliver = False, None
