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
from coppice.tools.launching.processes import Process
from coppice.tools.launching.resuming import supervise
from coppice.tools.launching.screen import Screen

STAYS, PEER = (
    [["ready", "stay"]],
    "[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3114",
)


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A launcher takes the signals of its process; here it does not wait long before it starts
    something again."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setattr(failures, "FIRST_PAUSE_S", 0.01)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Crew:
    """A run of processes that do as they are told."""

    def __init__(self, run: Path, **acts: list[list[str]]):
        self.run, self.names = run, [name.replace("_", "-") for name in acts]
        (run / "processes").mkdir(parents=True)
        (run / "config.json").touch()
        for name, told in zip(self.names, acts.values(), strict=True):
            (run / "processes" / f"{name}.json").write_text(json.dumps(told))

    def plan(self) -> list[Process]:
        vital = ("scheduler", "learner")
        vitals = [n for n in self.names if n.startswith(vital) and n != "scheduler-1"]
        shard = {"scheduler": 0, "scheduler-1": 1, "actor-1": 1}
        return [
            Process(n, "tests.faults.mortal", n, 1, n in vitals, shard=shard.get(n))
            for n in self.names
        ]

    def launch(self) -> int:
        return supervise(self.run, self.plan, Screen(0))

    def starts(self, name: str) -> int:
        file = self.run / "processes" / f"{name}.starts"
        return len(file.read_text()) if file.exists() else 0


@contextlib.contextmanager
def once(condition: Callable[[], bool], act: Callable[[], None]) -> Iterator[None]:
    """Act beside the launch when the condition is met."""

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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crew = Crew(tmp_path, scheduler=STAYS, learner_0=[["the forward is off by 0.6"]])
    assert crew.launch() == 1
    assert capsys.readouterr().out.strip().splitlines() == [
        "learner-0 failed: PackingError: the forward is off by 0.6",
        "remedy: mend what the cause names, or it will happen again; then"
        f" coppice launch --resume {tmp_path} (--set KEY=VALUE changes a setting)",
        f"log: {tmp_path}/logs/learner-0.log",
    ]
    assert (crew.starts("scheduler"), crew.starts("learner-0")) == (1, 1)


def test_an_error_after_a_checkpoint_is_resumed_and_ends_the_run_when_it_repeats_without_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crew = Crew(
        tmp_path,
        scheduler=STAYS,
        learner_0=[["checkpoint", "odd"], ["checkpoint", "odd"], ["odd"], ["leave"]],
    )
    assert crew.launch() == 1
    said = capsys.readouterr().out
    assert said.count("learner-0: PackingError: odd; resuming the run in ") == 2
    assert "learner-0 failed: PackingError: odd\n" in said
    assert crew.starts("learner-0") == 3


@pytest.mark.parametrize("victim", ["scheduler", "learner_0", "learner_1"])
def test_a_kill_is_resumed_and_the_run_ends_as_if_it_had_not_been(
    victim: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"scheduler": STAYS, "learner_0": STAYS, "learner_1": STAYS}
    killed = [["ready", "kill"], ["ready", "kill"]]
    told[victim] = [*killed, *told[victim]]
    told["scheduler"] = (
        [*told["scheduler"][:2], ["ready", "leave"]]
        if victim == "scheduler"
        else [*STAYS * 2, ["leave"]]
    )
    crew = Crew(tmp_path, **told)
    assert crew.launch() == 0
    name = victim.replace("_", "-")
    line = f"{name}: killed by signal 9 (SIGKILL), most likely by the system for want of memory; resuming the run in "
    assert capsys.readouterr().out.count(line) == 2


def test_a_rank_that_is_killed_each_time_before_it_gets_anywhere_ends_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crew = Crew(tmp_path, scheduler=STAYS, learner_0=[["kill"]])
    assert crew.launch() == 1
    assert crew.starts("learner-0") == failures.RESTARTS + 1
    *_, cause, remedy, log = capsys.readouterr().out.strip().splitlines()
    assert cause.startswith("learner-0 failed: killed by signal 9 (SIGKILL)")
    assert remedy.endswith(f"go on with: coppice launch --resume {tmp_path}")
    assert log == f"log: {tmp_path}/logs/learner-0.log"


