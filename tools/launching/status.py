"""``coppice watch --status RUN``: what runs, how far it is, what waits for what, what failed last
and what to do. It only reads, so it works on live, stopped and broken runs."""

import argparse
import contextlib
import shlex
import sqlite3
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil

from coppice.common import shards
from coppice.common.jsonl import MALFORMED
from coppice.common.options import command_parser, gave_up
from coppice.scheduler.evaluation.evaluation import HeldOut
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.telemetry import health
from coppice.scheduler.telemetry.health import Health
from coppice.tools.launching import record
from coppice.tools.launching.record import Failure, Record, shown
from coppice.tools.launching.screen import told
from coppice.tools.launching.settings import Config

WIDTH = 80
QUIET_S = 60.0
"""A run without progress, or a worker without a heartbeat, for longer is worth a look at the
stacks."""


class ProcessStatus(msgspec.Struct, frozen=True):
    """A process of the run. age_s, heard_s: seconds since its start and since its last heartbeat.
    mib: its memory (resident)."""

    name: str
    pid: int
    state: str
    restarts: int
    age_s: float | None = None
    mib: float | None = None
    heard_s: float | None = None


class Status(msgspec.Struct):
    """The page. state: running, finished, stopped, failed, killed (without a last word) or unknown.
    damaged: what could not be read. name: that of its config. do: what to do next."""

    run: str
    state: str
    said: str
    name: str = ""
    damaged: list[str] = []
    version: int | None = None
    updates: int | None = None
    phase: str = ""
    paused: str = ""
    idle_s: float | None = None
    trees: dict[str, int] = {}
    heldout: str = ""
    processes: list[ProcessStatus] = []
    waits: list[str] = []
    fault: str = ""
    failure: Failure | None = None
    do: str = ""


def parser() -> argparse.ArgumentParser:
    what = "Explain a live, stopped or broken run on one page."
    examples = "  coppice watch --status runs/NAME-TIME"
    parser = command_parser("coppice watch --status", what, examples)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--json", action="store_true", help="the page as JSON")
    return parser


def main(command: list[str] | None = None) -> int:
    """Run the command. Return its exit status: 2 if the folder is not that of a run."""
    options = parser().parse_args(command)
    run: Path = options.run
    if not (run / "config.json").exists():
        why = "no config.json is there" if run.is_dir() else "it is no folder"
        expected = "expected the folder of a run, runs/NAME-TIME"
        return gave_up(f"coppice watch --status {run}", f"{why}; {expected}")
    status = gather(run.resolve(), time.monotonic())
    print(msgspec.json.encode(status).decode() if options.json else "\n".join(page(status)))
    return 0


def gather(run: Path, now: float) -> Status:
    """Read the status of a run, or of a journal file alone. now: monotonic seconds."""
    if run.is_file():
        said = "without the folder of its run; nothing else is known"
        status = Status(str(shown(run)), "a journal", said)
        _read_journal(run, status)
        return status
    launched, reports = record.read(run), health.read_all(run)
    report = health.joined(reports)
    state, said = _state(run, launched)
    running = state == "running"
    status = Status(str(shown(run)), state, said)
    for name, read in ((record.NAME, launched), (health.NAME, report)):
        if read is None:
            absent = "is not there: this run was not begun by this version"
            damage = "cannot be read" if (run / name).exists() else absent
            status.damaged.append(f"{name} {damage}")
    try:
        # Only the types: names of plug-ins would be imported, which a look at a run must not do.
        config = msgspec.json.decode((run / "config.json").read_bytes(), type=Config)
        status.name, status.updates = config.name, config.scheduler.updates
    except (*MALFORMED, OSError) as error:
        torn = f"config.json is torn or of another version ({error}): restore it, or start anew"
        status.damaged.append(torn)
    for home in shards.homes(run):
        where = "" if home == run else f"shards/{home.name}/"
        _read_journal(home / "journal.sqlite", status, where)
    status.paused = _paused((run / health.PAUSED).exists(), report if running else None)
    if launched is not None:
        host = launched.host if launched.elsewhere else ""
        heard = {worker.pid: worker.heard for worker in report.workers} if report else {}
        heard |= {one.pid: one.at for one in reports}
        silent = {pid: now - at for pid, at in heard.items()} if running else {}
        status.processes = [
            _process(run, name, member, silent.get(member.pid), member.host or host)
            for name, member in launched.members.items()
        ]
        status.failure = launched.failures[-1] if launched.failures else None
    if report is not None:
        status.version, status.phase = report.version if report.began else None, report.phase
        status.fault = ago(time.time() - report.fault[0], report.fault[1]) if report.fault else ""
        alive = {process.pid for process in status.processes}
        newest = health.joined([one for one in reports if one.pid in alive])
        if running and newest is not None:
            status.idle_s, status.waits = now - newest.progress_at, newest.waits()
    status.do = _advice(status, launched)
    return status


