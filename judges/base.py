"""The judge plug-in: a class with one coroutine. A score that is NaN or infinite is invalid; it is
counted and reported as invalid."""

import math
import reprlib
from collections.abc import Sequence
from typing import Any

from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import JudgedTurn, Judgement


class Judge:
    """Subclass this, set ``name`` and ``columns``, and write ``score``. ``coppice serve
    my_module:MyJudge --run RUN`` plugs your judge in.

    A judge is started once, scores until the worker is drained, and is closed. columns: the names
    of its scores. environments: the names of the environments that it can judge, () for any.
    concurrency: requests in progress at once. batch: most turns in one ``score`` call."""

    name: str = ""
    columns: Sequence[str] = ()
    environments: Sequence[str] = ()
    concurrency: int = 32
    batch: int = 32

    async def start(self) -> None:
        """Acquire what scoring needs. Called once, before the first request."""

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        """Return one judgement per turn, in order. A column may be absent if it does not apply to
        the turn (a query score of an answer)."""
        raise NotImplementedError(f"{type(self).__name__} does not implement score")

    async def close(self) -> None:
        """Release what ``start`` acquired."""


class RuleJudge(Judge):
    """A judge that scores each turn by itself without waiting for anything: subclass this and write
    ``judge``."""

    concurrency = 256
    batch = 256

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        return [self.judge(turn) for turn in turns]

    def judge(self, turn: JudgedTurn) -> Judgement:
        """Return the judgement of one turn."""
        raise NotImplementedError(f"{type(self).__name__} does not implement judge")


def checked(judge: Judge, turns: list[JudgedTurn], returned: Any) -> tuple[list[Judgement], int]:
    """Return what ``judge.score`` returned for ``turns``, with unusable scores moved to
    ``invalid``, and the number of unusable scores.

    Raises InfrastructureFault unless the judge returned a list with one Judgement per turn,
    declared columns and numbers.
    """
    if not isinstance(returned, list | tuple):
        raise InfrastructureFault(
            f"judge {judge.name} returned {_short(returned)}; expected a list of Judgement, one per turn"
        )
    if len(returned) != len(turns):
        raise InfrastructureFault(
            f"judge {judge.name} returned {len(returned)} judgements for {len(turns)} turns"
        )
    judgements, bad = [], 0
    for judgement in returned:
        if not isinstance(judgement, Judgement):
            raise InfrastructureFault(
                f"judge {judge.name} returned {_short(judgement)} for a turn; expected a wire.messages.Judgement"
            )
        unknown = (set(judgement.scores) | set(judgement.invalid)) - set(judge.columns)
        if unknown:
            raise InfrastructureFault(
                f"judge {judge.name} returned columns {sorted(unknown)}; it declares {list(judge.columns)}"
            )
        numbers = {
            column: _number(judge, column, value) for column, value in judgement.scores.items()
        }
        scores = {column: value for column, value in numbers.items() if math.isfinite(value)}
        invalid = sorted({*judgement.invalid, *(set(numbers) - set(scores))})
        bad += len(invalid)
        usable = {column: value for column, value in scores.items() if column not in invalid}
        judgements.append(Judgement(usable, invalid, judgement.explanation))
    return judgements, bad


def _number(judge: Judge, column: str, value: Any) -> float:
    """Return the score as a float. Text is refused, even if it reads like a number."""
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    # a tensor of several values raises RuntimeError
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    raise InfrastructureFault(
        f"judge {judge.name} returned {_short(value)} in column {column!r}; expected a number, or the column in Judgement.invalid"
    )


def _short(value: Any) -> str:
    """Return a short text of a value and its type, for a message."""
    return f"{reprlib.repr(value)} ({type(value).__name__})"
