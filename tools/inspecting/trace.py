"""The command coppice report --trace: a window of a run for Perfetto (ui.perfetto.dev), in the JSON of
Chrome's trace format.

Each process is a row with as many lanes as it had calls at once; in a call stand its phases (queue,
prefill, decode), if the worker told them. The learner's row has its updates with their phases, and
a mark (stream) for each group that was sent to it. An arrow leads from every call that sampled for
a tree to the update that trained the tree.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from coppice.common.atomic import write_whole
from coppice.common.options import command_parser
from coppice.tools.inspecting import runs
from coppice.tools.inspecting.critical import Call, Recorded, recorded

EXAMPLES = """\
  coppice report --trace RUN --out trace.json          the newest start of a run
  coppice report --trace RUN --from 60 --to 90 --out t.json  half a minute of it
then open the file at ui.perfetto.dev; nothing of it leaves your browser"""
LEARNER = "learner"


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice report --trace."""
    parser = command_parser(
        "coppice report --trace",
        "Write a window of a run as a trace that Perfetto shows.",
        EXAMPLES,
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="run folder, also of a live run")
    since = "seconds since its newest start (default: 0)"
    add("--from", dest="since", type=float, default=0.0, help=since)
    until, end = "seconds since its newest start (default: its end)", float("inf")
    add("--to", dest="until", type=float, default=end, metavar="S", help=until)
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


def window(run: Recorded, since: float, until: float) -> list[dict[str, Any]]:
    """Return the trace events of what overlaps the time between ``since`` and ``until``, in
    microseconds since the start began."""
    slices: list[tuple[str, str, float, float, dict[str, Any], Any]] = []
    for c in run.calls:
        known = {"outcome": c.outcome} | ({} if c.tree is None else {"tree": c.tree})
        slices.append((c.worker, c.service, c.start, c.end, known, c))
    for update in run.updates:
        for cause, start, end in update.work:
            if end > start:
                name, known = cause.removeprefix("learner: "), {"version": update.version}
                slices.append((LEARNER, name, start, end, known, update))
    processes = {name: number for number, name in enumerate(sorted({row[0] for row in slices}), 1)}
    lanes: dict[str, list[float]] = {name: [] for name in processes}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": n, "tid": 0, "args": {"name": name}}
        for name, n in processes.items()
    ]
    updates = {tree: update for update in run.updates for tree in update.trees}
    for process, name, start, end, known, what in sorted(slices, key=lambda row: row[2]):
        if end < since or start > until:
            continue
        ends = lanes[process]
        free = next((lane for lane, lane_end in enumerate(ends) if lane_end <= start), len(ends))
        # its work never overlaps but for the clock's rounding
        free = 0 if process == LEARNER else free
        lanes[process][free : free + 1] = [end]
        place = {"pid": processes[process], "tid": free + 1}
        parts = [(name, start, end), *getattr(what, "phases", ())]
        shown = [
            {"ph": "X", "name": part, "ts": _us(a, run), "dur": round((b - a) * 1e6, 3), **place}
            for part, a, b in parts
        ]
        shown[0]["args"] = known
        events += shown
        if isinstance(what, Call) and name == "generate" and what.tree in updates:
            trained = updates[what.tree].work[0][1]
            if start < trained <= until:
                arrow = {"name": "trained by", "cat": "sampling", "id": len(events)}
                events.append({"ph": "s", "ts": _us(start, run), **arrow, **place})
                end_at = {"ts": _us(trained, run), "pid": processes[LEARNER], "tid": 1}
                events.append({"ph": "f", "bp": "e", **arrow, **end_at})
    mark = {"ph": "i", "s": "t", "name": "stream", "pid": processes.get(LEARNER), "tid": 1}
    streamed = [at for at in run.streamed if LEARNER in processes and since <= at <= until]
    return events + [{**mark, "ts": _us(at, run)} for at in streamed]


def _us(moment: float, run: Recorded) -> float:
    return round((moment - run.began) * 1e6, 3)
