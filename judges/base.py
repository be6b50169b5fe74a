"""The judge plug-in: a class with one coroutine. A score that is NaN or infinite is invalid: it is counted, and told, as such."""

import math
import reprlib
from collections.abc import Sequence
from typing import Any

from wire.faults import InfrastructureFault
from wire.messages import JudgedTurn, Judgement


class Judge:
    """Subclass this, set ``name`` and ``columns``, write ``score``; ``tools/serve my_module:MyJudge --run RUN`` plugs it in.

    columns: names of the scores. environments: names of those it can judge, () for any. concurrency: requests in flight at once. batch: most turns given to one ``score`` call.
    """

    name: str = ""
    columns: Sequence[str] = ()
    environments: Sequence[str] = ()
    concurrency: int = 32
    batch: int = 32

    async def start(self) -> None:
        """Acquire what scoring needs; called once before the first request."""

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        """One judgement a turn, in order. A column may be absent where it does not apply to the turn (a query score of an answer)."""
        raise NotImplementedError(f"{type(self).__name__} does not implement score")

    async def close(self) -> None:
        """Release what ``start`` acquired."""


def checked(judge: Judge, turns: list[JudgedTurn], returned: Any) -> tuple[list[Judgement], int]:
    """What ``judge.score`` returned for ``turns``, with unusable scores moved to ``invalid``, and how many were unusable.

    Raises InfrastructureFault when the judge returned no list, another number of judgements, something else in their place, columns
    it did not declare, or scores that are no numbers.
    """
    if not isinstance(returned, list | tuple):
        raise InfrastructureFault(
            f"judge {judge.name} returned {_short(returned)}; expected a list of Judgement, one a turn"
        )
    if len(returned) != len(turns):
        raise InfrastructureFault(f"judge {judge.name} returned {len(returned)} judgements for {len(turns)} turns")
    made, bad = [], 0
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
        numbers = {column: _number(judge, column, value) for column, value in judgement.scores.items()}
        scores = {column: value for column, value in numbers.items() if math.isfinite(value)}
        invalid = sorted({*judgement.invalid, *(set(numbers) - set(scores))})
        bad += len(invalid)
        made.append(Judgement({c: v for c, v in scores.items() if c not in invalid}, invalid, judgement.explanation))
    return made, bad


def _number(judge: Judge, column: str, value: Any) -> float:
    """The score as a float; text is none, also where it reads like one."""
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor of several values
        pass
    raise InfrastructureFault(
        f"judge {judge.name} returned {_short(value)} in column {column!r}; expected a number, or the column in Judgement.invalid"
    )


def _short(value: Any) -> str:
    """A value and its type for a message."""
    return f"{reprlib.repr(value)} ({type(value).__name__})"
