"""Runs a plan to its end, and resumes the run after a death where that helps
(tools/launching/failures.py)."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from coppice.scheduler.telemetry import health
from coppice.tools.launching import record
from coppice.tools.launching.failures import Resumes, remedy
from coppice.tools.launching.nodes import Nodes
from coppice.tools.launching.processes import Process
from coppice.tools.launching.record import Recorder, resume_command, shown
from coppice.tools.launching.screen import RunScreen
from coppice.tools.launching.supervisor import INTERRUPTED, Signals, Supervisor


def supervise(
    run: Path, make: Callable[[], list[Process]], screen: RunScreen, nodes: Nodes | None = None
) -> int:
    """Run the plan that ``make`` returns to its end, resuming the run where that helps. nodes: of a
    cluster. Return the exit status. Raises OSError."""
    signals, recorder = Signals(), Recorder(run)
    signals.listen()
    resumes, again = Resumes(_checkpoint(run), _done(run)), resume_command(run)
    while not signals.interrupted.is_set():
        supervisor = Supervisor(run, make(), signals, recorder, screen, nodes)
        ended = supervisor.watch()
        if ended == 0:
            recorder.end("finished")
            return 0
        if isinstance(ended, int):
            break
        cause, full = ended.cause(), record.full(run)
        pause = None
        if (ended.spec.vital or ended.spec.name in supervisor.schedulers) and not full:
            pause = resumes.pause(time.monotonic(), cause, _checkpoint(run), _done(run))
        if pause is None:
            advice = record.no_space(run) if full or cause.full_disk else remedy(cause, again)
            recorder.failed(ended.spec.name, cause.text, ended.log, "the run ended")
            recorder.end("failed", advice)
            screen.say(
                f"\n{ended.spec.name} failed: {cause.text}\nremedy: {advice}\nlog: {shown(ended.log)}"
            )
            return 1
        recorder.record.resumes += 1
        supervisor.announce(ended, cause, f"resuming the run in {pause:.0f} s")
        signals.interrupted.wait(pause)
        # the summary counts from this start
        os.environ["COPPICE_STARTED"] = f"{os.getpid()} {time.monotonic()}"
    recorder.end("stopped", again)
    screen.say(f"stopped; go on with: {again}", "summary")
    return INTERRUPTED


def _done(run: Path) -> int:
    """Return the trees and evaluations that the scheduler last reported as done."""
    report = health.read(run)
    return report.progress() if report is not None else 0


def _checkpoint(run: Path) -> str:
    """Return the name of the newest checkpoint, or "" if there is none."""
    return max(
        (path.parent.name for path in (run / "checkpoints").glob("v??????/state.json")), default=""
    )
