"""How many of the judge's scores could be used: an invalid one is no score, and 0 in a composite reward, so it must not go unseen."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from wire.messages import Judgement

LEVELS = (0.9, 0.5)
"""Shares of valid scores below which the run warns, each once."""


class Judged:
    """The tally of one judge. ``note`` what it gave; ``take`` once an update.

    share: of its scores between the last two updates with any, how many were valid; None before the first. judge, run: for the warning.
    """

    def __init__(self, judge: str = "", run: Path = Path("RUN")):
        self.judge, self.run = judge, run
        self.share: float | None = None
        self._given: Counter[str] = Counter()
        self._invalid: Counter[str] = Counter()
        self._passed = 0

    def note(self, judgements: Sequence[Judgement]) -> tuple[int, int]:
        """Count; returns how many scores the judgements hold, valid or not, and how many of them are invalid."""
        given = Counter(column for judgement in judgements for column in (*judgement.scores, *judgement.invalid))
        invalid = Counter(column for judgement in judgements for column in judgement.invalid)
        self._given += given
        self._invalid += invalid
        return given.total(), invalid.total()

    def take(self) -> str:
        """Update ``share`` and begin anew; the warning when it fell below the next of ``LEVELS``, else ""."""
        given, invalid = self._given, self._invalid
        self._given, self._invalid = Counter(), Counter()
        if not given:
            return ""
        self.share = 1 - invalid.total() / given.total()
        passed = sum(self.share < level for level in LEVELS)
        if passed <= self._passed:
            return ""
        self._passed = passed
        columns = ", ".join(f"{column} {invalid[column]} of {given[column]}" for column in sorted(invalid))
        return (
            f"judge {self.judge} gave {invalid.total()} invalid scores of {given.total()} since the last update ({columns});"
            f" they reward nothing: see the turns with tools/dump {self.run}, and the judge's log ({self.run / 'logs'}, or the"
            " terminal of tools/serve)"
        )
