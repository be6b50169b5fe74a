"""Why a process ended, read from its status and its log; how often it is started again."""

import pytest

from coppice.tools.launching.failures import (
    RESTARTS,
    WITHIN_S,
    Cause,
    Rate,
    Resumes,
    cause_of,
    remedy,
)

RAISED = """2026-11-22 09:00:00,123 learner.main rank 1 of 2: version 0, torch.float32
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/x/learner/selfcheck.py", line 87, in _refuse
    raise PackingError(
    ^^^^^^^^^^^^^^^^^^^
"""
HANDLED = f"{RAISED}ValueError: one\n2026-11-22 09:00:01,000 wire.service learner: train failed\n"


@pytest.mark.parametrize(
    ("log", "text"),
    [
        (RAISED + "learner.selfcheck.PackingError: off by 0.6\n", "PackingError: off by 0.6"),
        (RAISED + "RuntimeError: in loading:\n\tsize\n", "RuntimeError: in loading: size"),
        (HANDLED + RAISED + "wire.faults.DataFault: later\n", "DataFault: later"),
        (f"{HANDLED}2026-11-22 09:00:02,000 scheduler.main the run ends: no\nbad\n", "no bad"),
        ("", "it ended with status 1 and wrote nothing"),
        (RAISED + f"ValueError: {'x' * 5000}\n", f"ValueError: {'x' * 288} ..."),
    ],
)
def test_the_cause_is_what_ended_the_process_in_one_line(log: str, text: str) -> None:
    assert cause_of(1, log) == Cause(text, False)


def test_a_signal_and_a_lost_peer_come_from_outside() -> None:
    killed = "killed by signal 9 (SIGKILL), most likely by the system for want of memory"
    assert cause_of(-9, HANDLED) == Cause(killed, True)
    place = "/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547"
    gone = f"RuntimeError: [{place}] Connection closed by peer [127.0.0.1]:3114"
    lost = cause_of(1, RAISED + gone)
    assert (lost.passing, lost.second_hand) == (True, True)
    assert not cause_of(-9, RAISED + gone).second_hand
    marked = "".join(f"[rank0]: {line}\n" for line in (RAISED + gone).splitlines())
    assert cause_of(1, RAISED + gone + "\n" + marked) == lost


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (Cause("OutOfMemoryError: CUDA out of memory", False), "if memory was short: fewer"),
        (cause_of(-15, ""), "go on with: AGAIN"),
        (Cause("ModuleNotFoundError: No module named 'x'", False), "make that module importable"),
        (Cause("ValueError: lr = -1", False), "mend what the cause names, or it will happen again"),
    ],
)
def test_going_on_is_advised_where_nothing_has_to_change(cause: Cause, said: str) -> None:
    assert remedy(cause, "AGAIN").startswith(said)


def test_a_death_after_progress_counts_as_the_first() -> None:
    rate = Rate()
    pauses = [rate.pause(float(i), progress=i == 2) for i in range(6)]
    assert pauses == [1.0, 2.0, 1.0, 2.0, 4.0, None]
    assert rate.pause(WITHIN_S + 4.5) == 2.0  # one of them is in the window


FAULT, KILL = Cause("ValueError: bad", False), cause_of(-9, "")


def test_kills_are_resumed_a_few_times_without_progress_and_for_a_week_with_it() -> None:
    resumes = Resumes("")
    ends = [resumes.pause(KILL, "") is None for i in range(RESTARTS + 1)]
    assert ends == [False] * RESTARTS + [True]
    resumes = Resumes("")
    assert all(resumes.pause(KILL, f"v{i + 1:06d}") == 1.0 for i in range(7 * 24))


def test_trees_in_the_journal_are_progress_after_a_kill_and_not_after_an_error() -> None:
    resumes = Resumes("", 5)
    assert [resumes.pause(KILL, "", 6 + i) for i in range(10)] == [1.0] * 10
    assert resumes.pause(FAULT, "", 99) is None


def test_a_stall_that_comes_again_without_progress_ends_the_run_with_its_remedy() -> None:
    stall = Cause("holds up the run", True, True)
    resumes = Resumes("", 5)
    assert [resumes.pause(stall, "", 5) for i in range(2)] == [1.0, None]
    assert remedy(stall, "AGAIN").startswith("look at the stacks at the end of the logs")
