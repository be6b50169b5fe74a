"""The judge plug-in: a class with one coroutine. A score that is missing, NaN or infinite is invalid, never silently zero."""

import math
from collections.abc import Sequence

from wire.faults import InfrastructureFault
from wire.messages import JudgedTurn, Judgement


class Judge:
    """Subclass this, set ``name`` and ``columns``, write ``score``; ``tools/serve my_module:MyJudge --run RUN`` plugs it in.

    columns: names of the scores. concurrency: requests in flight at once. batch: most turns given to one ``score`` call.
    """

    name: str = ""
    columns: Sequence[str] = ()
    concurrency: int = 32
    batch: int = 32

    async def start(self) -> None:
        """Acquire what scoring needs; called once before the first request."""

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        """One judgement a turn, in order. A column may be absent where it does not apply to the turn (a query score of an answer)."""
        raise NotImplementedError(f"{type(self).__name__} does not implement score")

    async def close(self) -> None:
        """Release what ``start`` acquired."""


def checked(judge: Judge, turns: list[JudgedTurn], judgements: list[Judgement]) -> tuple[list[Judgement], int]:
    """The judgements with unusable scores moved to ``invalid``, and how many were unusable.

    Raises InfrastructureFault when the judge returned another number of judgements, or columns it did not declare.
    """
    if len(judgements) != len(turns):
        raise InfrastructureFault(f"judge {judge.name} returned {len(judgements)} judgements for {len(turns)} turns")
    made, bad = [], 0
    for judgement in judgements:
        unknown = (set(judgement.scores) | set(judgement.invalid)) - set(judge.columns)
        if unknown:
            raise InfrastructureFault(
                f"judge {judge.name} returned columns {sorted(unknown)}; it declares {list(judge.columns)}"
            )
        scores = {column: float(value) for column, value in judgement.scores.items() if math.isfinite(value)}
        invalid = sorted({*judgement.invalid, *(set(judgement.scores) - set(scores))})
        bad += len(invalid)
        made.append(Judgement({c: v for c, v in scores.items() if c not in invalid}, invalid, judgement.explanation))
    return made, bad
