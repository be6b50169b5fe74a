"""Faults that strike a message, a load of weights or a gradient of this process: once armed, each
strikes the next one that passes."""

import random
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from coppice.actors.engines import local
from coppice.learner.model.ranks import Ranks
from coppice.wire import messages as wire
from coppice.wire import sockets
from coppice.wire.arrays import Frame, decode_header
from coppice.wire.service import Service

BEYOND = 257 * 2**20
"""Bytes that no message may have (wire.arrays.Limits)."""


class Armed(msgspec.Struct, frozen=True):
    """tell: says what has struck."""

    variant: int
    tell: Callable[[str], Any]


armed: dict[str, Armed] = {}


def take(kind: str, wanted: bool = True) -> Callable[[str], None] | None:
    """Return, once, what tells that an armed kind has struck, if this is its ``wanted`` moment."""
    return armed.pop(kind).tell if wanted and kind in armed else None


def wrap() -> None:
    _wrap_messages()
    _wrap_computing()


def _wrap_messages() -> None:
    send, answer, accept = sockets.Pump.send, Service.send, Service._accept
    held: list[list[Frame]] = []

    def sends(pump: sockets.Pump, frames: Iterable[Frame]) -> None:
        message = list(frames)
        header = decode_header(message[isinstance(pump, sockets.Router) :])
        if held and _peer(pump, held[0]) == _peer(pump, message):
            send(pump, message)
            send(pump, held.pop())
        elif isinstance(header, wire.Heartbeat) or not armed:
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

    def answers(service: Service, header: wire.Message, body: msgspec.Struct | None = None) -> None:
        if isinstance(header, wire.Result) and (tell := take("stray")):
            tell("an answer to no request")
            header = wire.Result(header.id + 10**9)
        spoilt = isinstance(header, wire.Result) and not isinstance(body, wire.LoadResult | None)
        for kind in SPOILERS if spoilt else ():
            if kind in armed:
                body, text = SPOILERS[kind](body, random.Random(armed[kind].variant))
                armed.pop(kind).tell(text)
        answer(service, header, body)

    def accepts(service: Service, header: wire.Request, frames: list[Frame]) -> None:
        loads = header.service == "load" and "unloaded" in armed
        if tell := take("unloaded", loads and armed["unloaded"].variant % 2 == 1):
            tell("a load was lost")
        else:
            accept(service, header, frames)

    for owner, name, function in (
        (sockets.Pump, "send", sends), (Service, "send", answers), (Service, "_accept", accepts),
    ):  # fmt: skip
        setattr(owner, name, function)


def _peer(pump: sockets.Pump, message: list[Frame]) -> bytes:
    return bytes(message[0]) if isinstance(pump, sockets.Router) else b""


def wrong(body: Any, rng: random.Random) -> tuple[Any, str]:
    match body:
        case wire.JudgeResult():
            return replace(body, judgements=body.judgements[1:]), "too few judgements"
        case wire.RetrieveResult():
            return replace(body, passages=body.passages[1:]), "too few lists of passages"
        case wire.GenerateResult(samples=[first, *rest]):
            tokens, logprobs, versions = first.tokens, first.logprobs, first.versions
            nothing = {"tokens": tokens[:0], "logprobs": logprobs[:0], "versions": versions[:0]}
            changes: dict[str, dict[str, Any]] = {
                "more tokens than log-probabilities": {"logprobs": logprobs[1:]},
                "more tokens than versions": {"versions": versions[1:]},
                "a token that is not in the vocabulary": {"tokens": tokens + 10**6},
                "a version of the future": {"versions": versions + 1000},
                "a sample without tokens": nothing,
            }
            text = rng.choice([few := "too few samples", *sorted(changes)])
            spoiled = [] if text == few else [replace(first, **changes[text])]
            return replace(body, samples=[*spoiled, *rest]), text
    return body, "nothing"


def nan(body: Any, rng: random.Random) -> tuple[Any, str]:
    no = float("nan")
    match body:
        case wire.JudgeResult():
            every = [replace(j, scores=dict.fromkeys(j.scores, no)) for j in body.judgements]
            return replace(body, judgements=every), "scores"
        case wire.RetrieveResult():
            lists = [[replace(p, score=no) for p in some] for some in body.passages]
            return replace(body, passages=lists), "passages"
        case wire.GenerateResult(samples=[first, *rest]):
            spoiled = replace(first, logprobs=first.logprobs * np.float32(no))
            return replace(body, samples=[spoiled, *rest]), "log-probabilities"
    return body, "nothing"


def huge(body: Any, rng: random.Random) -> tuple[Any, str]:
    long = rng.choice([BEYOND, 4 * 2**20])
    match body:
        case wire.JudgeResult(judgements=[first, *rest]):
            judgements = [replace(first, explanation="x " * (long // 2)), *rest]
            return replace(body, judgements=judgements), f"an explanation of {long} bytes"
        case wire.RetrieveResult(passages=[[first, *_], *rest]):
            passages = [[replace(first, text="x " * (long // 2))], *rest]
            return replace(body, passages=passages), f"a passage of {long} bytes"
        case wire.GenerateResult(samples=[first, *rest]):
            names = ("tokens", "logprobs", "versions")
            arrays = {name: np.resize(getattr(first, name), 2**20) for name in names}
            return replace(body, samples=[replace(first, **arrays), *rest]), "2^20 tokens"
    return body, "nothing"


SPOILERS = {"wrong": wrong, "nan": nan, "huge": huge}


def _wrap_computing() -> None:
    """The engine keeps its old weights and says that it took the new ones; a gradient is NaN."""
    load, add = local.LocalEngine.load, Ranks.add_gradients

    async def loads(engine: Any, request: Any) -> wire.LoadResult:
        if tell := take("unloaded"):
            tell("a load was answered and not done")
            return wire.LoadResult(request.version, request.digest, 0.0)
        return await load(engine, request)

    def adds(ranks: Ranks, parameters: Any) -> None:
        graded = [p for p in parameters if p.grad is not None]
        if tell := take("diverge", bool(graded)):
            graded[0].grad.fill_(float("nan"))
            tell("a gradient was NaN")
        add(ranks, parameters)

    for owner, name, function in (
        (local.LocalEngine, "load", loads),
        (Ranks, "add_gradients", adds),
    ):
        setattr(owner, name, function)
