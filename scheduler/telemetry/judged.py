"""Count the valid scores of the judge. An invalid score counts as 0 in a composite reward, so the
user must hear of it."""

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from coppice.wire.messages import Judgement

LEVELS = (0.9, 0.5)
"""The run warns once when the share of valid scores falls below each of these levels."""


class Judged:
    """The tally of one judge: call ``note`` with its judgements, and ``take`` once per update.

    share: the valid share of the ``scores`` before the last update that had any; None before the
    first. judge, run: for the warning.
    """

    def __init__(self, judge: str = "", run: Path = Path("RUN")):
        self.judge, self.run = judge, run
        self.share: float | None = None
        self.scores = 0
        self._scores: Counter[str] = Counter()
        self._invalid: Counter[str] = Counter()
        self._passed = 0

    def note(self, judgements: Sequence[Judgement]) -> tuple[int, int]:
        """Count judgements. Returns the number of their scores, valid or not, and the number of
        invalid ones."""
        invalid = [column for judgement in judgements for column in judgement.invalid]
        scores = [*invalid, *(column for judgement in judgements for column in judgement.scores)]
        self._scores.update(scores)
        self._invalid.update(invalid)
        return len(scores), len(invalid)

    def take(self) -> str:
        """Update ``share`` and restart the tally. Returns a warning if the share fell below a
        further level, else ""."""
        scores, invalid = self._scores, self._invalid
        self._scores, self._invalid = Counter(), Counter()
        if not scores:
            return ""
        self.scores = scores.total()
        self.share = 1 - invalid.total() / self.scores
        passed = sum(self.share < level for level in LEVELS)
        if passed <= self._passed:
            return ""
        self._passed = passed
        columns = ", ".join(
            f"{column} {invalid[column]} of {scores[column]}" for column in sorted(invalid)
        )
        return (
            f"judge {self.judge} gave {invalid.total()} invalid scores of {scores.total()} since the last update ({columns});"
            f" they reward nothing: see the turns with coppice trees {shlex.quote(str(self.run))}, and the judge's log ({self.run / 'logs'}, or the"
            " terminal of coppice serve)"
        )
