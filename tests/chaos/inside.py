"""What a process of a run does to itself when chaos orders it to, on a Unix socket whose name is the
process's number. It answers when the fault has really struck."""

import ctypes
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from coppice.common import shards
from tests.chaos import messages

_EVER_S, HANG_S = 10**6, 5
LAUNCHER = "coppice launch"


def address(pid: int) -> str:
    return f"\0coppice-chaos-{pid}"


def listen() -> None:
    orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    orders.bind(address(os.getpid()))

    def serve() -> None:
        while True:
            order, sender = orders.recvfrom(4096)
            obey(**json.loads(order), tell=lambda text, to=sender: orders.sendto(text.encode(), to))

    threading.Thread(target=serve, daemon=True).start()


def obey(kind: str, variant: int, tell: Callable[[str], Any]) -> None:
    """Strike now, or arm what strikes with the next message."""
    match kind:
        case "hang":
            if launches := sys.argv[0] == LAUNCHER:
                hold(HANG_S)
            tell(f"no thread ran for {HANG_S} s" if launches else "no thread runs")
            if not launches:
                hold(_EVER_S)
        case "slow":
            end = time.monotonic() + 2
            while time.monotonic() < end:
                hold(0.05)
                time.sleep(0.01)
            tell("it was slow for 2 s")
        case "exit":
            tell("status 1")
            os._exit(1)
        case "clock":
            tell(turn_clock(random.Random(variant).choice([-1, 1]) * (variant % (30 * 86400) + 60)))
        case "cut" | "part":
            tell(f"{shut_down(kind)} connections were shut down")
        case _:
            messages.armed[kind] = messages.Armed(variant, tell)


def hold(seconds: float) -> None:
    """Sleep with the interpreter's lock, so that no other thread of this process runs."""
    library = ctypes.PyDLL(None)
    library.usleep(int(seconds * 1e6)) if seconds < 1 else library.sleep(int(seconds))


def turn_clock(by: float) -> str:
    real, real_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: real() + by, lambda: real_ns() + int(by * 1e9)
    return f"the date moved by {by / 86400:+.1f} days"


def shut_down(kind: str) -> int:
    """Shut down this process's connections to schedulers or workers, with "part" to other ranks."""
    run = Path(sys.argv[1]).parent.parent
    ports = {int((home / "endpoint").read_text().rpartition(":")[2]) for home in shards.homes(run)}
    count = 0
    for one in psutil.Process().net_connections("tcp"):
        ends = {one.laddr.port, one.raddr.port} if one.status == "ESTABLISHED" else None
        if ends and (kind == "part") == ports.isdisjoint(ends):
            with socket.socket(fileno=os.dup(one.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def begin() -> None:
    listen()
    if sys.argv[0] != LAUNCHER:
        messages.wrap()
