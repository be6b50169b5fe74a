"""Runs the processes of a plan, with logs, restarts and an orderly end. No process outlives the
launcher.

A worker that dies is started again. When a vital process (the first scheduler, a learner rank)
dies, all are stopped and started anew from journal and checkpoint, as by ``--resume``. A process
that hangs (watchdog.py) is diagnosed, killed, and then treated like one that died. A process that
dies too often, or of an error that would repeat (failures.py), ends the run.
"""

import faulthandler
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from coppice.common import shards
from coppice.scheduler.telemetry import health
from coppice.tools.launching import record, watchdog
from coppice.tools.launching.children import GRACE_S, Child, mapped_segments, sweep_segments
from coppice.tools.launching.failures import Cause, Resumes, remedy
from coppice.tools.launching.nodes import Away, Nodes
from coppice.tools.launching.processes import PlannedProcess
from coppice.tools.launching.record import Recorder, resume_command, shown
from coppice.tools.launching.screen import RunScreen
from coppice.tools.launching.watchdog import SCHEDULER, Watchdog


class Signals:
    """What the user's signals ask for. interrupted: to stop in order (Ctrl-C, SIGTERM, a closed
    terminal). stacks: to write the stacks of all processes to their logs (Ctrl-\\)."""

    def __init__(self) -> None:
        self.interrupted, self.stacks = threading.Event(), threading.Event()

    def listen(self) -> None:
        """Take the signals of this process. SIGHUP stays ignored where it is, as ``nohup`` wants
        it."""
        ends = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self.interrupted)
        for number, event in {**ends, signal.SIGQUIT: self.stacks}.items():
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_, event=event: event.set())


SETTLE_S = 3.0
"""Seconds to wait after a rank's death for the ranks that it takes along, so that the first rank's
cause is reported and not theirs."""
LOOK_S = 1.0
"""Seconds between two looks for processes that hang, and for orders."""
DRAIN = "drain"
"""A file in this folder of the run has the name of a worker that shall finish its calls and leave
(tools/launching/control.py)."""
NOTE_S = 30.0
"""Seconds between two looks at the shared memory of the processes, which a process that is killed
may leave behind."""
CHECKPOINT_S = 1800.0
"""Seconds that an end in order waits for the learner's update and its checkpoint."""
INTERRUPTED = 130


