"""What an invited guest may say: nothing that it was not granted enters a tree, stops a process or
takes a name of the run."""

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coppice.common import process
from coppice.common.terminal import visible
from coppice.scheduler.dispatch import bounds
from coppice.scheduler.dispatch.calls import DispatchConfig
from coppice.scheduler.growth import answers
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.ledger.node_codec import MOST, encode_node
from coppice.scheduler.telemetry.health import Reporter
from coppice.tools.inspecting import dump
from coppice.tools.launching.screen import RunScreen
from coppice.tools.launching.watchdog import Watchdog
from coppice.wire import messages as wire
from coppice.wire.arrays import encode
from coppice.wire.faults import DataFault, Fault, InfrastructureFault
from coppice.wire.keys import Grant, PeerKeys
from coppice.wire.service import Call, Rejected, Service
from coppice.wire.sockets import Dealer
from tests.services import Bench, bench

ONCE = DispatchConfig(max_attempts=1)
TURN = wire.JudgeRequest([wire.JudgedTurn("q", [], "", "", 1, 1)])
CONTROL = "\x1b]0;gone\x07\x9b2J\r"


async def serve(
    b: Bench, service: str, answer: Any, name: str = "guest", keys: PeerKeys | None = None
) -> None:
    """Have a worker give ``answer`` to every call, by default a guest with an invitation."""

    async def handle(request: Any, call: Call) -> Any:
        if isinstance(answer, Fault):
            raise answer
        return answer

    keys = keys or b.run_keys.invite(service, b.dispatcher.endpoint)[1]
    work = Service(name, {service: handle}, 4).run(b.dispatcher.endpoint, keys, signals=False)
    b.tasks[name] = asyncio.create_task(work)
    async with asyncio.timeout(30):
        while name not in {worker.name for worker in b.dispatcher.workers(service)}:
            await asyncio.sleep(0.001)


@contextmanager
def registered(b: Bench, name: str, *claims: Any) -> Iterator[Dealer]:
    """A guest that speaks the protocol by itself."""
    _, keys = b.run_keys.invite("judge.mine", b.dispatcher.endpoint)
    sly = Dealer(b.dispatcher.endpoint, keys, b"sly")
    sly.send(encode(wire.Register(name, ["judge.mine"], *claims)))
    try:
        yield sly
    finally:
        sly.close()


def judged(*arguments: Any) -> wire.JudgeResult:
    return wire.JudgeResult([wire.Judgement(*arguments)])


BIG = "x" * 10_000_000
HONEST = judged({"think": 0.5})
ATTACKS: dict[str, tuple[Any, str]] = {
    "columns of others": (judged({"em": 1.0, "valid": 1.0, "outcome": 1.0}), "'em'"),
    "a column of another judge": (judged({"reward": 1.0}), "'reward'"),
    "an outcome withheld": (judged({"think": 0.0}, ["outcome"]), "'outcome'"),
    "a huge score": (judged({"think": 1e308}), "the score 1e.308"),
    "no number": (judged({"think": float("nan")}), "the score nan"),
    "beyond the declared limits": (judged({"think": 1.5}), "expected -1 to 1"),
    "a long explanation": (judged({"think": 0.0}, [], BIG), "10000000 characters"),
    "a column many times": (judged({}, ["think"] * 10**6), "at most 256"),
    "a column's name in colours": (judged({CONTROL: 0.0}), "short names"),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_what_a_guest_may_not_say_is_told_once_and_unused(
    tmp_path: Path, attack: str
) -> None:
    (answer, message), told = ATTACKS[attack], list[str]()
    async with bench(tmp_path, ONCE) as b:
        b.dispatcher.declared = {"judge.mine": bounds.JudgeGives(("think",), (-1.0, 1.0))}
        b.dispatcher.on_fault = lambda service, fault, caller: told.append(str(fault))
        await serve(b, "judge.mine", answer)
        call = partial(b.dispatcher.call, "judge.mine", TURN, deadline=30, caller="tree 1")
        for _ in range(2):
            with pytest.raises(DataFault, match=message):
                await call()
        (words,) = told
        assert len(words) < 1000 and visible(words) == words
        await serve(b, "judge.mine", HONEST, "honest", b.keys)
        assert [await call() for _ in range(8)] == [HONEST] * 8
        assert b.dispatcher.counters["refused_answers"] > 2


async def test_the_runs_own_answers_are_bounded_too(tmp_path: Path) -> None:
    passages = wire.RetrieveResult([[wire.Passage("1", "title", BIG, 0.5)]])
    async with bench(tmp_path, ONCE) as b:
        for service, request, answer in (
            ("retrieve", wire.RetrieveRequest(["q"], 1), passages),
            ("speaker.x", wire.SpeakRequest([], 8, 1.0, [], 0), wire.SpeakResult(BIG)),
            ("player.x", wire.PlayRequest(None, 0), wire.PlayResult([0] * 10**7)),
        ):
            await serve(b, service, answer, service, b.keys)
            with pytest.raises(DataFault, match=r"10000000 (characters|numbers)"):
                await b.dispatcher.call(service, request, deadline=30)


@pytest.mark.parametrize("kind", [DataFault, InfrastructureFault])
async def test_a_guests_words_are_short_and_move_no_cursor(tmp_path: Path, kind: type) -> None:
    async with bench(tmp_path, ONCE) as b:
        await serve(b, "judge.mine", kind(CONTROL + BIG))
        with pytest.raises(kind, match=r"\\u001b\]0;gone\\u0007\\u009b2J\\u000dxx") as fault:
            await b.dispatcher.call("judge.mine", TURN, deadline=30)
        assert len(str(fault.value)) < 3000 and visible(str(fault.value)) == str(fault.value)


@pytest.mark.parametrize("name", ["actor-0", "learner", "judges-1", CONTROL, BIG], ids=len)
async def test_a_guest_takes_no_name_of_the_run_nor_an_odd_one(tmp_path: Path, name: str) -> None:
    async with bench(tmp_path) as b:
        answer = asyncio.get_running_loop().create_future()
        with registered(b, name, 1, 1, "h") as sly:
            sly.listen(answer.set_result)
            (header, *_) = await asyncio.wait_for(answer, 30)
        assert b"goodbye" in bytes(header) and len(header) < 1000
        assert b.dispatcher.counters["refused_peers"] == 1
        if name not in (CONTROL, BIG):
            await serve(b, "echo", TURN, name, b.keys)


async def test_a_guest_that_names_the_schedulers_process_stops_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path, DispatchConfig(replace_after_s=0.001)) as b:
        dog, own = Watchdog(tmp_path), (os.getpid(), socket.gethostname())
        with registered(b, "sly", 2**60, *own):
            await b.dispatcher.wait_for("judge.mine", 1, 30)
            (worker,) = b.dispatcher.workers()
            worker.unanswered, worker.heard = 99, 0.0
            progress = dict.fromkeys("version updates growing done evaluations marks".split(), 0)
            progress |= {"phase": "updates"}
            report = await Reporter(tmp_path, b.dispatcher, lambda: progress, 9.0, 9.0).write()
        assert dog.look({"scheduler": os.getpid()}, report.at) is None