@pytest.mark.parametrize(
    ("first", "second"), [("learner_0", "learner_1"), ("learner_1", "learner_0")]
)
def test_the_rank_that_failed_first_is_named_and_not_the_one_it_took_along(
    first: str, second: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"learner_0": [["x"]], "learner_1": [["x"]]} | {
        first: [["off by 0.6"]],
        second: [[PEER]],
    }
    assert Crew(tmp_path, scheduler=STAYS, **told).launch() == 1
    said = capsys.readouterr().out
    assert f"{first.replace('_', '-')} failed: PackingError: off by 0.6\n" in said
    assert "peer" not in said


def test_a_worker_is_started_again_until_it_dies_too_often(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crew = Crew(tmp_path, scheduler=STAYS, learner_0=STAYS, actor_0=[["engine gone"]])
    assert crew.launch() == 1
    said = capsys.readouterr().out
    assert (
        said.count("actor-0: PackingError: engine gone; starting it again in ") == failures.RESTARTS
    )
    assert "actor-0 failed: PackingError: engine gone\n" in said
    assert (crew.starts("actor-0"), crew.starts("scheduler")) == (failures.RESTARTS + 1, 1)


def test_what_the_scheduler_says_of_a_full_disk_counts_whatever_is_free_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Crew(tmp_path, scheduler=[["checkpoint", "database or disk is full"]]).launch() == 1
    assert "the processes cannot write; free some" in capsys.readouterr().out


def test_a_rank_that_was_asked_to_leave_is_missed_when_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "LEFT_S", 0.1)
    assert (
        Crew(tmp_path, scheduler=[*STAYS, ["leave"]], learner_0=[["leave"], ["stay"]]).launch() == 0
    )
    assert (
        "learner-0: it left, though the run goes on: somebody asked it to (SIGTERM); resuming"
        in capsys.readouterr().out
    )


def test_a_worker_that_was_drained_is_replaced_and_nothing_else_is_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "LEFT_S", 0.1)
    crew = Crew(tmp_path, scheduler=STAYS, learner_0=STAYS, actor_0=[["leave"], ["stay"]])
    with once(lambda: crew.starts("actor-0") == 2, terminate):
        assert crew.launch() == 130
    assert (
        "actor-0: it left, though the run goes on: somebody asked it to (SIGTERM); starting it again in "
        in capsys.readouterr().out
    )
    assert [crew.starts(name) for name in ("scheduler", "learner-0")] == [1, 1]
    launched = record.read(tmp_path)
    assert launched is not None
    assert (launched.state, launched.stopping) == ("stopped", True)


@pytest.mark.parametrize("frozen", ["actor_0", "learner_1"])
def test_a_process_that_is_stopped_is_told_so_killed_and_started_again(
    frozen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "DispatchConfig", lambda: DispatchConfig(replace_after_s=1.0))
    name = frozen.replace("_", "-")
    crew = Crew(
        tmp_path, **{"scheduler": STAYS, "learner_0": STAYS, frozen: [["freeze"], ["stay"]]}
    )
    with once(lambda: crew.starts(name) == 2, terminate):
        assert crew.launch() == 130
    then = "starting it again" if frozen == "actor_0" else "resuming the run"
    said = capsys.readouterr().out
    assert f"{name}: has been stopped for " in said
    assert f"it is stopped (state T), as by SIGSTOP; {then} in " in said
    (failure,) = (record.read(tmp_path) or pytest.fail("no record")).failures
    assert (failure.process, failure.then.partition(" in ")[0]) == (name, then)


@pytest.mark.parametrize(("word", "starts"), [("report", 1), ("training", 2)])
def test_a_rank_that_dies_before_the_training_began_leaves_the_start_of_the_others(
    word: str, starts: int, tmp_path: Path
) -> None:
    told = {
        "scheduler": [["ready", word]],
        "learner_0": STAYS,
        "learner_1": [["wait", "kill"], ["stay"]],
    }
    crew = Crew(tmp_path, **told, actor_0=STAYS)
    (tmp_path / "ranks-0").touch()  # where the dead ranks met
    wanted = {"actor-0": starts, "learner-0": 2, "learner-1": 2}
    with once(lambda: all(crew.starts(name) == count for name, count in wanted.items()), terminate):
        assert crew.launch() == 130
    assert [crew.starts(name) for name in ("scheduler", "actor-0", "learner-0", "learner-1")] == [
        starts,
        starts,
        2,
        2,
    ]
    # a resumed run has a plan, and a file, of its own
    assert (tmp_path / "ranks-0").exists() == (starts == 2)


