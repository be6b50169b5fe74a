"""What a worker may say: how it may call itself, and what its answers may hold. This is checked
before anything else reads it, because the journal keeps it for good."""

import reprlib

import msgspec

from coppice.common.numbers import LARGEST
from coppice.common.terminal import visible
from coppice.wire.faults import Refused
from coppice.wire.keys import RESERVED, Grant
from coppice.wire.messages import (
    Judgement,
    JudgeResult,
    PlayResult,
    Register,
    RetrieveResult,
    SpeakResult,
)

_NAME = 100
"""The most characters of the name of a worker, a host, a service or a column."""
_SEVERAL = 256
"""The most services of a worker, columns of a judgement, and numbers of a move."""
_REPLY = 2**16
"""The most characters of a judge's explanation, and of a speaker's reply."""
_PASSAGE = 2**20
"""The most characters of a passage with its title."""
_SAID = 2000
"""The most characters of a worker's fault or farewell that are kept."""
_ROOM = 1024
"""The most requests that a guest takes at once: whoever claims more room gets all calls."""


class JudgeGives(msgspec.Struct, frozen=True):
    """What a judge of the run declares: its columns, and the lowest and highest score."""

    columns: tuple[str, ...]
    limits: tuple[float, float]


def said(text: str) -> str:
    """The words of a worker, bounded and without control characters."""
    return visible(text[:_SAID])


def misnamed(hello: Register, grant: Grant) -> str:
    """Why a worker may not register under these names, or ""."""
    names = [hello.worker, hello.host, *hello.services]
    if len(names) > _SEVERAL or not all(map(_named, names)):
        short = f"names of at most {_NAME} printable characters"
        return f"its names are {reprlib.repr(names)}: expected {short}, and fewer than {_SEVERAL}"
    if grant.guest and RESERVED.fullmatch(hello.worker):
        return "its name belongs to a process of the run: take another (coppice serve --name)"
    return ""


def anonymous(hello: Register) -> Register:
    """The registration of a guest as the run uses it: without the claims that nobody can check, by
    which the watchdog would take the guest for a process of the run."""
    room = min(hello.capacity, _ROOM)
    return msgspec.structs.replace(hello, pid=0, host="elsewhere", capacity=room)


def check(answer: msgspec.Struct, grant: Grant | None, judge: JudgeGives | None) -> None:
    """Raise Refused unless ``answer`` is within its bounds. grant: of the worker's key, None if it
    was revoked. judge: what the run's own judge of this service declares, if it has one."""
    fault = ""
    match answer:
        case JudgeResult(judgements=judgements):
            declared = None if judge is None else {*judge.columns}
            granted = set[str]() if grant is None else grant.columns
            if granted is not None:
                declared = {*granted} if declared is None else declared & {*granted}
            limits = (-LARGEST, LARGEST) if judge is None else judge.limits
            each = (_judgement(judgement, declared, limits) for judgement in judgements)
            fault = next(filter(None, each), "")
        case RetrieveResult(passages=passages):
            sizes = [len(p.id) + len(p.title) + len(p.text) for each in passages for p in each]
            if max(sizes, default=0) > _PASSAGE:
                fault = f"a passage of {max(sizes)} characters, expected at most {_PASSAGE}"
        case PlayResult(move=move):
            if len(move) > _SEVERAL:
                fault = f"a move of {len(move)} numbers, expected at most {_SEVERAL}"
        case SpeakResult(text=text):
            if len(text) > _REPLY:
                fault = f"a reply of {len(text)} characters, expected at most {_REPLY}"
        case _:
            pass
    if fault:
        raise Refused(f"{fault}: mend the worker")


def _judgement(judgement: Judgement, columns: set[str] | None, limits: tuple[float, float]) -> str:
    scores, names = judgement.scores, [*judgement.scores, *judgement.invalid]
    if len(names) > _SEVERAL or not all(map(_named, names)):
        return f"the columns {reprlib.repr(names)}, expected at most {_SEVERAL} short names"
    if columns is not None and (extra := {*names} - columns):
        expected = f"expected some of {sorted(columns)} (Judge.columns, and --columns of --invite)"
        return f"the columns {reprlib.repr(sorted(extra))}, {expected}"
    for column, score in scores.items():
        if not limits[0] <= score <= limits[1]:
            expected = f"expected {limits[0]:g} to {limits[1]:g} (Judge.limits)"
            return f"the score {score} in column {column!r}, {expected}"
    if (size := len(judgement.explanation)) > _REPLY:
        return f"an explanation of {size} characters, expected at most {_REPLY}"
    return ""


def _named(name: str) -> bool:
    return len(name) <= _NAME and name.isprintable()
