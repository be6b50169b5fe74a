"""ZeroMQ sockets with CURVE keys: a message from a peer without this run's keys never reaches the decoder.

The scheduler binds a ROUTER and each worker connects a DEALER. ``RunKeys`` is a folder of 0600 files, created when the run starts.
"""

import asyncio
import ipaddress
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import zmq
import zmq.auth.asyncio

from wire.arrays import Frame, Limits

_MORE = zmq.NOBLOCK | zmq.SNDMORE
_BURST = 64
"""The number of messages handled before other coroutines get their turn."""


class RunKeys(msgspec.Struct, frozen=True):
    """The CURVE keys of one run (Z85 text): one pair for the scheduler and one pair that all its workers share."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def create(cls, folder: Path) -> "RunKeys":
        """Create keys in ``folder`` (0700), or load the existing ones (a resumed run keeps its keys)."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if all((folder / name).exists() for name in cls.__struct_fields__):
            return cls.load(folder)
        pairs = (*zmq.curve_keypair(), *zmq.curve_keypair())
        for name, key in zip(cls.__struct_fields__, pairs, strict=True):
            handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(key)
        return cls(*pairs)

    @classmethod
    def load(cls, folder: Path) -> "RunKeys":
        """Read the keys of a run. Raises FileNotFoundError, which says what to check, when there are none."""
        try:
            return cls(*((folder / name).read_bytes() for name in cls.__struct_fields__))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"no keys in {folder} ({error}): is this a run folder that was started?") from None


def _is_loopback(endpoint: str) -> bool:
    if endpoint.startswith(("ipc://", "inproc://")):
        return True
    host = endpoint.removeprefix("tcp://").rsplit(":", 1)[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Pump:
    """A socket on the event loop: ``listen`` passes every message to one callback until ``stop``, and ``send`` never waits.

    ZeroMQ's descriptor is edge-triggered and a send may swallow an edge. A wake-up therefore reads until no message is left, and a send
    requests one more wake-up. The queues are unbounded (see ``_configure``), so they are never full when a message is sent.
    """

    def __init__(self, socket: zmq.Socket, lead: int):
        self.socket, self._lead = socket, lead
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliver: Callable[[list[Frame]], None] | None = None
        self._woken = False

    def listen(self, deliver: Callable[[list[Frame]], None]) -> asyncio.Future[None]:
        """Pass every message to ``deliver`` from now on. If ``deliver`` raises an exception, the future ends with it."""
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._descriptor(), self._wake)
        self._wake_soon()
        return self.ended

    def send(self, frames: Iterable[Frame]) -> None:
        """Queue one message. Frames of 64 KiB and more are not copied, so their buffers must stay unchanged."""
        socket, last = self.socket, None
        for frame in frames:
            if last is not None:
                socket.send(last, _MORE, copy=type(last) is bytes)
            last = frame
        if last is not None:
            socket.send(last, zmq.NOBLOCK, copy=type(last) is bytes)
        self._wake_soon()

    def stop(self) -> None:
        """Stop listening."""
        if self._loop is not None:
            self._loop.remove_reader(self._descriptor())
        self._loop = self._deliver = None

    def _descriptor(self) -> int:
        return int(self.socket.getsockopt(zmq.FD))

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
        except BaseException as error:  # noqa: BLE001 the event loop would only log it
            # The caller of ``listen`` awaits this future and sees the exception; no message is delivered after it.
            self.stop()
            if not self.ended.done():
                self.ended.set_exception(error)
            return
        self._wake_soon()

    def _receive(self) -> list[Frame]:
        """Return the next message. Raises zmq.Again when there is none. Identity, header and body are copied, arrays are not."""
        socket = self.socket
        frames: list[Frame] = [socket.recv(zmq.NOBLOCK)]
        while socket.getsockopt(zmq.RCVMORE):
            if len(frames) < self._lead:
                frames.append(socket.recv(zmq.NOBLOCK))
            else:
                frames.append(socket.recv(zmq.NOBLOCK, copy=False).buffer)
        return frames


class Router(Pump):
    """The scheduler's bound socket. ``endpoint`` is the address to which workers connect (port 0 binds a free port)."""

    def __init__(self, bind: str, keys: RunKeys | None, limits: Limits = Limits()):
        if keys is None and not _is_loopback(bind):
            raise ValueError(f"refusing to bind {bind} without CURVE keys: use a loopback address or pass RunKeys")
        self.context = zmq.Context()
        super().__init__(self.context.socket(zmq.ROUTER), lead=3)
        self.authenticator: zmq.auth.asyncio.AsyncioAuthenticator | None = None
        _configure(self.socket, limits)
        if keys is not None:
            authenticator = self.authenticator = zmq.auth.asyncio.AsyncioAuthenticator(self.context)
            authenticator.start()
            authenticator.configure_curve_callback(credentials_provider=_Allow(keys.client_public))
            self.socket.curve_server = True
            self.socket.curve_publickey = keys.server_public
            self.socket.curve_secretkey = keys.server_secret
        try:
            self.socket.bind(bind)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(
                f"cannot bind {bind}: {error.strerror}. Stop the process that uses it, or take a free port with port 0"
            ) from None
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Close at once and drop unsent messages."""
        self.stop()
        self.socket.close(linger=0)
        if self.authenticator is not None:
            self.authenticator.stop()
        self.context.destroy(linger=0)


class Dealer(Pump):
    """A worker's connected socket. ``identity`` is the worker's name with its process id and a random part, which make it unique."""

    def __init__(self, endpoint: str, keys: RunKeys | None, identity: bytes, limits: Limits = Limits()):
        self.context = zmq.Context()
        super().__init__(self.context.socket(zmq.DEALER), lead=2)
        _configure(self.socket, limits)
        self.socket.identity = identity
        if keys is not None:
            self.socket.curve_serverkey = keys.server_public
            self.socket.curve_publickey = keys.client_public
            self.socket.curve_secretkey = keys.client_secret
        self.socket.connect(endpoint)

    def close(self, linger_ms: int = 500) -> None:
        """Close. The last messages (Goodbye) get ``linger_ms`` milliseconds to leave; there is no wait when all have left."""
        self.stop()
        self.context.destroy(linger=linger_ms)


class _Allow:
    """A CURVE credentials provider that accepts exactly one client key."""

    def __init__(self, client_public: bytes):
        self.client_public = client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.client_public


def _configure(socket: zmq.Socket, limits: Limits) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, limits.max_frame_bytes)
    # The number of open requests is bounded by credits, so the queues need no bound of their own.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