class Supervisor:
    """Owns the child processes of one start of a run; a resumed run gets a new Supervisor.

    Life cycle, all inside ``watch``: start every process, restart workers that die or hang, stop
    every process.
    """

    def __init__(
        self, run: Path, plan: list[PlannedProcess], signals: Signals, recorder: Recorder,
        screen: RunScreen, nodes: Nodes | None = None,
    ):  # fmt: skip
        self.run, self.plan, self.signals = run, plan, signals
        self.recorder, self.screen, self.nodes = recorder, screen, nodes
        self.children: dict[str, Child] = {}
        self.schedulers = [spec.name for spec in plan if spec.name.startswith(SCHEDULER)]
        self.homes = [shards.folder(run, number) for number in range(len(self.schedulers))]
        self.watchdogs = list(map(Watchdog, self.homes, self.schedulers))
        self._look_at = self._note_at = 0.0
        self._segments: set[str] = set()
        self._relays: list[threading.Thread] = []

    def start(self) -> Child | None:
        """Start the schedulers, wait for their endpoints, then start the other processes. Return
        the scheduler that died before. Raises OSError."""
        endpoints = [home / "endpoint" for home in self.homes]
        for endpoint in endpoints:
            endpoint.unlink(missing_ok=True)
        (self.run / "logs").mkdir(exist_ok=True)
        # orders to the workers of an earlier start
        shutil.rmtree(self.run / DRAIN, ignore_errors=True)
        scheduler = self._hire(self.plan[0])
        children = [scheduler, *map(self._hire, self.plan[1 : len(self.schedulers)])]
        interrupted = self.signals.interrupted
        while not all(endpoint.exists() for endpoint in endpoints) and not interrupted.is_set():
            if ended := [child for child in children if child.process.poll() is not None]:
                return ended[0] if ended[0].process.poll() not in (0, INTERRUPTED) else None
            self._look(time.monotonic())
            time.sleep(0.05)
        # On a cluster the ranks come first: they must be near each other, and the others would take
        # their room.
        rest = self.plan[len(self.schedulers) :]
        for spec in sorted(rest, key=lambda spec: not spec.vital) if self.nodes else rest:
            if scheduler.process.poll() is None and not interrupted.is_set():
                self._hire(spec)
        return None

    def _hire(self, spec: PlannedProcess) -> Child:
        if (child := self.children.get(name := spec.name)) is None:
            child = self.children[name] = Child(spec, self.run, self.nodes)
        else:
            child.start()
        self.recorder.started(name, child.process.pid)
        if name in self.schedulers and child.process.stdout is not None:
            copy = (self.run / "logs" / "scheduler.out").open("ab", buffering=0)
            source = child.process.stdout, copy, self.schedulers.index(name)
            relay = threading.Thread(target=self.screen.relay, args=source, daemon=True)
            self._relays.append(relay)
            relay.start()
        return child

    def watch(self) -> Child | int:
        """Run until the end, then stop every process. Return the exit status, or the process whose
        death ended the run. Raises OSError."""
        patience = 0.0
        try:
            dead = self.start() or self._watch()
            patience = CHECKPOINT_S if dead is None else 0.0
        finally:
            self.stop(patience)
            for relay in self._relays:
                relay.join(1.0)  # it prints a scheduler's last lines
        return dead or (0 if self.children[SCHEDULER].process.wait() == 0 else INTERRUPTED)

    def _watch(self) -> Child | None:
        scheduler = self.children[SCHEDULER].process
        while not self._ended():
            if self.signals.interrupted.wait(0.2):
                self.screen.say("\nstopping (press Ctrl-C again to kill) ...")
                self._heed()
                self._signal(self.schedulers, signal.SIGINT)
                self._wait(self.schedulers, GRACE_S)
                # ``stop`` does not wait again for one that hangs
                self._signal(self.schedulers, signal.SIGKILL)
                return None
            dead = self._tend(time.monotonic())
            if dead is not None:
                return dead
            self._look(time.monotonic())
        return None if scheduler.poll() in (0, INTERRUPTED) else self.children[SCHEDULER]

    def _ended(self) -> bool:
        first, *others = (self.children[name].process.poll() for name in self.schedulers)
        return first is not None and (first != 0 or all(status == 0 for status in others))

    def _missed(self, child: Child) -> bool:
        """Whether a process that ended should run: a finished shard dismisses its workers early."""
        shard = child.spec.shard
        return shard is None or self.children[self.schedulers[shard]].process.poll() != 0

    def _tend(self, now: float) -> Child | None:
        for child in self.children.values():
            if isinstance(child.process, Away):
                self.recorder.placed(child.spec.name, child.process.pid, child.process.host)
            if child.again_at is not None:
                if now >= child.again_at:
                    self._hire(child.spec)
            elif child.spec.name != SCHEDULER and self._missed(child) and child.dead(now):
                if child.spec.vital:
                    return self._first(child)
                pause = child.rate.pause(now, self._served(child))
                if pause is None:
                    return child
                self.announce(child, child.cause(), f"starting it again in {pause:.0f} s")
                child.again_at = now + pause
        return None

    def announce(self, child: Child, cause: Cause, then: str) -> None:
        """Print and record a death that does not end the run. then: what follows."""
        self.screen.say(f"{child.spec.name}: {cause.text}; {then} (log: {shown(child.log)})")
        self.recorder.failed(child.spec.name, cause.text, child.log, then)

    def _served(self, child: Child) -> bool:
        reports = [one.health for one in self.watchdogs if one.health is not None]
        pid = child.process.pid  # 0 before another node has begun it, and for guests
        return any(
            pid and worker.answered and pid in (worker.pid, report.pid)
            for report in reports
            for worker in report.workers
        )

    def _look(self, now: float) -> None:
        """Diagnose and kill a process that hangs, so that ``_tend`` finds it dead; write all stacks
        if the user asked for them."""
        if self.signals.stacks.is_set():
            self.signals.stacks.clear()
            faulthandler.dump_traceback(all_threads=True)
            self._stacks()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        for order in (self.run / DRAIN).glob("*"):
            order.unlink()
            self._signal([order.name], signal.SIGTERM)
        alive = {n: child for n, child in self.children.items() if child.process.poll() is None}
        if now >= self._note_at:
            self._note_at = now + NOTE_S
            self._segments |= mapped_segments(c.here for c in alive.values() if c.here)
        pids = {name: child.here for name, child in alive.items() if child.here}
        elsewhere = [(n, c.process) for n, c in alive.items() if isinstance(c.process, Away)]
        away = {(process.host, process.pid): name for name, process in elsewhere}
        finding = next(filter(None, [one.look(pids, now, away) for one in self.watchdogs]), None)
        if finding is None:
            return
        child = alive[finding.process]
        if finding.whole:
            self._stacks()
        text = watchdog.diagnosis(finding, *child.activity())
        child.verdict = Cause(text, True, finding.whole)
        child.process.send_signal(signal.SIGKILL)
        self._wait([child.spec.name], 5.0)

    def _stacks(self) -> None:
        for name, child in self.children.items():
            if child.process.poll() is None:
                doing, stacks = child.activity()
                said = f"its stacks are in {shown(child.log)}" if stacks else doing
                self.screen.say(f"{name}: {said}")

    def _first(self, child: Child) -> Child:
        group = [c for c in self.children.values() if c.spec.vital and c.spec.name != SCHEDULER]
        self._wait([other.spec.name for other in group], SETTLE_S)
        dead = [other for other in group if other.process.poll() not in (None, 0)]
        return next((other for other in dead if not other.cause().second_hand), child)

    def stop(self, patience: float = 0.0) -> None:
        """End every process: workers drain on SIGTERM, and processes that stay are killed. Nothing
        of them stays in shared memory. patience: seconds that the learner may have besides."""
        self._segments |= mapped_segments(c.here for c in self.children.values() if c.here)
        first = [*self.schedulers, "learner-0"]
        self._signal(first, signal.SIGTERM)
        self._wait(first, GRACE_S)
        self._signal(self.schedulers, signal.SIGKILL)  # one that hangs shall not hold up the rest
        if patience and self._alive("learner-0"):
            self.screen.say("waiting for the learner's checkpoint ...")
            end = time.monotonic() + patience
            while self._alive("learner-0") and time.monotonic() < end:
                if self.signals.interrupted.is_set():
                    self._heed()
                self._wait(["learner-0"], min(LOOK_S, patience))
        rest = list(self.children)
        self._signal(rest, signal.SIGTERM)
        self._wait(rest, 10.0)
        if self._alive("learner-0"):
            self.screen.say("learner-0 does not end and is killed, without a last checkpoint")
        self._signal(rest, signal.SIGKILL)
        self._wait(rest, 5.0)
        sweep_segments(self._segments)

    def _signal(self, names: list[str], number: signal.Signals) -> None:
        """Send a signal to those that live. A stopped process (SIGSTOP) is continued, or it could
        not end in order."""
        for name in names:
            if self._alive(name):
                self.children[name].process.send_signal(number)
                self.children[name].process.send_signal(signal.SIGCONT)

    def _heed(self) -> None:
        """A stop was asked for: the next request kills."""
        self.recorder.stopping()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    def _alive(self, name: str) -> bool:
        return name in self.children and self.children[name].process.poll() is None

    def _wait(self, names: list[str], seconds: float) -> None:
        end = time.monotonic() + seconds
        awaited = [self.children[name].process for name in names if name in self.children]
        while time.monotonic() < end and any(process.poll() is None for process in awaited):
            time.sleep(0.05)


