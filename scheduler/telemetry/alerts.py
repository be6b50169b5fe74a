"""What a user must hear of during a run: each line as soon as it matters, and none so often that it
hides the table.

A line of stdout that is a fault or a warning begins with WARNING, and one of the run's end with
NOTICE (the levels of sd-daemon); others have no such beginning. The launcher
(tools/launching/screen.py) takes the beginnings away, and chooses what it shows.
"""

import math
import re
import shlex
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from coppice.wire.messages import Judgement

WARNING, NOTICE = "<4>", "<5>"
EVERY_S = 60.0
"""Seconds between two lines about one failing service, often enough to show that it still fails."""
EVERY_UPDATES = 10
"""Updates between two lines of a warning that persists."""
LEVEL = 0.9
"""The run warns while the share of valid scores is below this."""
UPDATES = 3
"""The updates in a row after which a condition is told that may be chance in one update."""
LOWERED = 0.1
"""The run warns while more of the turns are in states where every sampled action is made rarer."""
_LONGEST = 300
"""The number of characters of a fault's text that are shown; the log has the whole text."""
_NUMBER = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?")


def say(line: str) -> None:
    """Print a line about a fault, or a warning, at once."""
    print(WARNING + line, flush=True)


def conclude(text: str) -> None:
    """Print lines of the run's end at once."""
    print("\n".join(NOTICE + line for line in text.split("\n")), flush=True)


class Faults:
    """Reports failures per service: the first at once, then one line per ``EVERY_S``."""

    def __init__(
        self, name: str, say: Callable[[str], None] = say,
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self.name, self._say, self._clock = name, say, clock
        self._said_at: dict[str, float] = {}
        self._untold: Counter[str] = Counter()

    def failed(self, service: str, fault: Exception | str, caller: str) -> None:
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
        """A worker of ``services`` is gone. offered: the services of the remaining workers."""
        for service in sorted({*services} & {*self.needed} - {*offered} - self._missing):
            self._missing.add(service)
            served = service.startswith(("judge.", "player.", "speaker."))
            remedy = f": coppice serve ... --run {shlex.quote(str(self.run))}" if served else ""
            self._say(f"{service}: its last worker left ({reason}); waiting for one{remedy}")

    def joined(self, worker: str, services: Sequence[str]) -> None:
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
        self._scores, self._invalid = Counter[str](), Counter[str]()

    def note(self, judgements: Sequence[Judgement]) -> tuple[int, int]:
        """Count judgements. Returns the number of their scores and of the invalid ones."""
        invalid = [column for judgement in judgements for column in judgement.invalid]
        scores = [*invalid, *(column for judgement in judgements for column in judgement.scores)]
        self._scores.update(scores)
        self._invalid.update(invalid)
        return len(scores), len(invalid)

    def take(self) -> list[str]:
        """Restart the tally. Returns a warning if the share is below ``LEVEL``."""
        scores, invalid = self._scores, self._invalid
        self._scores, self._invalid = Counter(), Counter()
        if not scores:
            return []
        self.scores = scores.total()
        self.share = 1 - invalid.total() / self.scores
        columns = ", ".join(f"{name} {invalid[name]} of {scores[name]}" for name in sorted(invalid))
        return [
            f"judge {self.judge} gave {invalid.total()} invalid scores of {scores.total()}"
            f" ({columns}) since the last update; they reward nothing: see the turns with"
            f" coppice trees {shlex.quote(str(self.run))}, and the judge's log in {self.run}/logs"
        ] * (self.share < LEVEL)


class Fruitless:
    """Counts the updates in a row in which each condition holds, and tells it with the remedy.
    column: what the scheme reads. unsupported: the judge reads evidence that no task has."""

    def __init__(self, column: str, unsupported: bool = False):
        self._column, self._unsupported = column, unsupported
        self._held: Counter[str] = Counter()

    def note(self, record: Mapping[str, float]) -> list[str]:
        """Return the warnings that hold after one more update."""
        value = record.get
        left_out = value("learner/left_out_trajectories", 0) > 0 and not value("learner/turns")
        rules = [
            (left_out, 1, _LEFT_OUT),
            (self._unsupported, 1, _UNSUPPORTED),
            (round(value("score/valid", 1.0), 2) == 0, UPDATES, _INVALID),
            (value("learner/lowered_states_share", 0.0) > LOWERED, UPDATES, _LOWERED),
            (value("learner/zero_advantage_share", 0.0) == 1, UPDATES, _EQUAL),
        ]
        self._held = Counter({said: self._held[said] + 1 for holds, _, said in rules if holds})
        due = [said for _, after, said in rules if self._held[said] >= after]
        return [said.format(column=repr(self._column)) for said in due]


_LEFT_OUT = (
    "nothing is learnt: the scheme left out every trajectory, because turns lack the column that"
    " it reads ({column}). See with coppice trees which columns the last turns have, and set"
    " learner.scheme_options to one of them"
)
_UNSUPPORTED = (
    "the judge of queries reads supporting passages and no task has any (the field evidence), so"
    " every new query scores 0: give the tasks evidence, or set judges.use.slate_rules.query ="
    " 'format'"
)
_INVALID = (
    f"no action was valid in the last {UPDATES} updates: the policy does not write the"
    " environment's notation. Look at its actions with coppice trees, and begin with a warm start"
    " (warm_start.steps), or with a model that was fine-tuned to it (coppice sft)"
)
_LOWERED = (
    "every action that was sampled in some states has a negative advantage, so unreadable text"
    " gains: set learner.kl_coef, or compare actions of one state (method = 'vpr-v2')"
)
_EQUAL = (
    f"nothing is learnt: every advantage was 0 in the last {UPDATES} updates, because the compared"
    " trajectories earned the same ({column}). Choose harder or easier tasks, more candidates or"
    " a higher scheduler.temperature, or set scheduler.dynamic_sampling_budget"
)
