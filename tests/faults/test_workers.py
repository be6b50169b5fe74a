"""Worker processes that are killed, frozen, drained or left alone lose no call."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from coppice.scheduler.dispatch.calls import LEAST_LOADED, Worker
from coppice.scheduler.dispatch.dispatcher import DispatchConfig, Dispatcher
from coppice.wire.faults import InfrastructureFault
from coppice.wire.keys import RunKeys
from coppice.wire.messages import SERVICES
from tests.services import EchoRequest, EchoResult, Prefer

ANSWER, GATE, EXIT = 0.0, 1.0, 2.0
CONFIG = DispatchConfig(heartbeat_s=0.05, dead_after_s=0.6)


class Floor:
    """A dispatcher with worker processes."""

    def __init__(self, folder: Path):
        self.keys = folder / "keys"
        keys = RunKeys.create(self.keys)
        keys.mint("tests", tuple(SERVICES), keep=True)
        self.dispatcher = Dispatcher("tcp://127.0.0.1:0", keys, CONFIG)
        self.processes: list[asyncio.subprocess.Process] = []

    async def until(self, condition: Callable[[dict[str, Worker]], bool]) -> None:
        """Wait until it holds for the workers by their names."""
        async with asyncio.timeout(60):
            while not condition({worker.name: worker for worker in self.dispatcher.workers()}):
                await asyncio.sleep(0.01)

    async def hire(self, name: str) -> asyncio.subprocess.Process:
        command = [sys.executable, "-m", "tests.faults.worker_process", self.dispatcher.endpoint]
        pipes = dict.fromkeys(("stdout", "stderr"), asyncio.subprocess.PIPE)
        process = await asyncio.create_subprocess_exec(*command, str(self.keys), name, **pipes)
        self.processes.append(process)
        await self.until(lambda workers: name in workers)
        return process

    def ask(self, what: float, prefer: str | None = None) -> asyncio.Task[EchoResult]:
        """One call, answered with the process id of the worker that served it."""
        request = EchoRequest(np.array([what], np.float32))
        place = Prefer(prefer) if prefer else LEAST_LOADED
        return asyncio.create_task(self.dispatcher.call("echo", request, deadline=30, place=place))

    async def has(self, process: asyncio.subprocess.Process, what: float) -> None:
        assert process.stdout is not None
        async with asyncio.timeout(10):
            while await process.stdout.readline() != f"got {int(what)}\n".encode():
                pass


@pytest.fixture
async def floor(tmp_path: Path) -> AsyncIterator[Floor]:
    made = Floor(tmp_path)
    await made.dispatcher.start()
    yield made
    for process in made.processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.communicate()
    await made.dispatcher.close()


async def test_the_calls_of_a_killed_process_move_to_another(floor: Floor) -> None:
    floor.dispatcher.roster.config = DispatchConfig(heartbeat_s=0.05, dead_after_s=1e6)
    mortal = await floor.hire("mortal")
    calls = [floor.ask(GATE) for _ in range(2)]
    await floor.has(mortal, GATE)
    heir = await floor.hire("heir")
    (floor.keys / "heir.gate").touch()
    mortal.kill()
    assert [(await call).version for call in calls] == [heir.pid] * 2
    assert floor.dispatcher.counters["dead_workers"] == 1
    assert floor.dispatcher.counters["retries"] == 2


async def test_a_call_that_kills_every_worker_it_meets_ends_as_a_fault_and_other_calls_go_on(
    floor: Floor,
) -> None:
    for name in ("a", "b", "c"):
        await floor.hire(name)
    deadly = floor.ask(EXIT)
    with pytest.raises(InfrastructureFault, match="is gone: its connection broke"):
        await deadly
    survivor = await floor.hire("d")
    assert (await floor.ask(ANSWER)).version == survivor.pid


async def test_a_frozen_process_loses_its_calls_and_is_taken_back_when_it_thaws(
    floor: Floor,
) -> None:
    frozen = await floor.hire("frozen")
    call = floor.ask(GATE)
    await floor.has(frozen, GATE)
    frozen.send_signal(signal.SIGSTOP)
    other = await floor.hire("other")
    (floor.keys / "other.gate").touch()
    assert (await call).version == other.pid
    frozen.send_signal(signal.SIGCONT)
    await floor.dispatcher.wait_for("echo", 2, 10)
    assert (await floor.ask(ANSWER, prefer="frozen")).version == frozen.pid
    assert not [worker for worker in floor.dispatcher.workers() if worker.in_flight]


async def test_sigterm_lets_a_worker_finish_its_call_while_new_ones_go_elsewhere(
    floor: Floor,
) -> None:
    leaving = await floor.hire("leaving")
    call = floor.ask(GATE)
    await floor.has(leaving, GATE)
    await floor.hire("staying")
    leaving.send_signal(signal.SIGTERM)
    await floor.until(lambda workers: workers["leaving"].draining)
    assert (await floor.ask(ANSWER, prefer="leaving")).version != leaving.pid
    (floor.keys / "leaving.gate").touch()
    assert (await call).version == leaving.pid
    assert await asyncio.wait_for(leaving.wait(), 10) == 0
    assert not floor.dispatcher.counters["retries"]


async def test_a_worker_whose_scheduler_vanished_ends_with_a_message(floor: Floor) -> None:
    orphan = await floor.hire("orphan")
    await floor.dispatcher.close()
    _, errors = await asyncio.wait_for(orphan.communicate(), 20)
    assert orphan.returncode == 1
    assert b"orphan: no scheduler answered for 1 s. Is the run still alive" in errors
