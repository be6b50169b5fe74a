"""What the launcher does when processes of a run die: it resumes what may pass, and ends with the
cause what would repeat."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coppice.scheduler.dispatch.calls import DispatchConfig
from coppice.tools.launching import children, failures, record, supervisor, watchdog
from coppice.tools.launching.processes import PlannedProcess
from coppice.tools.launching.screen import RunScreen
from coppice.tools.launching.supervisor import supervise

STAYS = [["ready", "stay"]]
PEER = "[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3114"
KILLED = "killed by signal 9 (SIGKILL)"


class Crew:
    """A run of processes that do as they are told."""

    def __init__(self, run: Path, capsys: pytest.CaptureFixture[str], **acts: list[list[str]]):
        self.run, self.capsys = run, capsys
        self.names = [name.replace("_", "-") for name in acts]
        (run / "processes").mkdir(parents=True)
        (run / "config.json").touch()
        for name, told in zip(self.names, acts.values(), strict=True):
            (run / "processes" / f"{name}.json").write_text(json.dumps(told))

    def plan(self) -> list[PlannedProcess]:
        vital = ("scheduler", "learner")
        vitals = [n for n in self.names if n.startswith(vital) and n != "scheduler-1"]
        shard = {"scheduler": 0, "scheduler-1": 1, "actor-1": 1}
        return [
            PlannedProcess(n, "tests.faults.mortal", n, 1, n in vitals, shard=shard.get(n))
            for n in self.names
        ]

    def ends(self, status: int) -> str:
        """Launch the run, which must end with this status, and return what the launcher said."""
        assert supervise(self.run, self.plan, RunScreen(0)) == status
        return self.capsys.readouterr().out

    def ends_after_a_second_start(self, name: str) -> str:
        """As ends, by SIGTERM once the process was started again."""
        with once(lambda: self.starts(name) == [2], terminate):
            return self.ends(130)

    def starts(self, *names: str) -> list[int]:
        files = [self.run / "processes" / f"{name}.starts" for name in names]
        return [len(file.read_text()) if file.exists() else 0 for file in files]

    def record(self) -> record.Record:
        launched = record.read(self.run)
        assert launched is not None
        return launched


Hire = Callable[..., Crew]


@pytest.fixture
def crew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hire]:
    """Makes a crew from the acts of each process. A launcher takes the signals of its process; here
    it does not wait long before it starts something again."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setattr(failures, "FIRST_PAUSE_S", 0.01)
    yield lambda **acts: Crew(tmp_path, capsys, **acts)
    for number, handler in before.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def once(condition: Callable[[], bool], act: Callable[[], None]) -> Iterator[None]:
    def wait() -> None:
        end = time.monotonic() + 60
        while not condition() and time.monotonic() < end:
            time.sleep(0.05)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_an_error_before_the_first_checkpoint_ends_the_run_with_cause_remedy_and_log(
    crew: Hire, tmp_path: Path
) -> None:
    made = crew(scheduler=STAYS, learner_0=[["the forward is off by 0.6"]])
    cause, remedy, log = made.ends(1).strip().splitlines()
    assert cause == "learner-0 failed: PackingError: the forward is off by 0.6"
    assert f"coppice launch --resume {tmp_path}" in remedy
    assert log == f"log: {tmp_path}/logs/learner-0.log"
    assert made.starts("scheduler", "learner-0") == [1, 1]


def test_an_error_after_a_checkpoint_is_resumed_and_ends_the_run_when_it_repeats_without_another(
    crew: Hire,
) -> None:
    odd = [["checkpoint", "odd"], ["checkpoint", "odd"], ["odd"], ["leave"]]
    made = crew(scheduler=STAYS, learner_0=odd)
    said = made.ends(1)
    assert said.count("learner-0: PackingError: odd; resuming the run in ") == 2
    assert "learner-0 failed: PackingError: odd\n" in said
    assert made.starts("learner-0") == [3]


@pytest.mark.parametrize("victim", ["scheduler", "learner_1"])
def test_a_kill_is_resumed_and_the_run_ends_as_if_it_had_not_been(victim: str, crew: Hire) -> None:
    kills = [["ready", "kill"], ["ready", "kill"]]
    told = {"scheduler": STAYS * 2, "learner_0": STAYS, "learner_1": STAYS}
    told[victim] = kills if victim == "scheduler" else [*kills, *STAYS]
    told["scheduler"] = [*told["scheduler"], ["ready", "leave"]]
    cause = f"{KILLED}, most likely by the system for want of memory"
    line = f"{victim.replace('_', '-')}: {cause}; resuming the run in "
    assert crew(**told).ends(0).count(line) == 2


def test_the_rank_that_failed_first_is_named_and_not_the_one_it_took_along(crew: Hire) -> None:
    said = crew(scheduler=STAYS, learner_0=[[PEER]], learner_1=[["off by 0.6"]]).ends(1)
    assert "learner-1 failed: PackingError: off by 0.6\n" in said
    assert "peer" not in said


def test_what_the_scheduler_says_of_a_full_disk_counts_whatever_is_free_now(crew: Hire) -> None:
    said = crew(scheduler=[["checkpoint", "database or disk is full"]]).ends(1)
    assert "the processes cannot write; free some" in said


def test_a_worker_is_started_again_until_it_dies_too_often(crew: Hire) -> None:
    made = crew(scheduler=STAYS, learner_0=STAYS, actor_0=[["engine gone"]])
    said = made.ends(1)
    again = "actor-0: PackingError: engine gone; starting it again in "
    assert said.count(again) == failures.RESTARTS
    assert "actor-0 failed: PackingError: engine gone\n" in said
    assert made.starts("actor-0", "scheduler") == [failures.RESTARTS + 1, 1]


