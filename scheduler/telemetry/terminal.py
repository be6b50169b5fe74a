"""Lines on the terminal beside the live table: faults of services, missing workers, warnings. Each
line comes as soon as it matters, and none comes so often that it hides the table.

The module is pure but for ``say`` and the injected clock.
"""

import math
import re
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

EVERY_S = 60.0
"""Seconds between two lines about one failing service, often enough to show that it still fails."""
EVERY_UPDATES = 10
"""Updates between two lines of a warning that persists."""
_LONGEST = 300
"""The number of characters of a fault's text that are shown; the log has the whole text."""
_NUMBER = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?")

WARNING, NOTICE = "<4>", "<5>"
"""How a line of stdout begins that is a fault or a warning, and one of the end (the levels of
sd-daemon). Other lines have no such beginning, and a record is a line of JSON. The launcher
(tools/launching/screen.py) takes the beginnings away, and chooses what it shows."""


def say(line: str) -> None:
    """Print a line about a fault, or a warning, at once."""
    print(WARNING + line, flush=True)


def conclude(text: str) -> None:
    """Print lines of the run's end at once."""
    print("\n".join(NOTICE + line for line in text.split("\n")), flush=True)


class Faults:
    """Reports failures per service: the first at once, later ones at most every ``EVERY_S``
    seconds, with their number. name: the scheduler's, which its log has."""

    def __init__(
        self,
        name: str,
        say: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.name, self._say, self._clock = name, say, clock
        self._said_at: dict[str, float] = {}
        self._untold: Counter[str] = Counter()

    def failed(self, service: str, fault: Exception, caller: str) -> None:
        """A call of ``service`` by ``caller`` ("tree 7, attempt 1 of 5") failed."""
        now, before = self._clock(), self._said_at.get(service, -math.inf)
        self._untold[service] += 1
        if now - before < EVERY_S:
            return
        self._said_at[service] = now
        count = self._untold.pop(service)
        often = f", {count} times in the last {now - before:.0f} s" if before > -math.inf else ""
        text = textwrap.shorten(
            str(fault).removeprefix(f"{service} "), _LONGEST, placeholder=" ..."
        )
        self._say(f"{service} fails{often}: {text} ({caller}; more in logs/{self.name}.log)")


class Attendance:
    """Reports when the last worker of a needed service leaves, and when the service has a worker
    again.

    needed: the needed services; empty until the run waits for its workers, and again once it has
    dismissed them.
    """

    def __init__(self, run: Path, say: Callable[[str], None] = say):
        self.run, self._say = run, say
        self.needed: Collection[str] = ()
        self._missing: set[str] = set()

    def left(self, services: Sequence[str], reason: str, offered: Collection[str]) -> None:
        """A worker of ``services`` is gone. offered: the services that the remaining workers offer."""
        for service in services:
            if service in self.needed and service not in offered and service not in self._missing:
                self._missing.add(service)
                self._say(
                    f"{service}: its last worker left ({reason}); waiting for one{self._remedy(service)}"
                )

    def joined(self, worker: str, services: Sequence[str]) -> None:
        """A worker of ``services`` is ready."""
        for service in self._missing.intersection(services):
            self._missing.discard(service)
            self._say(f"{service}: {worker} is here, going on")

    def _remedy(self, service: str) -> str:
        return (
            f": coppice serve ... --run {self.run}"
            if service.startswith(("judge.", "player.", "speaker."))
            else ""
        )


class Reminders:
    """Chooses which warnings of updates to print: a new or returning one at once, a persisting one
    every ``EVERY_UPDATES`` updates.

    Two warnings are of the same kind if they differ only in their numbers.
    """

    def __init__(self) -> None:
        self._said: dict[str, int] = {}

    def due(self, version: int, warnings: Iterable[str]) -> list[str]:
        """The warnings of update ``version`` that must be printed now."""
        kinds = {_NUMBER.sub("#", warning): warning for warning in warnings}
        self._said = {kind: said for kind, said in self._said.items() if kind in kinds}
        due = [
            kind
            for kind in kinds
            if version - self._said.get(kind, -EVERY_UPDATES) >= EVERY_UPDATES
        ]
        self._said |= dict.fromkeys(due, version)
        return [kinds[kind] for kind in due]