def _state(run: Path, launched: Record | None) -> tuple[str, str]:
    if launched is None:
        if (run / "summary.json").exists():
            return "finished", "its summary is in summary.json"
        return "unknown", "no launcher has left a record here"
    if launched.alive:
        resumes = f", resumed {launched.resumes} times" if launched.resumes else ""
        stopping = "; it is stopping" if launched.stopping else ""
        since = f"since {span(time.time() - launched.born)}"
        return "running", f"launcher {launched.pid}, {since}{resumes}{stopping}"
    if launched.elsewhere:
        return "unknown", f"its launcher {launched.pid} is on {launched.host}, which alone sees it"
    if launched.state == "running":
        gone = "is gone without a word (killed, or the machine went down)"
        return "killed", f"its launcher {launched.pid} {gone}"
    return launched.state, "its launcher has ended in order"


def _paused(ordered: bool, report: Health | None) -> str:
    """Say whether the run is paused. ordered: whether the file that orders it is there. report: of
    a running scheduler, which looks for the file at every heartbeat."""
    if report is None:
        return "paused when it ended; a new launch lifts the pause" if ordered else ""
    if ordered != report.paused:
        return f"{'pausing' if ordered else 'resuming'} at the scheduler's next heartbeat"
    return f"paused: no new tree begins, {report.growing} still grow" if ordered else ""


def _read_journal(path: Path, status: Status, where: str = "") -> None:
    if not path.exists():
        absent = "journal.sqlite is not there: no scheduler has begun in this folder"
        status.damaged.append(f"{where}{absent}")
        return
    try:
        with Journal(path, readonly=True) as journal:
            status.trees = dict(Counter(status.trees) + Counter(journal.tally()))
            version, name, result = (journal.evaluations() or [(0, "", {})])[-1]
        if name:
            heldout = msgspec.convert(result, HeldOut)
            keys = [k for k in heldout.measures if k.startswith((heldout.headline, "valid"))]
            measures = ", ".join(f"{key} {heldout.measures[key]}" for key in sorted(keys))
            status.heldout = f"{name} (version {version}): {measures}"
    except (sqlite3.Error, OSError, msgspec.MsgspecError, ValueError) as error:
        unread = f"journal.sqlite cannot be read ({error}): restore it from a copy, or start anew"
        status.damaged.append(f"{where}{unread}")


def _process(
    run: Path, name: str, member: record.Member, heard: float | None, host: str
) -> ProcessStatus:  # fmt: skip
    age = time.time() - member.began
    if host or not member.pid:  # the launcher alone knows of its end
        state = f"on {host}" if host else "no room yet"
        return ProcessStatus(name, member.pid, state, member.restarts, age, None, heard)
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(member.pid)
        # another process may have its number by now
        if any(word.startswith(f"{run}/processes/") for word in process.cmdline()):
            state, mib = process.status(), process.memory_info().rss / 2**20
            return ProcessStatus(name, member.pid, state, member.restarts, age, mib, heard)
    return ProcessStatus(name, member.pid, "ended", member.restarts)


