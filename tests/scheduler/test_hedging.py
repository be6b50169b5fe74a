"""A call that a worker holds for far longer than usual moves on, in virtual time."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from coppice.scheduler.dispatch.calls import Place, Worker
from coppice.scheduler.dispatch.dispatcher import DispatchConfig, Dispatcher
from coppice.scheduler.telemetry.health import UNANSWERED
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import Error, GenerateRequest, JudgedTurn, JudgeRequest, Sampling
from tests.simulation.network import Network
from tests.simulation.peers import Actor, Judge, Manners, Peer
from tests.simulation.virtual_time import Agenda, VirtualLoop

JUDGE = "judge.slate_rules"
TOKENS = np.zeros(1, np.int32)
REQUEST = GenerateRequest(TOKENS, 1, Sampling(4))
TURN = JudgeRequest([JudgedTurn("", [], "", "", 1, 1)])


class Stage:
    """A dispatcher and scripted judges on the virtual clock. ``play`` runs a coroutine there."""

    dispatcher: Dispatcher

    def __init__(self, judges: int, capacity: int = 4, **manners: float):
        self.agenda = Agenda(deadline=1e4)
        self.network = Network(self.agenda, random.Random(0), lambda *_: None, 0.001, 0.0)
        self.config = DispatchConfig(max_attempts=3)
        hello = [JUDGE], capacity
        names = [f"judge-{i}" for i in range(judges)]
        self.peers: list[Peer] = [Judge(self.network, random.Random(n), n, *hello) for n in names]
        for peer in self.peers:
            peer.manners, peer.faulty = Manners(**manners, seconds={"judge": 0.3}), lambda: True
        self.seconds: list[float] = []

    def play(self, act: Callable[[], Awaitable[Any]]) -> Any:
        async def work() -> Any:
            clock = lambda: self.agenda.now  # noqa: E731
            router: Any = self.network.bind()
            self.dispatcher = Dispatcher("", None, self.config, router=router, clock=clock)
            await self.dispatcher.start()
            for peer in self.peers:
                peer.start()
            await self.dispatcher.wait_for(self.peers[0].services[0], len(self.peers), 10.0)
            try:
                return await act()
            finally:
                assert not self.dispatcher.open_calls() and not any(
                    self.dispatcher._waiting.values()
                )
                assert not any(worker.in_flight for worker in self.dispatcher.workers())
                await self.dispatcher.close()

        loop = VirtualLoop(self.agenda)
        try:
            return loop.run_until_complete(work())
        finally:
            loop.close()

    async def judge(self, place: Place, deadline: float = 120.0) -> str:
        """How a call ends, whose seconds are noted."""
        since = self.agenda.now
        try:
            await self.dispatcher.call(JUDGE, TURN, deadline=deadline, place=place)
            return "ok"
        except InfrastructureFault:
            return "fault"
        finally:
            self.seconds.append(self.agenda.now - since)

    async def caller(self, tree: int, calls: int) -> list[str]:
        return [await self.judge(Place(tree)) for _ in range(calls)]


def stalls(peer: Peer, every: int) -> None:
    """The peer never answers each ``every``-th of its calls."""
    numbers, accepted = itertools.count(1), peer.accepted

    def accept(header: Any, body: Any) -> None:
        if next(numbers) % every:
            accepted(header, body)

    peer.accepted = accept


def test_a_judge_that_stalls_every_third_call_costs_ten_seconds_and_is_told_to_the_watchdog() -> (
    None
):
    stage = Stage(judges=3)
    stalls(stage.peers[0], 3)

    async def act() -> Worker:
        await asyncio.gather(*(stage.caller(tree, 60) for tree in range(10)))
        return stage.dispatcher.roster.by_name["judge-0"]

    worker, counters = stage.play(act), stage.dispatcher.counters
    assert max(stage.seconds) < 10.0
    assert counters["hedged"] == counters["late_attempts"] > 20
    assert worker.answered > 20 and worker.stalled >= UNANSWERED
    assert all(w.stalled == 0 for w in stage.dispatcher.roster.by_name.values() if w != worker)


def test_a_lone_judge_that_becomes_slow_gets_no_call_twice() -> None:
    stage = Stage(judges=1, capacity=8)

    async def act() -> Worker:
        await asyncio.gather(*(stage.caller(tree, 10) for tree in range(8)))
        stage.peers[0].manners = Manners(seconds={"judge": 8.0})
        await asyncio.gather(*(stage.caller(tree, 5) for tree in range(8)))
        return stage.dispatcher.roster.by_name["judge-0"]

    worker, counters = stage.play(act), stage.dispatcher.counters
    assert counters["late_attempts"] > 5 and counters["hedged"] == 0
    assert (worker.answered, worker.stalled) == (120, 0)


@pytest.mark.parametrize("seed", range(5))
def test_a_hedged_call_reaches_exactly_one_outcome_whatever_its_attempts_meet(seed: int) -> None:
    stage = Stage(judges=4, capacity=2, error=0.1, hang=0.2, twice=0.2, garbage=0.02)
    rng = random.Random(seed)

    async def impatient(tree: int) -> str:
        try:
            async with asyncio.timeout(rng.expovariate(1 / 20)):
                return await stage.judge(Place(tree), 30.0)
        except TimeoutError:
            return "cancelled"

    async def act() -> list[str]:
        await asyncio.gather(*(stage.caller(tree, 10) for tree in range(8)))
        for _ in range(4):
            peer = rng.choice(stage.peers)
            stage.agenda.after(rng.random() * 30, lambda peer=peer: peer.die(5.0))
        return await asyncio.gather(*(impatient(tree) for tree in range(100)))

    assert set(stage.play(act)) <= {"ok", "fault", "cancelled"}
    assert stage.dispatcher.counters["hedged"] > 5


def test_a_hedged_call_whose_second_attempt_fails_still_waits_for_its_first() -> None:
    stage, numbers = Stage(judges=2), itertools.count()
    stage.config = DispatchConfig(max_attempts=2)

    def first_is_slow(peer: Peer) -> None:
        def accepted(header: Any, body: Any) -> None:
            if next(numbers) == 0:
                stage.agenda.after(20.0, lambda: peer._answer(header, body))
            else:
                peer.reply(header.id, Error(header.id, "infrastructure", "no"))

        peer.accepted = accepted

    async def act() -> str:
        await asyncio.gather(*(stage.caller(tree, 20) for tree in range(4)))
        for peer in stage.peers:
            first_is_slow(peer)
        return await stage.judge(Place(0))

    assert stage.play(act) == "ok" and stage.dispatcher.counters["hedged"] == 1


def test_generation_is_never_made_twice() -> None:
    stage = Stage(judges=0)
    for name in ("a", "b"):
        actor = Actor(stage.network, random.Random(0), name, ["generate"], 9, texts=[TOKENS])
        stalls(actor, 20)
        stage.peers.append(actor)

    async def act() -> None:
        ask = lambda: stage.dispatcher.call("generate", REQUEST, deadline=60.0)  # noqa: E731
        ended = await asyncio.gather(*(ask() for _ in range(80)), return_exceptions=True)
        assert sum(isinstance(end, InfrastructureFault) for end in ended) > 1

    stage.play(act)
    assert not stage.dispatcher.counters["hedged"]


def test_a_judge_serves_the_oldest_tree_first() -> None:
    stage, ended = Stage(judges=1, capacity=1), list[int]()

    async def ask(tree: int) -> None:
        await stage.judge(Place(tree))
        ended.append(tree)

    stage.play(lambda: asyncio.gather(*(ask(tree) for tree in (5, 3, 9, 1, 7))))
    assert ended == [5, 1, 3, 7, 9]


@pytest.mark.parametrize(("every", "times", "given_up"), [(2.0, 40, ["judge-0"]), (30.0, 1, [])])
def test_a_scheduler_that_is_held_up_gives_up_the_dead_and_nobody_else(
    every: float, times: int, given_up: list[str]
) -> None:
    stage, left = Stage(judges=2), list[str]()

    def hold_up(number: int) -> None:
        stage.agenda.now += 5.0 if times > 1 else 60.0
        if number < times:
            stage.agenda.after(every, lambda: hold_up(number + 1))

    async def act() -> None:
        stage.dispatcher.roster.on_leave = lambda worker, _: left.append(worker.name)
        if given_up:
            stage.peers[0].alive = False
        stage.agenda.after(every, lambda: hold_up(1))
        await asyncio.sleep(every * times + 100)

    stage.play(act)
    assert left == given_up
