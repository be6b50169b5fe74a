"""The PPRM judge: a strict parse, prompts with the paper's contract, ten tries, and replies that a
server holds to the form."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from coppice.judges import pprm
from coppice.judges.pprm import Pprm, PprmEndpoint, messages, parse_final_score, read_templates
from coppice.judges.serve import make_worker
from coppice.scheduler.config import SchedulerConfig
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import JudgedTurn, Judgement
from tests.judges.test_llm import chat, chat_server, started

SAID = "<think> {query_str} </think> <search> q </search>"
SEEN = "\n<information>Doc 1(Title: T) F: v</information>\n"
BEFORE = "<think> a </think> <search> b </search> BEFORE"
PARTS: Any = {"think": "{query_str}", "query": "q", "observation": SEEN, "transcript": BEFORE}
TURN = JudgedTurn("Who?", ["gold"], "CONTEXT", SAID, 2, 4, **PARTS)


SCORES = [
    ("Analysis: fine.\nScores: <final_score>4,6</final_score>", (4, 6)),
    ("Scores: <final_score> 0,6 </final_score>", (0, 6)),
    ("<final_score>3 ,\n 3</final_score>", (3, 3)),
    ("<final_score>1,6</final_score> no, <final_score>2,6</final_score>", (2, 6)),
    ("<final_score>1,6</final_score> no, <final_score>2,", (1, 6)),
    ("the block <final_score> holds two.\nScores: <final_score>5,6</final_score>", (5, 6)),
]
NO_PAIRS = [*"4.0,6 0.5 7,6 0,0 -1,6 +1,6 1,2,6 4/6 4 ٤,٦ four,six".split(), f"1,{'9' * 5000}"]
NO_SCORES = [
    "<final_score>1,6</final_score> no, <final_score>good</final_score>",
    *(f"<final_score>{pair}</final_score>" for pair in NO_PAIRS),
    "4,6",
    "",
]


@pytest.mark.parametrize(("reply", "expected"), [*SCORES, *((text, None) for text in NO_SCORES)])
def test_only_two_whole_numbers_are_a_score(reply: str, expected: tuple[int, int] | None) -> None:
    assert parse_final_score(reply) == expected


def test_the_prompt_is_rules_then_question_and_transcript_then_the_turn() -> None:
    system, user = messages(TURN, read_templates())
    assert (system["role"], user["role"]) == ("system", "user")
    places = [user["content"].index(text) for text in ("Who?", BEFORE, SAID, SEEN)]
    assert places == sorted(places)
    assert "CONTEXT" not in user["content"]
    assert "{solution_str}" not in user["content"]
    # what a turn says is never a placeholder
    assert "<think> {query_str} </think>" in user["content"]
    assert "gold" not in system["content"] + user["content"]  # the judge is not told the answer


def test_the_prompt_of_the_next_turn_goes_on_from_the_transcript_of_this_one() -> None:
    texts, after = read_templates(), BEFORE + SAID + SEEN
    later = JudgedTurn(TURN.question, [], "", "<answer> x </answer>", 3, 4, transcript=after)
    here, there = (messages(turn, texts) for turn in (TURN, later))
    shared = here[1]["content"].index(TURN.transcript) + len(TURN.transcript)
    assert here[0] == there[0]
    assert here[1]["content"][:shared] == there[1]["content"][:shared]


@pytest.mark.parametrize("principles", [True, False])
def test_the_rules_state_the_contract_and_do_not_themselves_grade(principles: bool) -> None:
    text = read_templates(principles=principles)["system"]
    assert ("principle" in text.lower()) == principles
    form = "\nAnalysis: your findings\nScores: <final_score>S,M</final_score>"
    assert text.rstrip().endswith(form)
    assert all(f"<{tag}></{tag}>" in text for tag in ("think", "search", "information", "answer"))
    assert "{" not in text  # constant, so that a prefix cache keeps it
    assert parse_final_score(text) is None  # a model that repeats the instructions has not graded


def test_a_template_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "user.txt").write_text("{query_str}")
    with pytest.raises(ValueError, match=r"think.*system.*user"):
        read_templates({"think": "x"})
    with pytest.raises(ValueError, match=r"no \{solution_str\}"):
        read_templates({"user": str(tmp_path / "user.txt")})
    with pytest.raises(ValueError, match="no effect with an own system template"):
        read_templates({"system": str(tmp_path / "user.txt")}, principles=False)


def test_an_endpoint_table_has_the_papers_settings_where_it_names_none() -> None:
    url = {"url": "http://h/v1", "model": "m"}
    judges: list[Any] = [
        make_worker("pprm", {"endpoint": url | own}) for own in ({}, {"attempts": 2})
    ]
    endpoint, own = (judge.endpoint for judge in judges)
    assert (endpoint.attempts, endpoint.max_tokens, endpoint.temperature) == (10, 4096, 0.0)
    assert own.attempts == 2
    with pytest.raises(ValueError, match=r"judges\.use\.pprm\.endpoint"):
        make_worker("pprm", {"endpoint": url | {"attempt": 2}})


def asking(**given: Any) -> Callable[[str], Pprm]:
    return lambda url: Pprm(PprmEndpoint(url, "m", **{"backoff_s": 1e-4, **given}))


async def one(judge: Pprm, turn: JudgedTurn = TURN) -> Judgement:
    (made,) = await judge.score([turn])
    return made


async def test_the_request_is_the_system_and_the_user_message_at_temperature_zero() -> None:
    seen: dict[str, Any] = {}
    text = "Analysis: fine.\nScores: <final_score>4,6</final_score>"

    async def reply(request: web.Request) -> web.Response:
        seen.update(await request.json())
        return chat(text)

    async with started(asking(), reply) as judge:
        made = await one(judge)
    expected = {"model": "m", "messages": messages(TURN, read_templates())}
    assert seen == expected | {"temperature": 0.0, "max_tokens": 4096}
    assert made == Judgement({"process": 4 / 6}, [], text)


@pytest.mark.second
async def test_a_reply_that_does_not_come_is_invalid_before_the_deadline() -> None:
    never = asyncio.Event()

    async def reply(request: web.Request) -> web.Response:
        await never.wait()
        return web.Response(status=503)

    async with started(asking(timeout_s=0.05, patience_s=0.2), reply) as judge:
        made = await one(judge)
        assert (made.scores, made.invalid) == ({}, ["process"])
        assert "no reply within 0.2 s (patience_s)" in made.explanation
        assert judge.http.counts["requests"] < 10
        never.set()
    assert PprmEndpoint("http://h", "m").patience_s < SchedulerConfig().judge_deadline_s


async def test_what_cannot_be_read_is_invalid_and_asked_once() -> None:
    pairs = [f"<final_score>{pair}</final_score>" for pair in ("2,2", "3,2", "0,2")]
    replies = iter([pairs[0], "well done", *pairs[1:]])

    async def reply(request: web.Request) -> web.Response:
        return chat(next(replies))

    async with started(asking(), reply) as judge:
        made = [await one(judge) for _ in range(4)]
        assert judge.http.counts["requests"] == 4
    assert [judgement.scores for judgement in made] == [{"process": 1.0}, {}, {}, {"process": 0.0}]
    assert made[1] == Judgement({}, ["process"], "well done")


@pytest.mark.second
async def test_a_start_waits_for_a_server_that_comes_later_and_not_for_ever() -> None:
    asked = list[str]()

    async def models(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"data": []}) if len(asked) > 1 else web.Response(status=503)

    async with chat_server(models, "GET /models") as url:
        judge = asking(wait_s=30.0)(url)
        await judge.start()
        await judge.close()
    assert asked == ["/v1/models"] * 2
    gone = asking(wait_s=0.1)(url)
    with pytest.raises(InfrastructureFault, match=r"no server after 0\.1 s"):
        await gone.start()
    await gone.close()


async def test_a_wait_for_a_server_ends_at_once_when_it_is_there_and_refuses_the_key() -> None:
    async def models(request: web.Request) -> web.Response:
        return web.Response(status=401)

    async with chat_server(models, "GET /models") as url, asyncio.timeout(30):
        with pytest.raises(InfrastructureFault, match="wants an API key"):
            await asking(wait_s=3600.0)(url).start()


@given(st.integers(66, 6000), st.integers(1, 9), st.data())
def test_a_constrained_reply_is_read_and_fits(
    max_tokens: int, most: int, data: st.DataObject
) -> None:
    reached = data.draw(st.integers(0, most))
    form, room = pprm.reply_form(max_tokens), min(max_tokens - 50, 2000)
    longest = f"Analysis: {'x' * room}\nScores: <final_score>{reached},{most}</final_score>"
    assert re.fullmatch(form, longest)
    assert len(longest) < max_tokens  # of at least one character a token, with one left for the end
    assert parse_final_score(longest) == (reached, most)
    assert not re.fullmatch(form, longest.replace("x", "xx", 1))
    assert not re.fullmatch(form, longest.replace("x", "\n", 1))
    assert not re.fullmatch(form, longest.replace(f"{reached},{most}", f"{most + 1},{most}"))