def _advice(status: Status, launched: Record | None) -> str:
    run = shlex.quote(str(status.run))
    again = f"coppice launch --resume {run}"
    lost = [t for t in status.damaged if t.startswith("config") or "journal.sqlite cannot" in t]
    if status.state == "running" and launched is not None:
        hanging = ", ".join(
            p.name
            for p in status.processes
            if p.state == psutil.STATUS_STOPPED or (p.heard_s or 0) > QUIET_S
        )
        if hanging or (status.idle_s or 0) > QUIET_S:
            stacks = f"For all stacks in the logs: kill -QUIT {launched.pid}"
            what = f"{hanging} hangs" if hanging else "nothing moves"
            return f"{what}; the launcher will replace it. {stacks}"
        if status.paused.startswith("paus"):
            key = f"coppice watch {run} and the key r"
            return f"nothing; to go on: {key}, or remove {run}/{health.PAUSED}"
        return f"nothing, the run goes on. Look at a tree: coppice trees {run}"
    if lost:
        return f"mend what is damaged ({lost[0]}); then {again}"
    if launched is not None and launched.elsewhere:
        return f"on {launched.host}: coppice watch --status {run}; if it is gone, {again}"
    if status.state == "finished":
        return f"look at the results: coppice report {run}"
    remedy = launched.remedy if launched is not None and status.state == "failed" else ""
    return remedy or again


def page(status: Status) -> list[str]:
    """The page, in lines of at most 80 columns, except where a path or a word is longer."""
    lines, row = head(status), "  {:<14.13}{:>8}  {:<12}{:>10}{:>9}{:>10}{:>10}"
    if status.processes:
        heads = ("process", "pid", "state", "age", "restarts", "memory", "heard")
        lines += ["what runs", row.format(*heads)]
        lines += [row.format(*cells(process)) for process in status.processes]
    failed = []
    if (f := status.failure) is not None:
        failed.append(f"{ago(time.time() - f.time, f.process)}: {f.cause}; {f.then}")
        failed.append(f"log: {shown(Path(f.log))}")
    failed += [f"a call, {status.fault}"] if status.fault else []
    waits = status.waits or ["nothing: no call is open"]
    parts = {"what waits for what": waits if status.state == "running" else []}
    parts["what failed last"] = failed or ["nothing that is known"]
    parts["what to do"] = [status.do]
    for title, texts in parts.items():
        words = [line for text in texts for line in told(text, WIDTH, "  ")]
        lines += [title, *words] if texts else []
    return lines


def head(status: Status, width: int = WIDTH) -> list[str]:
    """What the run is and how far it is."""
    texts = [f"run {status.run}: {status.state} ({status.said})"]
    texts += [f"damaged: {text}" for text in status.damaged]
    if status.phase:  # a scheduler learns the version from the learner, when that has joined
        of = f" of {status.updates}" if status.updates is not None else ""
        phase = f" ({status.phase})" if status.state != "finished" else ""
        idle = f"; last progress {span(status.idle_s)} ago" if status.idle_s is not None else ""
        reached = f"update {status.version}{of}{phase}"
        texts += [f"{status.phase if status.version is None else reached}{idle}"]
    texts += [status.paused]
    if status.trees:
        counts = (f"{count} {name}" for name, count in sorted(status.trees.items()))
        texts += [f"tasks: {', '.join(counts)}"]
    texts += [f"held out last: {status.heldout or 'not yet'}"]
    return [line for text in texts for line in told(text, width)]


def cells(process: ProcessStatus) -> tuple[str, ...]:
    """Name, number, state, age, restarts, memory and time since the last heartbeat; "-" where
    unknown."""
    memory = f"{process.mib:.0f} MiB" if process.mib is not None else "-"
    age, restarts, heard = span(process.age_s), str(process.restarts), span(process.heard_s)
    return process.name, str(process.pid), process.state, age, restarts, memory, heard


def span(seconds: float | None) -> str:
    """A duration in at most seven characters, "-" if it is unknown."""
    if seconds is None:
        return "-"
    for limit, divisor, unit in ((100, 1, "s"), (6000, 60, "min"), (1e6, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def ago(seconds: float, what: str) -> str:
    """When something happened, and what."""
    at = datetime.fromtimestamp(time.time() - seconds, UTC).astimezone()
    return f"{at:%Y-%m-%d %H:%M:%S} ({span(seconds)} ago) {what}"
