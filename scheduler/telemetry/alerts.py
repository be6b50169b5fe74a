"""What a user must hear of during a run: each line as soon as it matters, and none so often that it
hides the table. Pure but for ``say`` and the injected clock."""

import math
import re
import shlex
import textwrap
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from coppice.scheduler.telemetry.terminal import say
from coppice.wire.messages import Judgement

EVERY_S = 60.0
"""Seconds between two lines about one failing service, often enough to show that it still fails."""
EVERY_UPDATES = 10
"""Updates between two lines of a warning that persists."""
LEVELS = (0.9, 0.5)
"""The run warns once when the share of valid scores falls below each of these levels."""
CRASHED = 0.25
"""The share of crashed episodes, among the last ``WINDOW``, from which the terminal warns."""
FEWEST, WINDOW = 8, 64
UPDATES = 3
"""The updates in a row after which a condition is told that may be chance in one update."""
NO_EVIDENCE = "tasks/without_evidence"
"""Not a metric, but a value that ``Fruitless`` adds to each record."""
_LONGEST = 300
"""The number of characters of a fault's text that are shown; the log has the whole text."""
_NUMBER = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?")


class Faults:
    """Reports failures per service: the first at once, then one per ``EVERY_S`` with their number."""

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
        text = str(fault).removeprefix(f"{service} ")
        text = textwrap.shorten(text, _LONGEST, placeholder=" ...")
        self._say(f"{service} fails{often}: {text} ({caller}; more in logs/{self.name}.log)")


class Attendance:
    """Tells when a needed service loses its last worker, and when it has one again."""

    def __init__(self, run: Path, say: Callable[[str], None] = say):
        self.run, self._say = run, say
        self.needed: Collection[str] = ()
        self._missing: set[str] = set()

    def left(self, services: Sequence[str], reason: str, offered: Collection[str]) -> None:
        """A worker of ``services`` is gone. offered: the services that the remaining workers offer."""
        for service in services:
            if service in self.needed and service not in offered and service not in self._missing:
                self._missing.add(service)
                served = service.startswith(("judge.", "player.", "speaker."))
                remedy = f": coppice serve ... --run {self.run}" if served else ""
                self._say(f"{service}: its last worker left ({reason}); waiting for one{remedy}")

    def joined(self, worker: str, services: Sequence[str]) -> None:
        """A worker of ``services`` is ready."""
        for service in self._missing.intersection(services):
            self._missing.discard(service)
            self._say(f"{service}: {worker} is here, going on")


class Reminders:
    """Chooses warnings to print: new or returning ones at once, others every ``EVERY_UPDATES``."""

    def __init__(self) -> None:
        self._said: dict[str, int] = {}

    def due(self, version: int, warnings: Iterable[str]) -> list[str]:
        """The warnings of update ``version`` that must be printed now."""
        kinds = {_NUMBER.sub("#", warning): warning for warning in warnings}
        said = {kind: self._said.get(kind, -EVERY_UPDATES) for kind in kinds}
        due = [kind for kind in kinds if version - said[kind] >= EVERY_UPDATES]
        self._said = said | dict.fromkeys(due, version)
        return [kinds[kind] for kind in due]


class JudgeTally:
    """The valid scores of one judge: ``note`` its judgements, ``take`` once per update. share: the
    valid share of the ``scores`` before the last update that had any; None before the first."""

    def __init__(self, judge: str = "", run: Path = Path("RUN")):
        self.judge, self.run = judge, run
        self.share: float | None = None
        self.scores = 0
        self._scores: Counter[str] = Counter()
        self._invalid: Counter[str] = Counter()
        self._passed = 0

    def note(self, judgements: Sequence[Judgement]) -> tuple[int, int]:
        """Count judgements. Returns the number of their scores and of the invalid ones."""
        invalid = [column for judgement in judgements for column in judgement.invalid]
        scores = [*invalid, *(column for judgement in judgements for column in judgement.scores)]
        self._scores.update(scores)
        self._invalid.update(invalid)
        return len(scores), len(invalid)

    def take(self) -> str:
        """Restart the tally. Returns a warning if the share fell below a further level, or ""."""
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
        columns = ", ".join(f"{name} {invalid[name]} of {scores[name]}" for name in sorted(invalid))
        return (
            f"judge {self.judge} gave {invalid.total()} invalid scores of {scores.total()} since the last update ({columns});"
            f" they reward nothing: see the turns with coppice trees {shlex.quote(str(self.run))}, and the judge's log ({self.run / 'logs'}, or the"
            " terminal of coppice serve)"
        )