async def test_an_invitation_to_a_service_without_a_name_grants_nothing(tmp_path: Path) -> None:
    assert not Grant("key", ("judge",), columns=("think",)).allows("judge.mine")
    async with bench(tmp_path) as b:
        with pytest.raises(ValueError, match="no peer can be invited to 'judge': name one"):
            b.run_keys.invite("judge", b.dispatcher.endpoint)
        stored = b.run_keys.mint("invited-judge-old", ("judge",))  # by an older checkout
        sly = Service("sly", {"judge.mine": NotImplemented}, 4)
        with pytest.raises(Rejected, match=r"its key may offer judge, and not judge\.mine"):
            await sly.run(b.dispatcher.endpoint, stored, signals=False)


def test_no_environment_gives_a_score_that_overflows_nor_a_text_that_fills_the_disk() -> None:
    with pytest.raises(ValueError, match=r"gave the score 1e.308 in column 'outcome'"):
        answers.given("mine", {"outcome": 1e308})
    with pytest.raises(ValueError, match=r"gave the score '1' in column 'outcome', expected a nu"):
        answers.given("mine", {"outcome": "1"})
    scores = answers.given("mine", {"a": np.float32(0.5), "b": np.bool_(True), "c": np.int64(2)})
    assert scores == {"a": 0.5, "b": 1.0, "c": 2.0} and {*map(type, scores.values())} == {float}
    node = Tree(0, "task").add(None, "prompt", np.zeros(MOST, np.int32), "short")
    encode_node(node)
    node.notes["crashed"] = "x" * MOST
    with pytest.raises(ValueError, match=f"of text and state, expected at most {MOST}"):
        encode_node(node)


def test_control_characters_reach_neither_terminal_nor_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, tree = Journal(tmp_path / "journal.sqlite"), Tree(0, f"task{CONTROL}")
    node = tree.add(None, "prompt", np.zeros(1, np.int32), CONTROL)
    node.notes["mine"] = CONTROL
    journal.start_tree(tree, 0, 0)
    journal.close_tree(tree, "quarantined", f"reason{CONTROL}")
    journal.close()
    for how in ([], ["--full"], ["--list"], ["--json"], ["--diff", "0", "0"]):
        assert dump.main([str(tmp_path), *how]) == 0
    RunScreen(1).take(f"a judge said {CONTROL}")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    process.begin()
    logging.getLogger("judge").error("a judge raised %s", CONTROL)
    printed = capsys.readouterr()
    for text in (printed.out, printed.err):
        assert "\\u001b]0;gone\\u0007\\u009b2J" in text
        assert visible(text) == text
