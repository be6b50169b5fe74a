"""ZeroMQ sockets with CURVE keys: a message from a peer without this run's keys never reaches the
decoder. The scheduler binds a ROUTER and each worker connects a DEALER."""

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable, Iterable

import zmq
import zmq.auth.thread

from coppice.wire.arrays import Frame, Limits
from coppice.wire.keys import Grant, PeerKeys, RunKeys
from coppice.wire.messages import SERVICES

_MORE = zmq.NOBLOCK | zmq.SNDMORE
_BURST = 64
"""The number of messages handled before other coroutines get their turn."""


def is_loopback(endpoint: str) -> bool:
    """Return whether an endpoint is reached from this machine alone."""
    if endpoint.startswith(("ipc://", "inproc://")):
        return True
    host = endpoint.removeprefix("tcp://").rsplit(":", 1)[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Pump:
    """A socket on the event loop: ``listen`` passes every message to one callback until ``stop``,
    and ``send`` never waits.

    ZeroMQ's descriptor is edge-triggered and a send may swallow an edge. A wake-up therefore reads
    until no message is left, and a send requests one more wake-up. The queues are unbounded (see
    ``_configure``), so they are never full when a message is sent.
    """

    def __init__(self, socket: zmq.Socket, lead: int):
        self.socket, self._lead = socket, lead
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliver: Callable[[list[Frame]], None] | None = None
        self._woken = False

    def listen(self, deliver: Callable[[list[Frame]], None]) -> asyncio.Future[None]:
        """Pass every message to ``deliver`` from now on. If ``deliver`` raises an exception, the
        future ends with it."""
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self.socket.fileno(), self._wake)
        self._wake_soon()
        return self.ended

    def send(self, frames: Iterable[Frame]) -> bool:
        """Queue one message, and return whether it could be queued. Frames of 64 KiB and more are
        not copied, so their buffers must stay unchanged."""
        *first, last = frames
        for frame in first:
            self.socket.send(frame, _MORE, copy=type(frame) is bytes)
        self.socket.send(last, zmq.NOBLOCK, copy=type(last) is bytes)
        self._wake_soon()
        return True

    def stop(self) -> None:
        """Stop listening."""
        if self._loop is not None:
            self._loop.remove_reader(self.socket.fileno())
        self._loop = self._deliver = None

    def _first(self) -> Frame:
        return self.socket.recv(zmq.NOBLOCK)

    def _wake_soon(self) -> None:
        if not self._woken and self._loop is not None:
            self._woken = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._woken = False
        try:
            for _ in range(_BURST):
                if self._deliver is None:
                    return
                self._deliver(self._receive())
        except zmq.Again:
            return
        except BaseException as error:  # noqa: BLE001
            # The caller of ``listen`` awaits this future and sees the exception; no message is
            # delivered after it.
            self.stop()
            if not self.ended.done():
                self.ended.set_exception(error)
            return
        self._wake_soon()

    def _receive(self) -> list[Frame]:
        """Return the next message. Raises zmq.Again when there is none. Identity, header and body
        are copied, arrays are not."""
        socket = self.socket
        frames: list[Frame] = [self._first()]
        while socket.getsockopt(zmq.RCVMORE):
            if len(frames) < self._lead:
                frames.append(socket.recv(zmq.NOBLOCK))
            else:
                frames.append(socket.recv(zmq.NOBLOCK, copy=False).buffer)
        return frames


class Router(Pump):
    """The scheduler's bound socket. ``endpoint`` is the address to which workers connect (port 0
    binds a free port). ``sender``: the authenticated public key of the message that is being
    delivered, "" without keys. A peer chooses its identity itself, so an identity proves nothing.
    broken: called when a connection breaks; ``send`` then tells whose."""

    def __init__(self, bind: str, keys: RunKeys | None):
        if keys is None and not is_loopback(bind):
            raise ValueError(f"{bind} without CURVE keys: use a loopback address or pass RunKeys")
        self.context = zmq.Context()
        super().__init__(self.context.socket(zmq.ROUTER), lead=3)
        self.sender = ""
        self.keys = keys
        self.authenticator: zmq.auth.thread.ThreadAuthenticator | None = None
        _configure(self.socket)
        # A worker whose connection broke is back before this side has let the old connection go.
        # ZeroMQ would never read from the new one.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.broken: Callable[[], None] = lambda: None
        self._breaks = Pump(self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED), lead=2)
        if keys is not None:
            # A thread of its own: a stopped AsyncioAuthenticator later removes its descriptor from
            # the loop, which may be another socket's by then.
            authenticator = self.authenticator = zmq.auth.thread.ThreadAuthenticator(self.context)
            authenticator.start()
            authenticator.configure_curve_callback(credentials_provider=keys)
            self.socket.curve_server = True
            self.socket.curve_publickey = keys.server_public.encode()
            self.socket.curve_secretkey = keys.server_secret.encode()
        try:
            self.socket.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(
                f"cannot bind {bind}: {error.strerror}. Stop who uses it, or take a free port (0)"
            ) from None
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def listen(self, deliver: Callable[[list[Frame]], None]) -> asyncio.Future[None]:
        self._breaks.listen(lambda frames: self.broken())
        return super().listen(deliver)

    def send(self, frames: Iterable[Frame]) -> bool:
        """Queue one message. It is dropped if its peer has no connection now."""
        try:
            return super().send(frames)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False

    def stop(self) -> None:
        self._breaks.stop()
        super().stop()

    def grant(self, public: str) -> Grant | None:
        """Return what the holder of a key may do, None for a key that was revoked. Without keys
        everybody may do everything."""
        return self.keys.grant(public) if self.keys is not None else Grant("", tuple(SERVICES))

    def _first(self) -> Frame:
        identity = self.socket.recv(zmq.NOBLOCK, copy=False)
        if self.keys is not None:
            self.sender = str(identity.get("User-Id"))
        return identity.bytes

    def close(self) -> None:
        """Close at once and drop unsent messages."""
        self.stop()
        self.socket.close(linger=0)
        if self.authenticator is not None:
            self.authenticator.stop()
        self.context.destroy(linger=0)


class Dealer(Pump):
    """A worker's connected socket. ``identity`` is the worker's name with its process id and a
    random part, which make it unique."""

    def __init__(self, endpoint: str, keys: PeerKeys | None, identity: bytes):
        self.context = zmq.Context()
        super().__init__(self.context.socket(zmq.DEALER), lead=2)
        _configure(self.socket)
        self.socket.identity = identity
        if keys is not None:
            self.socket.curve_serverkey = keys.server_public.encode()
            self.socket.curve_publickey = keys.public.encode()
            self.socket.curve_secretkey = keys.secret.encode()
        self.socket.connect(endpoint)

    def send(self, frames: Iterable[Frame]) -> bool:
        """Queue one message. It is lost if the scheduler refused this worker's key; the
        registration, which is repeated, then gives up."""
        with contextlib.suppress(zmq.Again):
            return super().send(frames)
        return False

    def close(self) -> None:
        """Close. The last messages (Goodbye) get 500 ms to leave; there is no wait when all have
        left."""
        self.stop()
        self.context.destroy(linger=500)


def _configure(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, Limits().max_frame_bytes)
    # The number of open requests is bounded by credits, so the queues need no bound of their own.
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
