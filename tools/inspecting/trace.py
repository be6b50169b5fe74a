"""What a run's trace says of its newest start: where its wall time went (``budget``), and the
command coppice report --trace, which writes a window of it for Perfetto (ui.perfetto.dev), in the
JSON of Chrome's trace format.

Every moment has exactly one cause, so the causes' seconds sum to the wall time; docs/report.md
("Who waited for whom") has the rule. Intervals of the learner are counted back from the moment at
which it answered an update's groups. A call's time includes its way to the worker and its wait
there; a call that waits for a free worker is not open yet."""

import argparse
import bisect
import contextlib
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from coppice.common import shards
from coppice.common.atomic import write_whole
from coppice.common.options import command_parser
from coppice.learner.update.stopwatch import PREFIX
from coppice.scheduler.dispatch.calls import STARTED
from coppice.tools.inspecting import runs
from coppice.tools.inspecting.replay import opened

FILE = "trace.jsonl"
"""The calls of a run, beside its journal."""
LEARNER = "learner"
PARTS = ("pack", "check", "score", "forward", "backward", "step", "critic")
"""The phases of an update (``learner.stopwatch``). Forwards and backwards take turns; each is drawn
and counted as one."""
PUBLISH, CHECKPOINT = "learner: publishing weights", "learner: checkpoints"
STARTING, SCHEDULER = "starting processes", "scheduler"
WEIGHTS, HELDOUT, OTHERS = "new weights", "held-out evaluation", "other trees"
Span = tuple[str, float, float]
"""A name, its start and its end."""


class TracedCall(msgspec.Struct, frozen=True):
    """An attempt of a call, in seconds. tree: the one that waited for it, or None. worker: who had
    it. outcome: as in the trace. phases: its parts, if the worker told them. version: of the
    weights that it sent or made."""

    service: str
    start: float
    end: float
    tree: int | None = None
    worker: str = ""
    outcome: str = "ok"
    phases: tuple[Span, ...] = ()
    version: int = 0


def traced(home: Path) -> Iterator[TracedCall]:
    """Yield the calls of a scheduler's trace, and each of its starts as a call of the service
    ``STARTED``; no line that a crash cut off. Raises OSError."""
    with (home / FILE).open("rb") as lines:
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):
                row = msgspec.json.decode(line.rstrip(b",\n"))
                ts, args = row.get("ts", 0.0), row.get("args", {})
                start, end = round(ts / 1e6, 6), round((ts + row.get("dur", 0.0)) / 1e6, 6)
                waits = re.match(r"tree (\d+)", args.get("for", ""))
                tree, outcome = int(waits[1]) if waits else None, args.get("outcome", "ok")
                phases = tuple(_consecutive(start, args.get("phases", {}), end))
                told = (tree, row.get("pid", ""), outcome, phases, args.get("version", 0))
                yield TracedCall(row["name"], start, end, *told)


class TracedUpdate(msgspec.Struct, frozen=True):
    """An update of the learner. work: its causes, in order. trees: those that it trained."""

    version: int
    work: list[Span]
    trees: set[int]


class TracedStart(msgspec.Struct, frozen=True):
    """The newest start of a run, in seconds of the monotonic clock. calls: all but those to the
    learner. heldout: trees of evaluations. streamed: when groups were sent to the learner."""

    began: float
    until: float
    calls: list[TracedCall]
    updates: list[TracedUpdate]
    heldout: set[int]
    streamed: list[float] = []


def recorded(run: Path, records: Sequence[dict[str, float]]) -> TracedStart:
    """Return what a run has recorded of its newest start. records: its updates' records.

    Raises ValueError if its trace cannot say, and OSError and sqlite3.Error if the trace or the
    journal cannot be read.
    """
    began, every = None, []
    first, *others = shards.homes(run)
    for call in traced(first):
        if call.service == STARTED:
            began, every = call.start, []
        every.append(call)
    if began is None:
        raise ValueError("its trace was recorded before calls said whom they serve")
    every += [call for home in others for call in traced(home) if call.start >= began]
    base = 0
    answered: dict[int, float] = {}  # when each update was
    for call in every:
        if call.service == "load" and not answered:
            base = max(
                base, call.version
            )  # a resumed run first gives the actors its newest weights
        if call.service == "train" and call.version > base:
            # what an earlier start has trained is answered at once
            answered.setdefault(call.version, call.end)
    streamed = [call.start for call in every if call.service == "train"]
    calls = [call for call in every if call.service not in ("train", "close", STARTED)]
    with contextlib.closing(opened(run)) as journal:
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
    return TracedStart(began, until, calls, updates, heldout, streamed)


def _lengths(record: Mapping[str, float]) -> dict[str, float]:
    """The seconds of an update's causes, in the order in which the learner spends them."""
    parts = {part: record[PREFIX + part] for part in PARTS if PREFIX + part in record}
    lengths = {f"learner: {part}": seconds for part, seconds in parts.items()}
    rest = "learner: updates, other work" if parts else "learner: updates"
    lengths[rest] = max(0.0, record["learner/seconds"] - sum(parts.values()))
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


# ----------------------------------------------------------------------------------------------
# causes


