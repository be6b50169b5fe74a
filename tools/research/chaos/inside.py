"""What a process of a run does to itself when chaos orders it to.

``become`` makes a fork of this process a process of the run, and ``launch`` makes it the launcher, whose children are forks too. A thread takes
orders on a Unix socket whose name is the process's number, so that the product has no hooks for faults. An order is answered when the fault has
really struck.
"""

import ctypes
import importlib
import json
import os
import random
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil

import scheduler
from actors.engines import local
from learner.ranks import Ranks
from tools.launching import command, supervisor
from tools.launching.assets import Assets
from tools.research.chaos.forked import Fork
from wire import sockets
from wire.arrays import Frame, decode_header
from wire.messages import GenerateResult, Heartbeat, JudgeResult, LoadResult, Message, Request, Result, RetrieveResult
from wire.service import Service

_EVER_S, HANG_S = 10**6, 5
_BEYOND = 257 * 2**20
"""Bytes that no message may have (wire.arrays.Limits)."""
armed: dict[str, Callable[[str], None]] = {}
"""The kinds that wait for their moment, with what tells of it."""
variants: dict[str, int] = {}


PROCESSES = (
    "actors.worker",
    "judges.exact_match",
    "judges.retriever.encoder",
    "judges.retriever.index",
    "judges.retriever.worker",
    "judges.serve",
    "judges.slate_rules",
    "learner.main",
    "scheduler.main",
)
"""What the processes of a run import."""
for module in PROCESSES:
    importlib.import_module(module)


def address(pid: int) -> str:
    """Return the name of the socket of a process (in Linux's abstract namespace, which needs no file)."""
    return f"\0coppice-chaos-{pid}"


def listen() -> None:
    """Begin to take orders: JSON {kind, variant}. The answer is a text that says what struck."""
    orders = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    orders.bind(address(os.getpid()))

    def serve() -> None:
        while True:
            order, sender = orders.recvfrom(4096)
            wanted = json.loads(order)
            obey(wanted["kind"], wanted["variant"], lambda text, to=sender: orders.sendto(text.encode(), to))

    threading.Thread(target=serve, daemon=True).start()


def obey(kind: str, variant: int, tell: Callable[[str], Any]) -> None:
    """Strike now, or arm what strikes with the next message."""
    match kind:
        case "hang":
            if launches := sys.argv[1].startswith("--"):
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
            variants[kind] = variant
            armed[kind] = tell


def hold(seconds: float) -> None:
    """Sleep without giving up the interpreter's lock, so that no other thread of this process runs."""
    library = ctypes.PyDLL(None)
    library.usleep(int(seconds * 1e6)) if seconds < 1 else library.sleep(int(seconds))


def turn_clock(by: float) -> str:
    """Move this process's date. The monotonic clock stays, as it does when an administrator sets the date."""
    real, real_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: real() + by, lambda: real_ns() + int(by * 1e9)
    return f"the date moved by {by / 86400:+.1f} days"