def supervise(
    run: Path,
    make: Callable[[], list[PlannedProcess]],
    screen: RunScreen,
    nodes: Nodes | None = None,
) -> int:
    """Run the plan that ``make`` returns to its end, resuming the run where that helps. nodes: of a
    cluster. Return the exit status. Raises OSError."""
    signals, recorder = Signals(), Recorder(run)
    signals.listen()
    resumes, again = Resumes(*_progress(run)), resume_command(run)
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
            pause = resumes.pause(cause, *_progress(run))
        if pause is None:
            advice = record.no_space(run) if full or cause.full_disk else remedy(cause, again)
            recorder.failed(ended.spec.name, cause.text, ended.log, "the run ended")
            recorder.end("failed", advice)
            name, log = ended.spec.name, shown(ended.log)
            screen.say(f"\n{name} failed: {cause.text}\nremedy: {advice}\nlog: {log}")
            return 1
        recorder.record.resumes += 1
        supervisor.announce(ended, cause, f"resuming the run in {pause:.0f} s")
        signals.interrupted.wait(pause)
        # the summary counts from this start
        os.environ["COPPICE_STARTED"] = f"{os.getpid()} {time.monotonic()}"
    recorder.end("stopped", again)
    screen.say(f"stopped; go on with: {again}", "summary")
    return INTERRUPTED


def _progress(run: Path) -> tuple[str, int]:
    """Return the name of the newest checkpoint, "" if there is none, and how many trees and
    evaluations the scheduler last reported as done."""
    states, report = (run / "checkpoints").glob("v??????/state.json"), health.read(run)
    newest = max((path.parent.name for path in states), default="")
    return newest, report.progress() if report is not None else 0
