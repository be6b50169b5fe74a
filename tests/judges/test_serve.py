"""Every turn of every request is scored once, in batches no larger than the judge wants, and the
answer goes to who asked; a speaker replies in text."""

import asyncio
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from coppice.judges.base import Judge, Player, checked
from coppice.judges.command import plug_in
from coppice.judges.serve import BUILT_IN, Batcher, answering, make_worker
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.keys import RunKeys
from coppice.wire.messages import JudgedTurn, Judgement, JudgeRequest, PlayRequest, SpeakRequest
from coppice.wire.service import Service
from tests.judges.test_llm import chat, started
from tests.services import Bench, bench


def turns(*questions: str) -> JudgeRequest:
    return JudgeRequest([JudgedTurn(q, ["gold"], "", "", 1, 4, answer="gold") for q in questions])


async def ask(b: Bench, service: str, *questions: str, deadline: float = 20) -> list[Judgement]:
    result: Any = await b.dispatcher.call(service, turns(*questions), deadline=deadline)
    return result.judgements


class Length(Judge):
    """Scores the length of the question, once ``gate`` is open."""

    name = "length"
    columns = ("length",)

    def __init__(self, batch: int = 4, concurrency: int = 1):
        self.batch, self.concurrency = batch, concurrency
        self.fault: Exception = DataFault("question 'bad' cannot be judged")
        self.gate, self.entered = asyncio.Event(), asyncio.Event()
        self.batches: list[list[str]] = []
        self.running = self.most = 0

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        self.batches.append([turn.question for turn in turns])
        self.running += 1
        self.most = max(self.most, self.running)
        self.entered.set()
        await self.gate.wait()
        self.running -= 1
        if any(turn.question == "bad" for turn in turns):
            raise self.fault
        return [Judgement({"length": float(len(turn.question))}) for turn in turns]


async def test_requests_that_wait_are_scored_together_up_to_the_batch(tmp_path: Path) -> None:
    judge = Length()
    batcher = Batcher(judge)
    questions = ["x" * n for n in range(1, 11)]
    async with bench(tmp_path) as b:
        service = await b.work("w", {"judge.length": batcher.handle}, capacity=16)
        first = asyncio.create_task(ask(b, "judge.length", questions[0]))
        await judge.entered.wait()
        rest = [asyncio.create_task(ask(b, "judge.length", q)) for q in questions[1:]]
        async with asyncio.timeout(10):
            while len(service.calls) < len(questions):
                await asyncio.sleep(0.001)
        judge.gate.set()
        judgements = [(await asked)[0] for asked in [first, *rest]]
    assert [j.scores["length"] for j in judgements] == list(range(1, 11))
    assert [len(batch) for batch in judge.batches] == [1, 4, 4, 1]


async def test_no_more_scorings_run_at_once_than_the_judge_declares(tmp_path: Path) -> None:
    judge = Length(batch=1, concurrency=3)
    async with bench(tmp_path) as b:
        await b.work("w", {"judge.length": Batcher(judge).handle}, capacity=16)
        asked = [asyncio.create_task(ask(b, "judge.length", "x")) for _ in range(9)]
        async with asyncio.timeout(10):
            while judge.running < 3:
                await asyncio.sleep(0.001)
        judge.gate.set()
        await asyncio.gather(*asked)
    assert judge.most == 3
    assert len(judge.batches) == 9


async def test_turns_nobody_waits_for_any_more_are_not_scored() -> None:
    judge = Length(batch=1)
    batcher, no_call = Batcher(judge), None
    handled = [batcher.handle(turns(q), no_call) for q in ("a", "bb", "ccc")]  # pyright: ignore
    first, second, third = map(asyncio.create_task, handled)
    await judge.entered.wait()
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    judge.gate.set()
    assert [j.scores["length"] for r in (await first, await third) for j in r.judgements] == [1, 3]
    assert judge.batches == [["a"], ["ccc"]]


