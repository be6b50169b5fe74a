"""Count the episodes that something other than the policy ended, such as the death of an agent's
process. Each scores 0, so the user must hear of it."""

import shlex
from collections import deque
from collections.abc import Callable
from pathlib import Path

from coppice.scheduler.telemetry import terminal

LEVEL = 0.25
"""The share of crashed episodes, among the last ``WINDOW``, from which the terminal warns."""
FEWEST, WINDOW = 8, 64


class Crashes:
    """The tally of a run's episodes, held-out ones included: ``note`` each one. It warns once in
    each start of the run. run: for the remedy."""

    def __init__(self, run: Path = Path("RUN"), say: Callable[[str], None] = terminal.say):
        self.run, self._say = run, say
        self._last: deque[bool] = deque(maxlen=WINDOW)
        self._warned = False

    def note(self, fault: str) -> None:
        """An episode has ended, by ``fault`` or by its rules ("")."""
        self._last.append(bool(fault))
        crashed, ended = sum(self._last), len(self._last)
        if self._warned or not fault or ended < FEWEST or crashed < LEVEL * ended:
            return
        self._warned = True
        reason = fault.partition("\n")[0]
        self._say(
            f"warning: {crashed} of the last {ended} episodes crashed and score 0, one by {reason}. Mend the agent, or what it needs; its last output"
            f" is at each episode's last action: {remedy(self.run)}"
        )


def remedy(run: Path) -> str:
    """The command that shows why episodes crashed."""
    return f"coppice trees {shlex.quote(str(run))} --where 'crashed_max = 1' --all"
