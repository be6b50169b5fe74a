"""Where the wall time of a run went: every moment of its newest start has exactly one cause, so the
causes' seconds sum to the wall time.

The rule, for each moment, the first that applies:

1. Before the first call the processes start ("starting processes").
2. While the learner updates, publishes or writes a checkpoint, that is the cause. These intervals
   are counted back from the moment at which it answered the update's groups.
3. Otherwise the learner waits for its next update, and that update waited for its last tree: the
   one whose last call ended last. If the last tree has a call open, the call's service is the cause
   ("rollouts: judge"), with its phase if the worker told it ("rollouts: generate (prefill)"; phases
   are counted from the moment at which the call was sent). If it has several, the one that ends
   last counts, because a tree goes on only when it has all candidates of a turn.
4. If the last tree has no call open, it waited for something else, and a call that another has open
   says for what: new weights on their way to an actor; a held-out evaluation; other trees, which
   had the workers. If none is open, the scheduler or the journal was at work, or the batch was on
   its way to the learner ("scheduler").

After the last update there is no last tree, so only rule 4 applies. A call's time includes its way
to the worker and its wait there; a call that waits for a free worker is not open yet.
"""

import bisect
import contextlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from coppice.common import shards
from coppice.learner.update.stopwatch import PREFIX
from coppice.scheduler.dispatch.calls import STARTED
from coppice.tools.inspecting import frames

PARTS = ("pack", "check", "score", "forward", "backward", "step", "critic")
"""The phases of an update (``learner.stopwatch``). Forwards and backwards take turns; each is drawn
and counted as one."""
PUBLISH, CHECKPOINT = "learner: publishing weights", "learner: checkpoints"
STARTING, SCHEDULER = "starting processes", "scheduler"
WEIGHTS, HELDOUT, OTHERS = "new weights", "held-out evaluation", "other trees"


class Call(msgspec.Struct, frozen=True):
    """An attempt of a call, in seconds. tree: the one that waited for it, or None. worker: who had
    it. outcome: as in the trace. phases: its parts as (name, start, end), if the worker told
    them."""

    service: str
    start: float
    end: float
    tree: int | None = None
    worker: str = ""
    outcome: str = "ok"
    phases: tuple[tuple[str, float, float], ...] = ()

    def name(self, moment: float) -> str:
        """Return what the call did at a moment: its service and, if known, its phase."""
        phases = [f" ({name})" for name, start, end in self.phases if start <= moment < end]
        return self.service.partition(".")[0] + "".join(phases[:1])


class Update(msgspec.Struct, frozen=True):
    """An update of the learner. work: (cause, start, end), in order. trees: those whose groups it
    trained."""

    version: int
    work: list[tuple[str, float, float]]
    trees: set[int]


class Recorded(msgspec.Struct, frozen=True):
    """The newest start of a run, in seconds of the monotonic clock. calls: all but those to the
    learner. heldout: trees of evaluations. streamed: when groups were sent to the learner."""

    began: float
    until: float
    calls: list[Call]
    updates: list[Update]
    heldout: set[int]
    streamed: list[float] = []