def test_a_further_scheduler_that_is_killed_is_started_again_and_nothing_else_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {
        "scheduler": STAYS,
        "scheduler_1": [["ready", "wait", "kill"], ["stay"]],
        "learner_0": STAYS,
    }
    crew = Crew(tmp_path, **told, actor_1=STAYS)
    with once(lambda: crew.starts("scheduler-1") == 2, terminate):
        assert crew.launch() == 130
    assert "scheduler-1: killed by signal 9 (SIGKILL)" in capsys.readouterr().out
    assert [crew.starts(name) for name in ("scheduler", "learner-0", "actor-1")] == [1, 1, 1]


def test_a_further_scheduler_that_dies_before_it_can_be_reached_ends_the_run_with_its_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crew = Crew(tmp_path, scheduler=STAYS, scheduler_1=[["no such tokenizer"]], learner_0=STAYS)
    assert crew.launch() == 1
    assert (
        capsys.readouterr()
        .out.strip()
        .startswith("scheduler-1 failed: PackingError: no such tokenizer")
    )
    assert crew.starts("learner-0") == 0


def test_a_shard_that_has_finished_is_not_missed_and_the_run_ends_with_the_last_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "LEFT_S", 0.1)
    told = {
        "scheduler": [["ready", "leave"]],
        "scheduler_1": [["ready", "wait", "leave"]],
        "learner_0": STAYS,
    }
    crew = Crew(tmp_path, **told, actor_1=STAYS)
    assert crew.launch() == 0
    assert "it left" not in capsys.readouterr().out
    other = Crew(
        tmp_path / "other",
        scheduler=[["ready", "wait", "leave"]],
        scheduler_1=[["ready", "leave"]],
        actor_1=[["leave"]],
    )
    assert other.launch() == 0
    assert (other.starts("scheduler-1"), other.starts("actor-1")) == (1, 1)


def test_everything_killed_at_once_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crew = Crew(
        tmp_path,
        scheduler=[["ready", "stay"], ["leave"]],
        learner_0=STAYS,
        learner_1=STAYS,
        actor_0=STAYS,
    )

    def kill() -> None:
        for member in (record.read(tmp_path) or pytest.fail("no record")).members.values():
            os.kill(member.pid, signal.SIGKILL)

    with once(lambda: crew.starts("actor-0") == 1, kill):
        assert crew.launch() == 0
    assert capsys.readouterr().out.count("resuming the run in ") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_a_live_run(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crew = Crew(tmp_path, scheduler=STAYS, learner_0=STAYS)
    before = signal.signal(number, signal.SIG_DFL)  # under nohup the tests themselves ignore SIGHUP

    try:
        with once(lambda: crew.starts("learner-0") == 1, lambda: os.kill(os.getpid(), number)):
            assert crew.launch() == 130
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "stopping (press Ctrl-C again to kill) ...",
        f"stopped; go on with: coppice launch --resume {tmp_path}",
    ]
    assert (record.read(tmp_path) or pytest.fail("no record")).state == "stopped"


@pytest.mark.parametrize(
    ("acts", "grace_s", "within_s"),
    [(["ready", "freeze", "stay"], 60.0, 50.0), (["deaf", "ready", "stay"], 1.0, 9.0)],
)
def test_a_stop_continues_stopped_processes_and_waits_once_for_schedulers_that_hang(
    acts: list[str],
    grace_s: float,
    within_s: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", grace_s)
    crew = Crew(tmp_path, scheduler=[acts], scheduler_1=[acts], learner_0=[["freeze", "stay"]])
    asked: list[float] = []

    def stopped() -> bool:
        launched = record.read(tmp_path)
        member = launched.members.get("learner-0") if launched is not None else None
        return member is not None and "state T" in watchdog.state(member.pid)

    def stop() -> None:
        asked.append(time.monotonic())
        terminate()

    with once(stopped, stop):
        assert crew.launch() == 130
    assert time.monotonic() - asked[0] < within_s


def test_ctrl_c_stops_a_run_that_waits_to_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "FIRST_PAUSE_S", 300.0)
    crew = Crew(tmp_path, scheduler=STAYS, learner_0=[["kill"]])
    said: list[str] = []

    def waits() -> bool:
        said.append(capsys.readouterr().out)
        return "resuming" in "".join(said)

    with once(waits, lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert crew.launch() == 130
    assert capsys.readouterr().out == f"stopped; go on with: coppice launch --resume {tmp_path}\n"
    assert crew.starts("learner-0") == 1
