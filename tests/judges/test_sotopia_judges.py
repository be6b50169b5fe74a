"""The judges of SOTOPIA: seven dimensions from a language model, strictly read, and rules that say
what they can check."""

import json
import re
from typing import Any

import msgspec
import pytest
from aiohttp import web

from coppice.actors.environments.base import Task
from coppice.actors.environments.sotopia.environment import (
    DIMENSIONS,
    Dialogue,
    Sotopia,
    SotopiaState,
    SotopiaTurn,
)
from coppice.actors.environments.sotopia.scenarios import GoalCondition, load
from coppice.judges.llm import ChatEndpoint
from coppice.judges.sotopia import SotopiaJudge, SotopiaRules, holds, parse, reply_form
from coppice.wire.faults import DataFault
from coppice.wire.messages import JudgedTurn, Judgement
from tests.judges.test_llm import chat, started

SCORES = dict(zip(DIMENSIONS, (9, 2, 3, 0, -1, 1, 7), strict=True))
ENVIRONMENT = Sotopia()


def reply(mine: dict[str, Any], other: dict[str, Any] = SCORES) -> str:
    sides = {
        agent: {name: {"reasoning": "r", "score": score} for name, score in side.items()}
        for agent, side in {"agent_1": mine, "agent_2": other}.items()
    }
    return json.dumps(sides)


def judged(combo: str, trained: int, *words: str) -> JudgedTurn:
    """What the judge sees when the sides say ``words`` in turn; "" does nothing."""
    turns = enumerate(words)
    said = tuple(SotopiaTurn(k % 2, "speak" if text else "none", text) for k, text in turns)
    state = SotopiaState(combo, trained, said)
    return ENVIRONMENT.concluded(
        Task("t"), SotopiaState(combo, trained), ENVIRONMENT.read(state, ""), state, 1, 4
    )


def test_the_scores_of_one_side_are_read() -> None:
    assert parse(reply(SCORES, SCORES | {"goal": 1}), 0) == SCORES
    assert parse(f"```json\n{reply(SCORES, SCORES | {'goal': 1})}\n```", 1) == SCORES | {"goal": 1}


@pytest.mark.parametrize("name", DIMENSIONS)
def test_a_score_outside_its_range_or_no_integer_is_invalid_alone(name: str) -> None:
    least, most = DIMENSIONS[name]
    for bad in (least - 1, most + 1, 0.5, "1", None, True):
        others = {k: v for k, v in SCORES.items() if k != name}
        assert parse(reply(SCORES | {name: bad}), 0) == others
    for good in (least, most):
        assert parse(reply(SCORES | {name: good}), 0)[name] == good


def test_the_reasoning_comes_before_the_score() -> None:
    late = reply(SCORES).replace('{"reasoning": "r", "score": 7}', '{"score": 7, "reasoning": "r"}')
    assert parse(late, 0) == {name: score for name, score in SCORES.items() if name != "goal"}


@pytest.mark.parametrize(
    "text",
    [
        "", "7", "[]", "{}", "I think: " + reply(SCORES), reply(SCORES)[:-1], '{"agent_1": {}}',
        reply(SCORES).replace('"score": 7', '"score": 1, "score": 7', 1),
    ],
)  # fmt: skip
def test_a_reply_in_another_form_is_invalid(text: str) -> None:
    assert parse(text, 0) == {}


def test_a_constrained_reply_can_be_read_and_fits() -> None:
    form = reply_form(2048)
    longest = reply({name: min(limits) for name, limits in DIMENSIONS.items()})
    assert re.fullmatch(form, longest)
    room = int(re.findall(r"\{1,(\d+)\}", form)[0])
    filled = longest.replace('"r"', f'"{"r" * room}"')
    assert re.fullmatch(form, filled) and len(filled) < 2048
    assert not re.fullmatch(form, reply(SCORES | {"goal": 11}))
    with pytest.raises(ValueError, match="max_tokens 512"):
        reply_form(512)


async def score(text: str, turn: JudgedTurn, seen: list[str], **options: Any) -> Judgement:
    """The judgement of a real judge over a real server that answers ``text``."""

    async def answer(request: web.Request) -> web.Response:
        seen.append((await request.json())["messages"][0]["content"])
        return chat(text) if text else web.Response(status=400, text="no")

    async with started(
        lambda url: SotopiaJudge(ChatEndpoint(url, "m", max_tokens=2048), **options), answer
    ) as judge:
        (judgement,) = await judge.score([turn])
    return judgement


async def test_the_outcome_is_the_goal_or_the_mean_of_the_trained_side() -> None:
    turn = judged("scenario-03-2", 1, "Is Saturday free?", "", "Well?", "A party!")
    seen = list[str]()
    low = SCORES | {"goal": 2}
    judgement = await score(reply(SCORES, low), turn, seen)
    assert judgement.scores == {**low, "outcome": 0.2} and judgement.invalid == []
    judgement = await score(reply(SCORES, low), turn, seen, outcome="mean")
    assert judgement.scores["outcome"] == pytest.approx(sum(low.values()) / 7)
    prompt = seen[0]
    assert "did nothing" not in prompt and 'said: "A party!"' in prompt
    for person in ("agent-07", "agent-14"):
        assert load("").agents[person].secret in prompt
    assert not re.findall(r"\{\w+\}", prompt)


