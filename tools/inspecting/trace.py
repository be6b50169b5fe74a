"""What a run's trace says of its newest start: where its wall time went (``shares``).

Every moment has exactly one cause, so the causes' seconds sum to the wall time; docs/report.md
("Who waited for whom") has the rule. Intervals of the learner are counted back from the moment at
which it answered an update's groups. A call's time includes its way to the worker and its wait
there; a call that waits for a free worker is not open yet."""

import contextlib
import heapq
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from coppice.common import shards
from coppice.common.jsonl import MALFORMED
from coppice.common.phases import PREFIX
from coppice.scheduler.dispatch.calls import STARTED
from coppice.tools.inspecting.replay import opened

FILE = "trace.jsonl"
"""The newest calls of a run, beside its journal; retention keeps earlier ones in other files."""
PARTS = ("pack", "check", "score", "forward", "backward", "step", "critic")
"""The phases of an update (``common.phases``). Forwards and backwards take turns; each is drawn
and counted as one."""
PUBLISH, CHECKPOINT = "learner: publishing weights", "learner: checkpoints"
STARTING, SCHEDULER = "starting processes", "scheduler"
WEIGHTS, HELDOUT, OTHERS = "new weights", "held-out evaluation", "other trees"
Span = tuple[str, float, float]
"""A name, its start and its end."""


class TracedCall(msgspec.Struct, frozen=True):
    """An attempt of a call, in seconds. tree: the one that waited for it, or None. phases: its
    parts, if the worker told them. version: of the weights that it sent or made."""

    service: str
    start: float
    end: float
    tree: int | None = None
    phases: tuple[Span, ...] = ()
    version: int = 0


class TracedUpdate(msgspec.Struct, frozen=True):
    """An update of the learner. work: its causes, in order. trees: those that it trained."""

    version: int
    work: list[Span]
    trees: set[int]


class TracedStart(msgspec.Struct, frozen=True):
    """The newest start of a run, in seconds of the monotonic clock. calls: all but those to the
    learner. updates: in order. heldout: trees of evaluations. cut: whether retention has removed
    its first calls, so that it begins with the first one that is left."""

    began: float
    until: float
    calls: list[TracedCall]
    updates: list[TracedUpdate]
    heldout: set[int]
    cut: bool = False


def traced(home: Path) -> Iterator[TracedCall]:
    """Yield the calls of a scheduler's trace, and each of its starts as a call of the service
    ``STARTED``; no line that a crash cut off. Raises OSError."""
    with contextlib.ExitStack() as opened:
        paths = (*sorted(home.glob("trace-??????.jsonl")), home / FILE)
        files = [opened.enter_context(path.open("rb")) for path in paths]
        for line in itertools.chain(*files):
            with contextlib.suppress(*MALFORMED, AttributeError, KeyError, TypeError):
                row = msgspec.json.decode(line.rstrip(b",\n"))
                ts, args = row.get("ts", 0.0), row.get("args", {})
                start, end = round(ts / 1e6, 6), round((ts + row.get("dur", 0.0)) / 1e6, 6)
                waits = re.match(r"tree (\d+)", args.get("for", ""))
                phases = tuple(_consecutive(start, args.get("phases", {}), end))
                told = int(waits[1]) if waits else None, phases, args.get("version", 0)
                yield TracedCall(row["name"], start, end, *told)