def test_a_worker_that_was_drained_is_replaced_and_nothing_else_is_started_again(
    crew: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "LEFT_S", 0.1)
    made = crew(scheduler=STAYS, learner_0=STAYS, actor_0=[["leave"], ["stay"]])
    left = "it left, though the run goes on: somebody asked it to (SIGTERM)"
    assert f"actor-0: {left}; starting it again in " in made.ends_after_a_second_start("actor-0")
    assert made.starts("scheduler", "learner-0") == [1, 1]
    assert (made.record().state, made.record().stopping) == ("stopped", True)


@pytest.mark.parametrize(
    ("frozen", "then"), [("actor_0", "starting it again"), ("learner_1", "resuming the run")]
)
def test_a_process_that_is_stopped_is_told_so_killed_and_started_again(
    frozen: str, then: str, crew: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "DispatchConfig", lambda: DispatchConfig(replace_after_s=1.0))
    name = frozen.replace("_", "-")
    told = {"scheduler": STAYS, "learner_0": STAYS, frozen: [["freeze"], ["stay"]]}
    made = crew(**told)
    said = made.ends_after_a_second_start(name)
    assert f"{name}: has been stopped for " in said
    assert f"it is stopped (state T), as by SIGSTOP; {then} in " in said
    (failure,) = made.record().failures
    assert (failure.process, failure.then.partition(" in ")[0]) == (name, then)


def test_a_further_scheduler_that_is_killed_is_started_again_and_nothing_else_is(
    crew: Hire,
) -> None:
    dies = [["ready", "wait", "kill"], ["stay"]]
    made = crew(scheduler=STAYS, scheduler_1=dies, learner_0=STAYS, actor_1=STAYS)
    assert f"scheduler-1: {KILLED}" in made.ends_after_a_second_start("scheduler-1")
    assert made.starts("scheduler", "learner-0", "actor-1") == [1, 1, 1]


def test_a_further_scheduler_that_dies_before_it_can_be_reached_ends_the_run_with_its_cause(
    crew: Hire,
) -> None:
    made = crew(scheduler=STAYS, scheduler_1=[["no such tokenizer"]], learner_0=STAYS)
    assert made.ends(1).strip().startswith("scheduler-1 failed: PackingError: no such tokenizer")
    assert made.starts("learner-0") == [0]


def test_a_shard_that_has_finished_is_not_missed_and_the_run_ends_with_the_last_one(
    crew: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "LEFT_S", 0.1)
    last = [["ready", "wait", "leave"]]
    made = crew(scheduler=[["ready", "leave"]], scheduler_1=last, learner_0=STAYS, actor_1=STAYS)
    assert "it left" not in made.ends(0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_a_live_run(number: signal.Signals, crew: Hire, tmp_path: Path) -> None:
    made = crew(scheduler=STAYS, learner_0=STAYS)
    signal.signal(number, signal.SIG_DFL)  # under nohup the tests themselves ignore SIGHUP
    with once(lambda: made.starts("learner-0") == [1], lambda: os.kill(os.getpid(), number)):
        said = made.ends(130)
    assert said.endswith(f"\nstopped; go on with: coppice launch --resume {tmp_path}\n")
    assert made.record().state == "stopped"


@pytest.mark.parametrize(
    ("acts", "grace_s", "within_s"),
    [(["ready", "freeze", "stay"], 60.0, 50.0), (["deaf", "ready", "stay"], 1.0, 9.0)],
)
def test_a_stop_continues_stopped_processes_and_waits_once_for_schedulers_that_hang(
    acts: list[str], grace_s: float, within_s: float, crew: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", grace_s)
    made = crew(scheduler=[acts], scheduler_1=[acts], learner_0=[["freeze", "stay"]])
    asked: list[float] = []

    def stopped() -> bool:
        launched = record.read(made.run)
        member = launched.members.get("learner-0") if launched is not None else None
        return member is not None and "state T" in watchdog.activity(member.pid, Path("/"))[0]

    def stop() -> None:
        asked.append(time.monotonic())
        terminate()

    with once(stopped, stop):
        made.ends(130)
    assert time.monotonic() - asked[0] < within_s


def test_a_stop_waits_for_the_checkpoint_of_a_long_update(
    crew: Hire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", 0.2)
    slow = [["checkpoint at the end", "checkpoint", "stay"]]
    made = crew(scheduler=STAYS, learner_0=slow, learner_1=STAYS)
    with once((tmp_path / "checkpoints").exists, terminate):
        assert "waiting for the learner's checkpoint ...\n" in made.ends(130)
    assert (tmp_path / "saved").exists()


def test_a_learner_that_does_not_end_is_killed_and_told(
    crew: Hire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", 0.2)
    monkeypatch.setattr(supervisor, "CHECKPOINT_S", 0.2)
    made = crew(scheduler=STAYS, learner_0=[["deaf", "checkpoint", "stay"]])
    with once((tmp_path / "checkpoints").exists, terminate):
        assert "learner-0 does not end and is killed, without a last checkpoint" in made.ends(130)


def test_ctrl_c_stops_a_run_that_waits_to_be_resumed(
    crew: Hire, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "FIRST_PAUSE_S", 300.0)
    made = crew(scheduler=STAYS, learner_0=[["kill"]])
    said: list[str] = []

    def waits() -> bool:
        said.append(capsys.readouterr().out)
        return "resuming" in "".join(said)

    with once(waits, lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert made.ends(130).startswith("stopped; go on with: coppice launch --resume ")
    assert made.starts("learner-0") == [1]
