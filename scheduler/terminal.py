"""What the terminal is told beside the live table: faults of services, missing workers, warnings. Each as soon as it matters, none so
often that it hides the table.

Pure but for ``say`` and the injected clock.
"""

import math
import re
import shutil
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

EVERY_S = 60.0
"""Between two lines about one failing service: enough to see that it goes on."""
EVERY_UPDATES = 10
"""Between two lines of a warning that stays."""
_LONGEST = 300
"""Characters of a fault's text that are shown; all of it is in the log."""
_NUMBER = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?")


UNLIMITED = 10_000
"""The width of a file or pipe: nothing is folded or left out there."""


def width() -> int:
    """Columns of the terminal that the launcher prints to (it passes them on as COLUMNS)."""
    return shutil.get_terminal_size((UNLIMITED, 24)).columns


def folded(line: str) -> str:
    """``line``, at most as wide as the terminal."""
    return textwrap.fill(line, width(), subsequent_indent="  ", break_long_words=False)


def say(line: str) -> None:
    """A line on the terminal, at once."""
    print(line, flush=True)


class Faults:
    """Failures by service: the first is told at once, later ones every ``EVERY_S`` seconds at most, with their number."""

    def __init__(self, say: Callable[[str], None] = say, clock: Callable[[], float] = time.monotonic):
        self._say, self._clock = say, clock
        self._said_at: dict[str, float] = {}
        self._untold: Counter[str] = Counter()

    def failed(self, service: str, fault: Exception, caller: str) -> None:
        """``service`` failed at a call of ``caller`` ("tree 7, attempt 1 of 5")."""
        now, before = self._clock(), self._said_at.get(service, -math.inf)
        self._untold[service] += 1
        if now - before < EVERY_S:
            return
        self._said_at[service] = now
        count = self._untold.pop(service)
        often = f", {count} times in the last {now - before:.0f} s" if before > -math.inf else ""
        text = textwrap.shorten(str(fault).removeprefix(f"{service} "), _LONGEST, placeholder=" ...")
        self._say(f"{service} fails{often}: {text} ({caller}; more in logs/scheduler.log)")


class Attendance:
    """Services that the run needs: it is told when the last worker of one goes, and when one is there again.

    needed: the services; empty before the run waits for its workers and once it sends them home.
    """

    def __init__(self, run: Path, say: Callable[[str], None] = say):
        self.run, self._say = run, say
        self.needed: Collection[str] = ()
        self._missing: set[str] = set()

    def left(self, services: Sequence[str], reason: str, offered: Collection[str]) -> None:
        """A worker of ``services`` is gone. offered: the services that those who stay offer."""
        for service in services:
            if service in self.needed and service not in offered and service not in self._missing:
                self._missing.add(service)
                self._say(f"{service}: its last worker left ({reason}); waiting for one{self._remedy(service)}")

    def joined(self, worker: str, services: Sequence[str]) -> None:
        """A worker of ``services`` is ready."""
        for service in self._missing.intersection(services):
            self._missing.discard(service)
            self._say(f"{service}: {worker} is here, going on")

    def _remedy(self, service: str) -> str:
        return f": tools/serve ... --run {self.run}" if service.startswith(("judge.", "player.")) else ""


class Reminders:
    """Warnings of updates: one is told when it is new or was gone before, and while it stays every ``EVERY_UPDATES`` updates.

    Two warnings are of one kind when they differ in their numbers alone.
    """

    def __init__(self) -> None:
        self._said: dict[str, int] = {}

    def due(self, version: int, warnings: Iterable[str]) -> list[str]:
        """Those of update ``version`` that are to be told now."""
        kinds = {_NUMBER.sub("#", warning): warning for warning in warnings}
        self._said = {kind: said for kind, said in self._said.items() if kind in kinds}
        due = [kind for kind in kinds if version - self._said.get(kind, -EVERY_UPDATES) >= EVERY_UPDATES]
        self._said |= dict.fromkeys(due, version)
        return [kinds[kind] for kind in due]