def budget(run: Path, records: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the seconds of each cause in the newest start of a run, the largest first. Raises as
    ``recorded`` does."""
    start = recorded(run, records)
    return shares(start.calls, start.updates, start.heldout, start.began, start.until)


def recorded(run: Path, records: Sequence[dict[str, float]]) -> Recorded:
    """Return what a run has recorded of its newest start. records: its updates' records.

    Raises ValueError if its trace cannot say, and OSError and sqlite3.Error if the trace or the
    journal cannot be read.
    """
    start = _newest(run)
    with contextlib.closing(frames.opened(run)) as journal:
        heldout = {row.id for row in journal.trees("split!='train'")}
        trees: defaultdict[int, set[int]] = defaultdict(set)
        for row in journal.trees("split='train'"):
            for _, version in journal.groups(row.id):
                trees[version or 0].add(row.id)
    updates = []
    for record in records:
        version = int(record["version"])
        if (end := start.answered.get(version)) is not None:
            lengths = _lengths(record)
            work = list(_consecutive(round(end - sum(lengths.values()), 6), lengths))
            updates.append(Update(version, work, trees[version]))
    until = max([*(call.end for call in start.calls), *start.answered.values(), start.began])
    return Recorded(start.began, until, start.calls, updates, heldout, start.streamed)


def _lengths(record: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of an update's causes, in the order in which the learner spends them."""
    known = [part for part in PARTS if f"{PREFIX}{part}" in record]
    parts = {f"learner: {part}": record[f"{PREFIX}{part}"] for part in known}
    rest = max(0.0, record["learner/seconds"] - sum(parts.values()))
    parts["learner: updates, other work" if parts else "learner: updates"] = rest
    parts[PUBLISH] = record.get("time/publish", 0.0)
    return parts | {CHECKPOINT: record.get("time/checkpoint", 0.0)}


class _Start(msgspec.Struct):
    """What the trace says of one start. answered: when each of its updates was. streamed: when
    groups were sent to the learner."""

    began: float
    calls: list[Call] = []
    answered: dict[int, float] = {}
    streamed: list[float] = []
    base: int = 0

    def take(self, row: dict[str, Any]) -> None:
        """Note a line of the trace."""
        start, known = round(row["ts"] / 1e6, 6), row.get("args", {})
        end, version = round((row["ts"] + row["dur"]) / 1e6, 6), known.get("version", 0)
        if row["name"] == "load" and not self.answered:
            # a resumed run gives the actors its newest weights first
            self.base = max(self.base, version)
        if row["name"] == "train":
            self.streamed.append(start)
            if version > self.base:  # what an earlier start has trained is answered at once
                self.answered.setdefault(version, end)
        elif row["name"] != "close":
            phases = tuple(_consecutive(start, known.get("phases", {}), end))
            what = (frames.tree_of(known), row["pid"], known["outcome"], phases)
            self.calls.append(Call(row["name"], start, end, *what))


def _newest(run: Path) -> _Start:
    """Return a run's newest start. Raises ValueError if the trace cannot say."""
    newest = None
    first, *others = shards.homes(run)
    for row in frames.traced(first):
        if row["name"] == STARTED:
            newest = _Start(round(row["ts"] / 1e6, 6))
        elif newest is not None:
            newest.take(row)
    if newest is None:
        raise ValueError("its trace was recorded before calls said whom they serve")
    for row in itertools.chain.from_iterable(map(frames.traced, others)):
        if row["name"] != STARTED and row["ts"] >= newest.began * 1e6:
            newest.take(row)
    return newest


def _consecutive(
    start: float, lengths: Mapping[str, float], end: float = math.inf
) -> Iterator[tuple[str, float, float]]:
    """Return parts with their starts and ends, one after the other, none of them after ``end``, in
    microseconds as in the trace."""
    for name, seconds in lengths.items():
        after = min(end, round(start + seconds, 6))
        yield name, start, after
        start = after


def shares(
    calls: Sequence[Call], updates: Sequence[Update], heldout: set[int], since: float, until: float
) -> dict[str, float]:
    """Return the seconds of each cause between ``since`` and ``until``, which sum to their
    distance. updates: in order. heldout: their trees."""
    of_tree: defaultdict[int | None, list[Call]] = defaultdict(list)
    for call in calls:
        of_tree[call.tree].append(call)
    lasts = [
        max((c for t in update.trees for c in of_tree[t]), key=lambda call: call.end, default=None)
        for update in updates
    ]
    ends = [update.work[-1][2] for update in updates]
    works = [part for update in updates for part in update.work]
    changes: list[tuple[float, bool, Call | None]] = [(call.start, False, call) for call in calls]
    changes += [(call.end, True, call) for call in calls]
    changes.sort(key=lambda change: change[:2])
    inside = {t for call in calls for _, *times in call.phases for t in times}
    worked = {t for work in works for t in work[1:]}
    edges = sorted({since, until, *(t for t, _, _ in changes)} | worked | inside)
    first = min((call.start for call in calls), default=until)
    opened: defaultdict[int | None, list[Call]] = defaultdict(list)
    kinds: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    coming = iter([*changes, (math.inf, True, None)])
    moment, ends_now, call = next(coming)
    for start, end in pairwise(edges):
        while call is not None and moment <= start:
            kind = HELDOUT if call.tree in heldout else OTHERS
            kind = WEIGHTS if call.service == "load" else kind
            kinds[kind] += -1 if ends_now else 1
            (opened[call.tree].remove if ends_now else opened[call.tree].append)(call)
            moment, ends_now, call = next(coming)
        place = bisect.bisect_right(ends, start)
        work = updates[place].work if place < len(updates) else []
        last = lasts[place] if place < len(lasts) else None
        own = opened[last.tree] if last is not None else []
        if start < since or end > until:
            continue
        if start < first:
            cause = STARTING
        elif busy := [name for name, a, b in work if a <= start < b]:
            cause = busy[0]
        elif own:
            cause = f"rollouts: {max(own, key=lambda c: c.end).name(start)}"
        else:
            cause = next((kind for kind in (WEIGHTS, HELDOUT, OTHERS) if kinds[kind]), SCHEDULER)
        seconds[cause] += end - start
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