class EpisodeCrashes:
    """Warns once of many episodes that crashed, as by the death of an agent's process."""

    def __init__(self, run: Path = Path("RUN"), say: Callable[[str], None] = say):
        self.run, self._say = run, say
        self._last: deque[bool] = deque(maxlen=WINDOW)
        self._warned = False

    def note(self, fault: str) -> None:
        """An episode has ended, by ``fault`` or by its rules ("")."""
        self._last.append(bool(fault))
        crashed, ended = sum(self._last), len(self._last)
        if self._warned or not fault or ended < FEWEST or crashed < CRASHED * ended:
            return
        self._warned = True
        reason = fault.partition("\n")[0]
        self._say(
            f"warning: {crashed} of the last {ended} episodes crashed and score 0, one by {reason}. Mend the agent, or what it needs; its last output"
            f" is at each episode's last action: {crash_remedy(self.run)}"
        )


def crash_remedy(run: Path) -> str:
    """The command that shows why episodes crashed."""
    return f"coppice trees {shlex.quote(str(run))} --where 'crashed_max = 1' --all"


class Condition(msgspec.Struct, frozen=True):
    """holds: whether a record shows it. after: told after so many in a row. said: with {column}."""

    holds: Callable[[Mapping[str, float]], bool]
    after: int
    said: str


CONDITIONS = (
    Condition(
        lambda record: (
            record.get("learner/left_out_trajectories", 0) > 0 and not record.get("learner/turns")
        ),
        1,
        "nothing is learnt: the scheme left out every trajectory, because the column that it reads ({column!r}) is missing on"
        " turns of each. See with coppice trees which columns the last turns have, and set learner.scheme_options to one of them",
    ),
    Condition(
        lambda record: bool(record.get(NO_EVIDENCE)),
        1,
        "the judge of queries reads supporting passages and no task has any (the field evidence), so every new query scores 0: give"
        " the tasks evidence, or set judges.use.slate_rules.query = 'format'",
    ),
    Condition(
        lambda record: record.get("score/valid", 1.0) == 0,
        UPDATES,
        f"no action was valid in the last {UPDATES} updates: the policy does not write the environment's notation. Look at its"
        " actions with coppice trees, and begin with a model that was fine-tuned to it (coppice sft)",
    ),
    Condition(
        lambda record: record.get("learner/zero_advantage_share", 0.0) == 1,
        UPDATES,
        f"nothing is learnt: every advantage was 0 in the last {UPDATES} updates, because the trajectories that are compared"
        " earned the same ({column!r}). Choose harder or easier tasks, more candidates or a higher scheduler.temperature, or set"
        " scheduler.dynamic_sampling_budget",
    ),
)


class Fruitless:
    """Counts the updates in a row in which each condition holds, and tells it with the remedy."""

    def __init__(self, column: str, unsupported: bool = False):
        self._column, self._constant = column, {NO_EVIDENCE: float(unsupported)}
        self._held = [0] * len(CONDITIONS)

    def note(self, record: Mapping[str, float]) -> list[str]:
        """Return the warnings that hold after one more update."""
        record = {**record, **self._constant}
        warnings = []
        for i, condition in enumerate(CONDITIONS):
            self._held[i] = self._held[i] + 1 if condition.holds(record) else 0
            if self._held[i] >= condition.after:
                warnings.append(condition.said.format(column=self._column))
        return warnings
