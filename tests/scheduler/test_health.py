"""What the scheduler reports of workers, queues and progress, with real workers."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from coppice.scheduler.dispatch.dispatcher import DispatchConfig
from coppice.scheduler.telemetry.health import UNANSWERED, Reporter
from coppice.wire.faults import InfrastructureFault
from coppice.wire.service import Call
from tests.services import Bench, EchoRequest, EchoResult, ask, bench, echo

REQUEST = ask()
CONFIG = DispatchConfig(heartbeat_s=0.05, dead_after_s=30.0)


def reporter(run: Path, b: Bench, marks: Sequence[int] = (0,)) -> Reporter:
    """A reporter of a run whose progress is ``marks[0]``."""
    fields = {"phase": "updates", "version": 2, "updates": 9, "growing": 1, "done": 4}
    fields |= {"evaluations": 1}
    return Reporter(run, b.dispatcher, lambda: {**fields, "marks": marks[0]}, 60.0, 600.0)


def progress_at(writer: Reporter, *moments: float) -> list[float]:
    return [writer.report(at).progress_at for at in moments]


async def test_a_report_names_who_waits_for_whom_and_silent_workers(tmp_path: Path) -> None:
    over = asyncio.Event()

    async def never(request: EchoRequest, call: Call) -> EchoResult:
        # deaf to its deadline too, of which the worker would tell just in time now and then
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()
        return EchoResult(request.tokens, 0)

    async with bench(tmp_path, CONFIG) as b:
        await b.work("mute", {"echo": never}, capacity=2)
        asked = ["echo", "echo", "echo", "judge.x"]
        work = (b.dispatcher.call(name, REQUEST, deadline=30.0, caller="tree 1") for name in asked)
        calls = [asyncio.create_task(call) for call in work]
        await asyncio.sleep(0)
        writer = reporter(tmp_path, b)
        report = writer.report(100.0)
        queue = report.queues["echo"]
        assert (queue.running, queue.waiting, queue.offered, queue.on) == (2, 1, 1, ["mute"])
        judge = report.queues["judge.x"]
        told = judge.describe("judge.x", judge.since)
        assert "none runs (0 workers offer it), 1 waiting" in told and "tree 1" in told
        assert report.stuck == "mute"
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for _ in range(UNANSWERED):
            with pytest.raises(InfrastructureFault, match="did not answer"):
                await b.dispatcher.call("echo", REQUEST, deadline=0.05, caller="tree 7")
        (worker,) = writer.report(101.0).workers
        assert (worker.name, worker.state) == ("mute", "here")
        assert (worker.answered, worker.unanswered) == (0, UNANSWERED)
        assert worker.calls[-1].startswith("echo for tree 7: deadline after 0.")
        over.set()


async def test_who_left_is_reported_until_it_comes_again(tmp_path: Path) -> None:
    async with bench(tmp_path, CONFIG) as b:
        await b.work("a", {"echo": echo})
        await b.dispatcher.call("echo", REQUEST, deadline=30.0)
        writer = reporter(tmp_path, b)
        (worker,) = b.dispatcher.workers()
        assert [(w.answered, w.unanswered) for w in writer.report(0.0).workers] == [(1, 0)]
        writer.left(worker, "silent for 20 s")
        b.dispatcher.roster.remove(worker, "register")
        assert [w.state for w in writer.report(0.0).workers] == ["silent for 20 s"]
        writer.joined(worker)
        assert not writer.report(0.0).workers


@pytest.mark.second
async def test_a_report_tells_how_long_the_event_loop_was_held_up(tmp_path: Path) -> None:
    async with bench(tmp_path, CONFIG) as b:
        writer = reporter(tmp_path, b)
        working = asyncio.create_task(writer.work())
        async with asyncio.timeout(30):
            while writer.report(0.0).lag_s < 0.2:
                time.sleep(0.4)  # noqa: ASYNC251
                await asyncio.sleep(0.01)
        working.cancel()


async def test_progress_is_what_the_journal_or_the_learner_adds_and_a_standstill_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with bench(tmp_path, CONFIG) as b:
        marks = [0]
        writer = reporter(tmp_path, b, marks)
        assert progress_at(writer, 10.0, 20.0) == [10.0, 10.0]
        marks[0] = 1
        assert progress_at(writer, 30.0, 40.0) == [30.0, 30.0]
        writer._said_at = 0.0
        for at in (50.0, 95.0, 96.0, 160.0):
            writer._remind(writer.report(at))
        assert capsys.readouterr().out.splitlines() == [
            "<4>  no progress for 65 s (updates): no call is open",
            "<4>  no progress for 130 s (updates): no call is open",
        ]


async def test_a_paused_run_stands_still_on_purpose_once_only_the_learner_has_calls(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, CONFIG) as b:
        writer = reporter(tmp_path, b)
        writer._pause(True)
        work = (b.dispatcher.call(name, REQUEST, deadline=30.0) for name in ("train", "echo"))
        calls = [asyncio.create_task(call) for call in work]
        await asyncio.sleep(0)
        # a tree in flight may hang
        assert progress_at(writer, 10.0, 20.0) == [10.0, 10.0]
        calls[1].cancel()
        await asyncio.gather(calls[1], return_exceptions=True)
        assert progress_at(writer, 30.0, 40.0) == [30.0, 40.0] and writer.report(40.0).paused
        writer._pause(False)
        assert progress_at(writer, 50.0, 60.0) == [40.0, 40.0]
        calls[0].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