def shut_down(kind: str) -> int:
    """Shut down this process's connections to the scheduler or its workers, or with "part" to the other ranks."""
    run = Path(sys.argv[1]).parent.parent
    port = int((run / "endpoint").read_text().rpartition(":")[2])
    count = 0
    for one in psutil.Process().net_connections("tcp"):
        if one.status == psutil.CONN_ESTABLISHED and (kind == "part") != (port in (one.laddr.port, one.raddr.port)):
            with socket.socket(fileno=os.dup(one.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def take(kind: str) -> Callable[[str], None] | None:
    """Return what tells that ``kind`` has struck if it was armed, once."""
    return armed.pop(kind, None)


# ------------------------------------------------------------------------------------------ messages


def strike_messages() -> None:
    """Have every message of this process pass by the faults that are armed."""
    send, answer, accept = sockets.Pump.send, Service.send, Service._accept
    held: list[list[Frame]] = []

    def sends(pump: sockets.Pump, frames: Iterable[Frame]) -> None:
        message = list(frames)
        header = decode_header(message[isinstance(pump, sockets.Router) :])
        if held and _peer(pump, held[0]) == _peer(pump, message):
            send(pump, message)
            send(pump, held.pop())
        elif isinstance(header, Heartbeat) or not armed:
            send(pump, message)
        elif tell := take("lose"):
            tell(f"a {type(header).__name__} was lost")
        elif tell := take("twice"):
            send(pump, message)
            send(pump, message)
            tell(f"a {type(header).__name__} was sent twice")
        elif tell := take("reorder"):
            held.append(message)
            tell(f"a {type(header).__name__} came after the next message")
        else:
            send(pump, message)

    def answers(service: Service, header: Message, body: msgspec.Struct | None = None) -> None:
        if isinstance(header, Result) and (tell := take("stray")):
            tell("an answer to no request")
            header = Result(header.id + 10**9)
        for kind in ("wrong", "nan", "huge") if isinstance(header, Result) and not isinstance(body, LoadResult) else ():
            if kind in armed and body is not None:
                body, text = SPOILERS[kind](body, random.Random(variants[kind]))
                armed.pop(kind)(text)
        answer(service, header, body)

    def accepts(service: Service, header: Request, frames: list[Frame]) -> None:
        if header.service == "load" and "unloaded" in armed and variants["unloaded"] % 2:
            armed.pop("unloaded")("a load was lost")
        else:
            accept(service, header, frames)

    _wrap((sockets.Pump, "send", sends), (Service, "send", answers), (Service, "_accept", accepts))


def _wrap(*places: tuple[Any, str, Any]) -> None:
    """Put functions of this module in the places of others, in this process alone. places: owner, name and function."""
    for owner, name, function in places:
        setattr(owner, name, function)


def _peer(pump: sockets.Pump, message: list[Frame]) -> bytes:
    return bytes(message[0]) if isinstance(pump, sockets.Router) else b""


def wrong(body: Any, rng: random.Random) -> tuple[Any, str]:
    """An answer with too few parts, or with parts that cannot be."""
    replace = msgspec.structs.replace
    match body:
        case JudgeResult():
            return replace(body, judgements=body.judgements[1:]), "too few judgements"
        case RetrieveResult():
            return replace(body, passages=body.passages[1:]), "too few lists of passages"
        case GenerateResult(samples=[first, *rest]):
            wrongs = {
                "too few samples": rest,
                "more tokens than log-probabilities": [replace(first, logprobs=first.logprobs[1:]), *rest],
                "more tokens than versions": [replace(first, versions=first.versions[1:]), *rest],
                "a token that is not in the vocabulary": [replace(first, tokens=first.tokens + 10**6), *rest],
                "a version of the future": [replace(first, versions=first.versions + 1000), *rest],
                "a sample without tokens": [
                    replace(first, tokens=first.tokens[:0], logprobs=first.logprobs[:0], versions=first.versions[:0]),
                    *rest,
                ],
            }
            text = rng.choice(sorted(wrongs))
            return replace(body, samples=wrongs[text]), text
    return body, "nothing"


def nan(body: Any, rng: random.Random) -> tuple[Any, str]:
    """An answer with NaN for a number."""
    replace, no = msgspec.structs.replace, float("nan")
    match body:
        case JudgeResult():
            return replace(
                body, judgements=[replace(j, scores=dict.fromkeys(j.scores, no)) for j in body.judgements]
            ), "scores"
        case RetrieveResult():
            return replace(body, passages=[[replace(p, score=no) for p in some] for some in body.passages]), "passages"
        case GenerateResult(samples=[first, *rest]):
            return replace(
                body, samples=[replace(first, logprobs=first.logprobs * np.float32(no)), *rest]
            ), "log-probabilities"
    return body, "nothing"


def huge(body: Any, rng: random.Random) -> tuple[Any, str]:
    """An answer that is longer than a message may be, or than was asked for."""
    replace, text = msgspec.structs.replace, "x " * (rng.choice([_BEYOND, 4 * 2**20]) // 2)
    size = f"{len(text) / 2**20:.0f} MiB"
    match body:
        case JudgeResult(judgements=[first, *rest]):
            return replace(body, judgements=[replace(first, explanation=text), *rest]), f"an explanation of {size}"
        case RetrieveResult(passages=[[first, *_], *rest]):
            return replace(body, passages=[[replace(first, text=text)], *rest]), f"a passage of {size}"
        case GenerateResult(samples=[first, *rest]):
            arrays = {name: np.resize(getattr(first, name), 2**20) for name in ("tokens", "logprobs", "versions")}
            return replace(body, samples=[replace(first, **arrays), *rest]), "2^20 tokens"
    return body, "nothing"


SPOILERS = {"wrong": wrong, "nan": nan, "huge": huge}


# ------------------------------------------------------------------------------------------ actors and learner


def strike_engine() -> None:
    """Let the embedded engine keep its old weights and say that it took the new ones."""
    load = local.LocalEngine.load

    async def loads(engine: Any, request: Any) -> LoadResult:
        if tell := take("unloaded"):
            tell("a load was answered and not done")
            return LoadResult(request.version, request.digest, 0.0)
        return await load(engine, request)

    _wrap((local.LocalEngine, "load", loads))


def strike_optimizer() -> None:
    """Let a gradient be NaN."""
    add = Ranks.add_gradients

    def adds(ranks: Ranks, parameters: Any) -> None:
        if (tell := take("diverge")) and (graded := [p for p in parameters if p.grad is not None]):
            graded[0].grad.fill_(float("nan"))
            tell("a gradient was NaN")
        add(ranks, parameters)

    _wrap((Ranks, "add_gradients", adds))


def become(module: str, file: str) -> None:
    """Be the process that ``python -m module file`` would be, and take orders."""
    sys.argv = [module, file]
    scheduler.STARTED = time.monotonic()
    listen()
    strike_messages()
    if module == "actors.worker":
        strike_engine()
    if module == "learner.main":
        strike_optimizer()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def launch(assets: Path, arguments: Sequence[str]) -> None:
    """Be the launcher of a run whose processes are forks of this one. The set-up was done before: assets is a file with its result."""
    sys.argv = ["tools/launch", *arguments]
    listen()

    def start(command: Sequence[str], **options: Any) -> Fork:
        return Fork(partial(become, *command[2:]), **options)

    prepared = msgspec.json.decode(assets.read_bytes(), type=Assets)
    _wrap((supervisor, "subprocess", SimpleNamespace(PIPE=subprocess.PIPE, Popen=start)))
    _wrap((command, "prepare", lambda _: prepared))
    sys.exit(command.main())
