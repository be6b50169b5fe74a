"""What a worker may say: how it may call itself, and what its answers may hold. This is checked
before anything else reads it, because the journal keeps it for good."""

import reprlib
from collections.abc import Iterable

import msgspec

from coppice.common.numbers import LARGEST, LONGEST_TEXT
from coppice.common.terminal import visible
from coppice.wire import messages as wire
from coppice.wire.faults import Refused
from coppice.wire.keys import RESERVED, Grant

_NAME = 100
"""The most characters of the name of a worker, a host, a service or a column."""
_SEVERAL = 256
"""The most services of a worker, columns of a judgement, and numbers of a move."""
_SAID = 2000
"""The most characters of a worker's fault or farewell that are kept."""


class JudgeGives(msgspec.Struct, frozen=True):
    """What a judge of the run declares: its columns, and the lowest and highest score."""

    columns: tuple[str, ...]
    limits: tuple[float, float]


def said(text: str) -> str:
    """The words of a worker, bounded and without control characters."""
    return visible(text[:_SAID])


def misnamed(hello: wire.Register, grant: Grant) -> str:
    """Why a worker may not register under these names, or ""."""
    names = [hello.worker, hello.host, *hello.services]
    if len(names) > _SEVERAL or not all(map(_named, names)):
        return f"its names are {reprlib.repr(names)}: expected {_NAME} printable characters each"
    if grant.guest and RESERVED.fullmatch(hello.worker):
        return "its name belongs to a process of the run: take another (coppice serve --name)"
    return ""


def check(answer: msgspec.Struct, grant: Grant | None, judge: JudgeGives | None) -> None:
    """Raise Refused unless ``answer`` is within its bounds. grant: of the worker's key, None if it
    was revoked. judge: what the run's own judge of this service declares, if it has one."""
    fault, texts = "", list[str]()
    match answer:
        case wire.JudgeResult(judgements=judgements):
            columns = [() if grant is None else grant.columns, judge and judge.columns]
            limits = (-LARGEST, LARGEST) if judge is None else judge.limits
            faults = (_judgement(judgement, columns, limits) for judgement in judgements)
            fault = next(filter(None, faults), "")
            texts = [judgement.explanation for judgement in judgements]
        case wire.RetrieveResult(passages=passages):
            texts = [text for each in passages for p in each for text in (p.id, p.title, p.text)]
        case wire.SpeakResult(text=text):
            texts = [text]
        case wire.PlayResult(move=move) if len(move) > _SEVERAL:
            fault = f"a move of {len(move)} numbers, expected at most {_SEVERAL}"
        case _:
            pass
    if (size := max(map(len, texts), default=0)) > LONGEST_TEXT:
        fault = f"a text of {size} characters, expected at most {LONGEST_TEXT}"
    if fault:
        raise Refused(f"{fault}: mend the worker")


def _judgement(
    judgement: wire.Judgement, columns: Iterable[tuple[str, ...] | None],
    limits: tuple[float, float],
) -> str:  # fmt: skip
    names = [*judgement.scores, *judgement.invalid]
    if len(names) > _SEVERAL or not all(map(_named, names)):
        return f"the columns {reprlib.repr(names)}, expected at most {_SEVERAL} short names"
    for allowed in columns:  # by the key, and by the run
        if allowed is not None and (extra := {*names} - {*allowed}):
            remedy = "(Judge.columns, and --columns of --invite)"
            return f"the columns {reprlib.repr(extra)}, expected some of {allowed} {remedy}"
    for column, score in judgement.scores.items():
        if not limits[0] <= score <= limits[1]:
            expected = f"expected {limits[0]:g} to {limits[1]:g} (Judge.limits)"
            return f"the score {score} in column {column!r}, {expected}"
    return ""


def _named(name: str) -> bool:
    return len(name) <= _NAME and name.isprintable()