@pytest.mark.parametrize(
    "judgement",
    [Judgement({"length": x}) for x in (math.nan, math.inf, -math.inf)]
    + [Judgement({"length": 1.0}, ["length"])],
)
def test_a_score_that_is_not_finite_or_invalid_is_none(judgement: Judgement) -> None:
    made = checked(Length(), turns("a", "b").turns, [judgement, Judgement({"length": 2.0})])
    assert made == [Judgement({}, ["length"]), Judgement({"length": 2.0})]


def test_the_built_in_judges_have_the_name_under_which_they_are_configured() -> None:
    asks = {"endpoint": {"url": "http://127.0.0.1:1/v1", "model": "m", "max_tokens": 2048}}
    needs = {"slate": asks, "pprm": asks, "sotopia": asks, "reward_model": {"model": "m"}}
    for name in BUILT_IN:
        assert make_worker(name, needs.get(name, {})).name == name


@pytest.mark.parametrize(
    ("name", "needs"), [("slate", "endpoint"), ("pprm", "endpoint"), ("reward_model", "model")]
)
def test_a_missing_option_is_named(name: str, needs: str) -> None:
    with pytest.raises(ValueError, match=rf"judges\.use\.{name}: {name} needs \['{needs}'\]"):
        make_worker(name, {})


@pytest.mark.parametrize("fault", [DataFault("question 'bad' cannot be judged"), KeyError("gold")])
async def test_a_turn_that_cannot_be_scored_does_not_condemn_its_batch(
    tmp_path: Path, fault: Exception
) -> None:
    judge = Length(batch=8)
    judge.fault = fault
    judge.gate.set()
    async with bench(tmp_path) as b:
        await b.work("w", {"judge.length": Batcher(judge).handle}, capacity=8)
        asked = [ask(b, "judge.length", question) for question in ("one", "bad", "three")]
        good, bad, long = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(bad, DataFault) and str(fault) in str(bad)
    scores = [answer[0].scores for answer in (good, long) if isinstance(answer, list)]
    assert scores == [{"length": 3.0}, {"length": 5.0}]


@pytest.mark.parametrize("played", [np.int64(3), (np.int64(3),), [3], (1.5,)])
async def test_a_move_is_whole_numbers_of_any_kind(played: Any) -> None:
    class Rival(Player):
        async def play(self, state: Any, seed: int) -> Any:
            return played

    answer: Any = answering(Rival())
    if isinstance(played, tuple) and isinstance(played[0], float):
        with pytest.raises(InfrastructureFault, match="expected integers"):
            await answer(PlayRequest(None, 0), None)
    else:
        assert (await answer(PlayRequest(None, 0), None)).move == [3]


UNFINISHED = ("Nameless", "Bare", "Other")