def budget(run: Path, records: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the seconds of each cause in the newest start of a run, the largest first. Raises as
    ``recorded`` does."""
    start = recorded(run, records)
    return shares(start.calls, start.updates, start.heldout, start.began, start.until)


def shares(
    calls: Sequence[TracedCall],
    updates: Sequence[TracedUpdate],
    heldout: set[int],
    since: float,
    until: float,
) -> dict[str, float]:
    """Return the seconds of each cause between ``since`` and ``until``, which sum to their
    distance. updates: in order. heldout: their trees."""
    newest: dict[int | None, TracedCall] = {}  # of each tree the call that ends last
    for call in calls:
        newest[call.tree] = max(newest.get(call.tree, call), call, key=lambda one: one.end)
    lasts = [
        max((newest[t] for t in u.trees if t in newest), key=lambda c: c.end, default=None)
        for u in updates
    ]
    ends = [update.work[-1][2] for update in updates]
    changes = [(call.start, False, call) for call in calls] + [(c.end, True, c) for c in calls]
    changes.sort(key=lambda change: change[:2])
    spans = [span for update in updates for span in update.work]
    spans += [span for call in calls for span in call.phases]
    edges = sorted({since, until, *(t for t, *_ in changes), *(t for s in spans for t in s[1:])})
    first = min((call.start for call in calls), default=until)
    opened: defaultdict[int | None, list[TracedCall]] = defaultdict(list)
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
        if start < since or end > until:
            continue
        place = bisect.bisect_right(ends, start)
        work = updates[place].work if place < len(updates) else []
        last = lasts[place] if place < len(lasts) else None
        if start < first:
            cause = STARTING
        elif busy := [name for name, a, b in work if a <= start < b]:
            cause = busy[0]
        elif last is not None and opened[last.tree]:
            own = max(opened[last.tree], key=lambda c: c.end)
            phases = [f" ({name})" for name, a, b in own.phases if a <= start < b]
            cause = "".join(["rollouts: ", own.service.partition(".")[0], *phases[:1]])
        else:
            cause = next((kind for kind in (WEIGHTS, HELDOUT, OTHERS) if kinds[kind]), SCHEDULER)
        seconds[cause] += end - start
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


# ----------------------------------------------------------------------------------------------
# the command


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice report --trace."""
    parser = command_parser(
        "coppice report --trace",
        "Write a window of a run as a trace that Perfetto shows.",
        "  coppice report --trace RUN --out trace.json          the newest start of a run\n"
        "  coppice report --trace RUN --from 60 --to 90 --out t.json  half a minute of it\n"
        "then open the file at ui.perfetto.dev; nothing of it leaves your browser",
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run folder, also of a live run")
    since = "seconds since its newest start (default: 0)"
    add("--from", dest="since", type=float, default=0.0, help=since)
    until = "seconds since its newest start (default: its end)"
    add("--to", dest="until", type=float, default=math.inf, metavar="S", help=until)
    out, name = "file to write (default: %(default)s)", Path("trace.json")
    add("--out", type=Path, default=name, metavar="FILE", help=out)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parser().parse_args(arguments)
    try:
        run = recorded(options.run, runs.read(options.run).records)
        events = window(run, run.began + options.since, run.began + options.until)
        if not any(event["ph"] == "X" for event in events):
            between = f"nothing ran between {options.since:g} s and {options.until:g} s"
            raise ValueError(f"{between}; the start lasted {run.until - run.began:.1f} s")
        write_whole(options.out, {"traceEvents": events, "displayTimeUnit": "ms"})
    except runs.UNREADABLE as error:
        print(f"coppice report --trace: {options.run}: {error}", file=sys.stderr)
        return 2
    print(f"trace: {options.out} ({len(events)} events; open it at ui.perfetto.dev)")
    return 0


def window(run: TracedStart, since: float, until: float) -> list[dict[str, Any]]:
    """Return the trace events of what overlaps the time between ``since`` and ``until``, in
    microseconds since the start began."""

    def us(moment: float) -> float:
        return round((moment - run.began) * 1e6, 3)

    slices: list[tuple[str, Span, dict[str, Any], TracedCall | None]] = []
    for c in run.calls:
        args = {"outcome": c.outcome} | ({} if c.tree is None else {"tree": c.tree})
        slices.append((c.worker, (c.service, c.start, c.end), {"args": args}, c))
    for update in run.updates:
        for cause, start, end in update.work:
            if end > start:
                span = (cause.removeprefix("learner: "), start, end)
                slices.append((LEARNER, span, {"args": {"version": update.version}}, None))
    processes = {name: number for number, name in enumerate(sorted({row[0] for row in slices}), 1)}
    lanes: dict[str, list[float]] = {name: [] for name in processes}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": n, "tid": 0, "args": {"name": name}}
        for name, n in processes.items()
    ]
    updates = {tree: update for update in run.updates for tree in update.trees}
    for process, span, args, call in sorted(slices, key=lambda row: row[1][1]):
        name, start, end = span
        if end < since or start > until:
            continue
        ends = lanes[process]
        free = next((lane for lane, lane_end in enumerate(ends) if lane_end <= start), len(ends))
        # the learner's work never overlaps but for the clock's rounding
        free = 0 if process == LEARNER else free
        lanes[process][free : free + 1] = [end]
        place = {"pid": processes[process], "tid": free + 1}
        for part, a, b in (span, *(call.phases if call else ())):
            length = round((b - a) * 1e6, 3)
            events.append({"ph": "X", "name": part, "ts": us(a), "dur": length, **place, **args})
            args = {}  # the phases have none
        if call and name == "generate" and call.tree in updates:
            trained = updates[call.tree].work[0][1]
            if start < trained <= until:
                arrow = {"name": "trained by", "cat": "sampling", "id": len(events)}
                events.append({"ph": "s", "ts": us(start), **arrow, **place})
                end_at = {"ts": us(trained), "pid": processes[LEARNER], "tid": 1}
                events.append({"ph": "f", "bp": "e", **arrow, **end_at})
    mark = {"ph": "i", "s": "t", "name": "stream", "pid": processes.get(LEARNER), "tid": 1}
    streamed = [at for at in run.streamed if LEARNER in processes and since <= at <= until]
    return events + [{**mark, "ts": us(at)} for at in streamed]
