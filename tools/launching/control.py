"""Orders to a run on this machine: pause, resume, drain a worker, stop. Each returns in words what
happens next, and raises ValueError with what to do instead, or OSError."""

import os
import signal
from itertools import chain
from pathlib import Path

from coppice.scheduler.telemetry import health
from coppice.tools.launching import record
from coppice.tools.launching.children import LEFT_S
from coppice.tools.launching.record import resume_command, shown
from coppice.tools.launching.supervisor import DRAIN
from coppice.tools.launching.watchdog import SCHEDULER


def pause(run: Path) -> str:
    """Have the scheduler admit no new tree. The order is a file, so it outlives this process and a
    scheduler that is started again."""
    _running(run)
    (run / health.PAUSED).touch()
    finish = "trees in flight finish, and so does an evaluation that is due"
    return f"pausing at the scheduler's next heartbeat; {finish}"


def resume(run: Path) -> str:
    (run / health.PAUSED).unlink(missing_ok=True)
    return "resuming at the scheduler's next heartbeat"


def draining(run: Path, name: str) -> str:
    """Say what it means to drain the worker ``name``."""
    _worker(run, name)
    alone: list[str] = []
    for report in health.read_all(run):
        offers = {one.name: one.services for one in report.workers if one.state == "here"}
        own = offers.pop(name, [])
        alone += [service for service in own if service not in {*chain(*offers.values())}]
    lacking = f" No other worker offers {', '.join(alone)}: the run waits for it until then."
    fresh = f"the launcher starts a fresh one about {LEFT_S:.0f} s later."
    return f"It finishes its calls and leaves; {fresh}{lacking if alone else ''}"


def drain(run: Path, name: str) -> str:
    """Have the launcher ask a worker, wherever it runs, to finish its calls and leave. ``LEFT_S``
    later it starts a fresh one."""
    _worker(run, name)
    (run / DRAIN).mkdir(exist_ok=True)
    (run / DRAIN / name).touch()
    return f"{name} finishes its calls and leaves"


def _worker(run: Path, name: str) -> None:
    member = _running(run).members.get(name)
    why = ""
    if member is None:
        why = "was not started by coppice launch: end it where it was started, with Ctrl-C"
    elif name.startswith((SCHEDULER, "learner")):
        why = "cannot be drained, because nothing goes on without it: stop the run instead"
    elif not member.pid:
        why = "waits for a node with room, so there is nothing to drain: wait until it runs"
    if why:
        raise ValueError(f"{name} {why}")


def stop(run: Path) -> str:
    launched = _running(run)
    if launched.stopping:
        raise ValueError(
            f"the run is stopping already; a second request would kill it: kill {launched.pid}"
        )
    os.kill(launched.pid, signal.SIGTERM)
    return (
        "stopping: the learner writes a checkpoint and every process ends;"
        f" go on with {resume_command(run)}"
    )


def _running(run: Path) -> record.Record:
    launched = record.read(run)
    if launched is None or not launched.alive:
        raise ValueError(
            f"{shown(run)} does not run on this machine,"
            " so there is nothing to pause, drain or stop"
        )
    return launched