@pytest.fixture
def standing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a started run, and beside it the plug-ins of a user who stands there."""
    run = tmp_path / "run"
    RunKeys.create(run / "keys")
    (run / "endpoint").write_text("tcp://127.0.0.1:1")
    body = "class Plain(Judge):\n name, columns = 'plain', ('a',)\n"
    body += " async def score(self, turns): pass\nmade = Plain()\n"
    body += "class Nameless(Judge): columns = ('a',)\nclass Bare(Judge): name = 'j'\n"
    body += "class Other: name, columns = 'j', ('a',)\n"
    wrong = {"columns": "'ab'", "batch": "0", "concurrency": "0", "limits": "(0, float('inf'))"}
    body += (
        "class Turned(Plain): limits = (1, 0)\nclass Now(Plain):\n def score(self, turns): pass\n"
    )
    for name, value in wrong.items():
        body += f"class Odd_{name}(Plain): {name} = {value}\n"
    (tmp_path / "plugs.py").write_text(f"from coppice.judges.base import Judge\n{body}")
    (tmp_path / "torn.py").write_text("class (")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("plugs", "torn"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return run


@pytest.mark.parametrize(
    ("judge", "run", "options", "said"),
    [
        ("exact_match", "nowhere", [], "nowhere is not a started run"),
        ("exact_match", "plugs.py", [], "plugs.py is not a started run"),
        ("exact", "run", [], "judge 'exact': did you mean 'exact_match'? expected one of"),
        ("plugs:Nope", "run", [], "AttributeError: module 'plugs' has no attribute 'Nope'"),
        ("nomod:Nope", "run", [], "No module named 'nomod'; expected module:Class"),
        ("torn:Nope", "run", [], "'torn:Nope': SyntaxError: invalid syntax (torn.py, line 1)"),
        ("plugs:made", "run", [], "judge 'plugs:made': made is no class"),
        *((f"plugs:{name}", "run", [], "a name and columns") for name in UNFINISHED),
        ("plugs:Odd_columns", "run", [], "columns = 'ab': Expected `array`, got `str`"),
        ("plugs:Odd_batch", "run", [], "'plugs:Odd_batch': batch = 0: Expected `int` >= 1"),
        ("plugs:Odd_concurrency", "run", [], "concurrency = 0: Expected `int` >= 1"),
        ("plugs:Odd_limits", "run", [], "limits = (0, inf): expected two numbers of at most"),
        ("plugs:Turned", "run", [], "limits = (1, 0): expected the lower one first"),
        ("plugs:Now", "run", [], "score is no coroutine: write async def score"),
        ("plugs:Plain", "run", ["a=1"], "unknown to plugs:Plain, which takes no options"),
        ("plugs:Plain", "run", ["a"], "option 'a': expected KEY=VALUE"),
    ],
)
@pytest.mark.usefixtures("standing")
def test_a_judge_that_cannot_be_plugged_in_is_one_line(
    judge: str, run: str, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plug_in([judge, "--run", run, *(f"--option={option}" for option in options)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("coppice serve: ")
    assert said in error
    assert error.count("\n") == 1


def test_a_judge_follows_a_resumed_run_to_its_new_endpoint_and_says_when_none_answers(
    standing: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def resumed(*given: Any) -> Service:
        (standing / "endpoint").write_text("tcp://127.0.0.1:2")
        return Service(*given, give_up_s=0.0)

    monkeypatch.setattr("coppice.judges.serve.Service", resumed)
    assert plug_in(["plugs:Plain", "--run", str(standing)]) == 1
    said, error = capsys.readouterr()
    endpoints = [line.partition(" to ")[2].partition(";")[0] for line in said.splitlines()]
    assert endpoints == ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
    assert "coppice serve: plain-plugin: no scheduler answered for 0 s" in error
    assert "Traceback" not in error


@pytest.mark.second
async def test_a_judge_that_hung_has_its_places_again_after_deadlines(tmp_path: Path) -> None:
    judge = Length(concurrency=2)
    batcher = Batcher(judge)
    async with bench(tmp_path) as b:
        await b.work("w", {"judge.length": batcher.handle})
        for _ in range(2):
            with pytest.raises(InfrastructureFault, match="took over"):
                await ask(b, "judge.length", "x", deadline=0.2)
        third = asyncio.create_task(ask(b, "judge.length", "xyz"))
        async with asyncio.timeout(10):
            while len(judge.batches) < 3:  # before the first two have gone on
                await asyncio.sleep(0.001)
        judge.gate.set()
        assert (await third)[0].scores == {"length": 3}


def test_the_slow_oracles_leave_the_event_loop() -> None:
    oracles: list[Any] = [make_worker(name, {}) for name in ("minesweeper", "sokoban", "tictactoe")]
    assert all(oracle.threaded for oracle in oracles)


ASKED = SpeakRequest([{"role": "user", "content": "Hello?"}], 7, 0.25, ["\n"], 2**40 + 5)


async def test_a_speakers_request_reaches_the_endpoint_and_its_reply_comes_back() -> None:
    seen: list[dict[str, Any]] = []

    async def reply(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return chat("Good day.") if len(seen) > 1 else web.Response(status=503)

    def speaker(url: str) -> Any:
        return make_worker("chat", {"endpoint": {"url": url, "model": "m", "backoff_s": 1e-3}})

    async with started(speaker, reply) as made:
        assert await made.speak(ASKED) == "Good day."
    expected = {"model": "m", "messages": ASKED.messages, "max_tokens": 7, "temperature": 0.25}
    expected |= {"stop": ["\n"], "seed": 5}
    assert seen == [expected, expected]  # a busy server is asked again