def recorded(run: Path, records: Sequence[dict[str, float]]) -> TracedStart:
    """Return what a run has recorded of its newest start. records: its updates' records.

    Raises ValueError if its trace cannot say, and OSError and sqlite3.Error if the trace or the
    journal cannot be read.
    """
    first, *others = shards.homes(run)
    every, began = list[TracedCall](), None
    for call in traced(first):
        if call.service == STARTED:
            every, began = [], call.start
        else:
            every.append(call)
    if cut := began is None:
        if not every:
            raise ValueError(f"{first / FILE} is empty")
        began = min(call.start for call in every)
    every += [call for home in others for call in traced(home) if call.start >= began]
    base, answered = 0, dict[int, float]()  # when each update was
    for call in every:
        if call.service == "load" and not answered:
            # a resumed run first gives the actors its newest weights
            base = max(base, call.version)
        if call.service == "train" and call.version > base:
            # what an earlier start has trained is answered at once
            answered.setdefault(call.version, call.end)
    calls = [call for call in every if call.service not in ("train", "close", STARTED)]
    with opened(run) as journal:
        heldout = {row.id for row in journal.trees("split!='train'")}
        trees: defaultdict[int, set[int]] = defaultdict(set)
        for row in journal.trees("split='train'"):
            for _, version in journal.groups(row.id):
                trees[version or 0].add(row.id)
    updates = []
    for record in records:
        version = int(record["version"])
        if (end := answered.get(version)) is not None:
            lengths = _lengths(record)
            work = list(_consecutive(round(end - sum(lengths.values()), 6), lengths))
            updates.append(TracedUpdate(version, work, trees[version]))
    until = max([began, *(call.end for call in calls), *answered.values()])
    return TracedStart(began, until, calls, updates, heldout, cut)


def _lengths(record: Mapping[str, float]) -> dict[str, float]:
    """The seconds of an update's causes, in the order in which the learner spends them."""
    parts = {part: record[PREFIX + part] for part in PARTS if PREFIX + part in record}
    lengths = {f"learner: {part}": seconds for part, seconds in parts.items()}
    rest = "learner: updates, other work" if parts else "learner: updates"
    lengths[rest] = max(0.0, record.get("learner/seconds", 0.0) - sum(parts.values()))
    lengths[PUBLISH] = record.get("time/publish", 0.0)
    return lengths | {CHECKPOINT: record.get("time/checkpoint", 0.0)}


def _consecutive(
    start: float, lengths: Mapping[str, float], end: float = math.inf
) -> Iterator[Span]:
    """Yield parts one after the other, none of them after ``end``, in microseconds as in the
    trace."""
    for name, seconds in lengths.items():
        after = min(end, round(start + seconds, 6))
        yield name, start, after
        start = after


def shares(run: TracedStart) -> dict[str, float]:
    """Return the seconds of each cause, the largest first; they sum to the start's."""
    seconds: defaultdict[str, float] = defaultdict(float)
    causes = sorted(_causes(run), key=lambda cause: -cause[1])
    edges = {min(max(t, run.began), run.until) for cause in causes for t in cause[1:3]}
    open_: list[tuple[tuple[float, ...], float, str]] = []  # the first rule's cause on top
    for start, end in pairwise(sorted(edges)):
        while causes and causes[-1][1] <= start:
            rule, _, until, name = causes.pop()
            heapq.heappush(open_, (rule, until, name))
        while open_[0][1] <= start:
            heapq.heappop(open_)
        seconds[open_[0][2]] += end - start
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _causes(run: TracedStart) -> Iterator[tuple[tuple[float, ...], float, float, str]]:
    """Yield whatever may be the cause of a moment: its rule, of which the smallest decides, start,
    end, name."""
    of_tree: defaultdict[int | None, list[TracedCall]] = defaultdict(list)
    for call in run.calls:
        of_tree[call.tree].append(call)
        kind = WEIGHTS if call.service == "load" else OTHERS
        kind = HELDOUT if kind == OTHERS and call.tree in run.heldout else kind
        yield (3, (WEIGHTS, HELDOUT, OTHERS).index(kind)), call.start, call.end, kind
    last_end = {tree: max(call.end for call in calls) for tree, calls in of_tree.items()}
    first = min((call.start for call in run.calls), default=run.until)
    yield (0,), run.began, first, STARTING
    yield (4,), run.began, run.until, SCHEDULER
    before = -math.inf
    for place, update in enumerate(run.updates):
        for name, start, end in update.work:
            yield (1, place), start, end, name
        after = update.work[-1][2]
        last = max(update.trees & last_end.keys(), key=lambda tree: last_end[tree], default=-1)
        for call in of_tree.get(last, ()):
            name, whole = f"rollouts: {call.service.partition('.')[0]}", (call.start, call.end)
            phases = [(f"{name} ({phase})", *span) for phase, *span in call.phases]
            for rank, (cause, start, end) in enumerate([*phases, (name, *whole)]):
                yield (2, -call.end, rank), max(start, before), min(end, after), cause
        before = after