@pytest.mark.parametrize(
    ("outcome", "invalid"), [("goal", ["secret"]), ("mean", ["outcome", "secret"])]
)
async def test_an_invalid_dimension_spoils_the_outcome(outcome: str, invalid: list[str]) -> None:
    turn, text = judged("scenario-01-1", 0, "Hello."), reply(SCORES | {"secret": 3})
    judgement = await score(text, turn, [], outcome=outcome)
    assert judgement.invalid == invalid and "secret" not in judgement.scores


async def test_without_a_reply_every_column_is_invalid_and_the_cause_is_told() -> None:
    judgement = await score("", judged("scenario-01-1", 0, "Hello."), [])
    assert judgement.scores == {} and judgement.invalid == list(SotopiaJudge.columns)
    assert "HTTP 400" in judgement.explanation


EURO = r"(\d+)\s*euros?\b"


@pytest.mark.parametrize(
    ("condition", "own", "other", "result"),
    [
        (GoalCondition(says="yes"), ["Yes!"], [], True),
        (GoalCondition(says="yes"), [], ["yes"], False),
        (GoalCondition("partner", says="yes"), [], ["yes"], True),
        (GoalCondition("each", says="yes"), [], ["yes"], True),
        (GoalCondition(never="yes"), ["no"], ["yes"], True),
        (GoalCondition(never="yes"), ["no", "YES"], [], False),
        (GoalCondition(agreed=EURO, least=40), ["50 euros", "45 euros?"], ["45 euros, fine"], True),
        (GoalCondition(agreed=EURO, least=46), ["45 euros"], ["45 euros"], False),
        (GoalCondition(agreed=EURO, most=44), ["45 euros"], ["45 euros"], False),
        (GoalCondition(agreed=EURO), ["45 euros"], ["44 euros"], False),
        (GoalCondition(agreed=EURO), ["45 euros"], ["yes"], False),
        (GoalCondition(agreed=EURO), [], [], False),
        (GoalCondition(agreed=r"([\d,]*) euros"), ["1,200 euros"], ["1200 euros"], True),
        (GoalCondition(agreed=r"([\d,]*) euros"), ["all euros"], [" euros"], False),
    ],
)
def test_a_condition_is_what_was_said(
    condition: GoalCondition, own: list[str], other: list[str], result: bool
) -> None:
    assert holds(condition, own, other) is result


async def test_the_rule_judge_gives_goal_and_secret_of_the_trained_side_and_nothing_else() -> None:
    words = ("Is Saturday free?", "Saturday is free. Is there a party?")
    (planner,) = await SotopiaRules().score([judged("scenario-03-1", 0, *words)])
    assert planner.scores == {"outcome": 1, "goal": 10, "secret": 0} and planner.invalid == []
    (other,) = await SotopiaRules().score([judged("scenario-03-1", 1, *words)])
    # the planner did not say the word, and nothing is known of this secret
    assert other.scores == {"outcome": 0, "goal": 0}
    (told,) = await SotopiaRules().score([judged("scenario-03-1", 0, *words, "Yes, a party.")])
    assert told.scores == {"outcome": 0, "goal": 0, "secret": -10}


async def test_only_spoken_words_count() -> None:
    turn = judged("scenario-14-1", 0, "", "fox")
    whole = msgspec.convert(turn.state, Dialogue)
    quiet = msgspec.structs.replace(whole, turns=(SotopiaTurn(1, "action", "shows a note: fox"),))
    shown = msgspec.structs.replace(turn, state=msgspec.to_builtins(quiet))
    results = await SotopiaRules().score([turn, shown])
    assert [result.scores["goal"] for result in results] == [10, 0]


async def test_a_silent_conversation_reaches_no_goal() -> None:
    for combo in load("").combos:
        for trained in (0, 1):
            (result,) = await SotopiaRules().score([judged(combo.pk, trained, "", "", "")])
            assert result.scores["goal"] == 0, combo.pk


def test_a_scenario_without_rules_is_refused() -> None:
    turn = judged("scenario-01-1", 0, "Hello.")
    state = msgspec.structs.replace(msgspec.convert(turn.state, Dialogue), rules=None)
    with pytest.raises(DataFault, match="no rules"):
        SotopiaRules().judge(msgspec.structs.replace(turn, state=msgspec.to_builtins(state)))


def test_an_endpoint_that_would_cut_every_reply_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens 512: a reply of its form needs 943 or more"):
        SotopiaJudge(ChatEndpoint("http://127.0.0.1:1", "m"))
