"""Scores of the built-in judges, and how a judge is served."""

import asyncio
import threading
from typing import Any

import pytest
from aiohttp import web

from coppice.judges.base import Judge, RuleJudge, checked
from coppice.judges.exact_match import ExactMatch, exact_match, extract_answer, f1, normalize
from coppice.judges.llm import ChatEndpoint
from coppice.judges.slate import Slate, SlateEm, SlateRules, parse_score
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import JudgedTurn, Judgement
from tests.judges.test_llm import chat, started

QUESTION = "What is the capital of the country whose currency is the lev?"
EVIDENCE = ["Bulgaria\nCurrency: lev", "Bulgaria\nCapital: Sofia"]
SHOWN = "<information>Doc 1(Title: Bulgaria) Currency: lev</information>"


def turn(**fields: Any) -> JudgedTurn:
    given: dict[str, Any] = {"question": QUESTION, "golds": ["Sofia"], "context": ""}
    given |= {"response": "", "step": 1, "budget": 4, "think": "t"}
    return JudgedTurn(**(given | fields))


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("The Sofia.", ["sofia"], 1),
        ("Sofia, Bulgaria", ["Sofia"], 0),
        ("U.S.A.", ["usa"], 1),
        ("an  apple", ["Apple"], 1),
        ("theatre", ["atre"], 0),
        ("Rome", ["Sofia", "rome"], 1),
        ("", ["Sofia"], 0),
    ],
)
def test_exact_match_normalises_as_methods_md_says(
    prediction: str, golds: list[str], expected: float
) -> None:
    assert exact_match(prediction, golds) == expected


def test_normalisation_deletes_punctuation_before_articles() -> None:
    assert normalize("A.b the-c, An") == "ab thec"


def test_f1_is_the_best_over_the_golds() -> None:
    assert f1("big red dog", ["red dog"]) == pytest.approx(0.8)
    assert f1("cat", ["red dog", "cat"]) == 1
    assert f1("cat", ["dog"]) == 0


def test_the_last_complete_answer_block_counts_and_the_prompt_scorer_wants_two() -> None:
    text = "<answer> Beijing </answer> .. <answer>a</answer><answer> b </answer><answer>open"
    assert extract_answer(text) == "b"
    assert extract_answer("<answer>x</answer>", least_blocks=2) is None
    assert extract_answer("<answer>example</answer><answer>x</answer>", least_blocks=2) == "x"
    assert extract_answer("none") is None


async def judged(judge: Judge, **fields: Any) -> Judgement:
    (made,) = await judge.score([turn(**fields)])
    return made


ESTONIA = {"evidence": ["Estonia\nMain export partner: Finland"]}
MONACO = {
    "question": "Name the national holiday of Monaco.",
    "evidence": ["Monaco\nNational holiday: National Day"],
}
_TEXT = "It is error number 1: operation not permitted."
EPERM = {"question": "Which number has the error of an operation?", "evidence": [f"EPERM\n{_TEXT}"]}
AUSTRIA = {"evidence": ["Austria\nInternet code: .at"]}
ONE = {"past_queries": ["country currency lev"], "past_observations": [SHOWN]}
ALL = {"past_observations": [SHOWN, SHOWN.replace("Currency: lev", "Capital: Sofia")]}


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        *((None, gold, 0) for gold in ("Sofia", "A", "The", "!!!")),
        ("Rome", "The", 0),
        # methods.md 1.7: both are empty once normalised
        ("the", "A", 1),
        ("", "A", 1),
        ("", "Sofia", 0),
    ],
)
async def test_no_answer_is_never_right_whatever_the_gold(
    answer: str | None, gold: str, expected: float
) -> None:
    made = await judged(ExactMatch(), answer=answer, golds=[gold])
    assert made.scores["outcome"] == expected


@pytest.mark.parametrize(
    ("query", "fields", "expected"),
    [
        ("country currency lev", {}, 1),  # hop 1 by field and value
        ("Bulgaria currency", {}, 1),  # hop 1 by title and field
        ("lev", {}, 0),
        ("capital of the country", {}, -1),  # of hop 2, but hop 1 comes first
        ("Bulgaria capital", ONE, 1),
        ("Bulgaria", ONE, 0),
        ("Country: currency LEV!", ONE, -1),  # asked before
        ("Bulgaria capital", ALL, -1),
        ("", {}, -1),
        ("Bulgaria currency </Bulgaria currency", {}, -1),  # a tag
        # every word of the field must be named
        ("Estonia main export partner", ESTONIA, 1),
        ("Estonia main religion", ESTONIA, 0),  # another field that shares a word with it
        ("Latvia", ESTONIA, -1),
        # a word that neither question nor passage has asks for something else
        ("Monaco national holiday", MONACO, 1),
        ("Monaco national holiday partner", MONACO, 0),
        ("national holiday", MONACO, 0),  # words of the field do not name the value
        ("national holiday day", MONACO, 1),
        ("internet code .at", AUSTRIA, 1),  # a value that is a function word
        ("internet code .be", AUSTRIA, 0),
        # a text without a field: its title, or half of what it shares with the question
        ("EPERM", EPERM, 1),
        ("number operation", EPERM, 1),
        ("number", EPERM, 0),
        ("EPERM number Peru", EPERM, 0),
        ("Peru", EPERM, -1),
        ("EPERM", EPERM | {"past_observations": ["Doc 1(Title: EPERM) It is error 1: no op"]}, 1),
        ("EPERM", EPERM | {"past_observations": [f"Doc 1(Title: EPERM) {_TEXT}"]}, -1),
    ],
)
async def test_a_query_is_scored_by_the_next_supporting_passage(
    query: str, fields: dict[str, Any], expected: float
) -> None:
    made = await judged(SlateRules(), query=query, **({"evidence": EVIDENCE} | fields))
    assert made.scores["query"] == expected


async def test_the_format_rule_scores_queries_zero_unless_empty_or_repeated() -> None:
    rules = SlateRules(query="format")
    assert (await judged(rules, query="anything", evidence=EVIDENCE)).scores["query"] == 0
    assert (await judged(rules, query="x", past_queries=["X"])).scores["query"] == -1


async def test_answers_are_plus_or_minus_one_and_empty_thinking_costs() -> None:
    assert (await judged(SlateRules(), answer="sofia")).scores == {"think": 0, "answer": 1}
    silent = await judged(SlateRules(), answer="Rome", think=" ")
    assert silent.scores == {"think": -1, "answer": -1}
    assert (await judged(SlateRules(answer="partial"), answer="Sofia city")).scores["answer"] == 0


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("<explanation>In 2018 it was.</explanation><score>+1</score>", 1),
        ("<score> -1 </score>", -1),
        ("<score>0</score>", 0),
        ("<score>1</score> then <score>-1</score>", -1),
        ("Two <score> tags: my <score>1</score>", 1),
        ("<score>7</score>", None),
        ("<score>0.5</score>", None),
        ("", None),
    ],
)
def test_only_a_ternary_last_score_block_is_valid(reply: str, expected: float | None) -> None:
    assert parse_score(reply) == expected


@pytest.mark.parametrize("text", ["", "I would say 7."])
async def test_without_a_readable_reply_columns_are_invalid(text: str) -> None:
    async def reply(request: web.Request) -> web.Response:
        return chat(text) if text else web.Response(status=400)

    async with started(lambda url: Slate(ChatEndpoint(url, "m", attempts=1)), reply) as judge:
        made = await judged(judge, query="q")
    assert (made.scores, sorted(made.invalid)) == ({}, ["query", "think"])


async def test_a_slow_rule_judge_leaves_the_event_loop_free() -> None:
    ran = threading.Event()

    class Slow(RuleJudge):
        name, columns, threaded = "slow", ("a",), True

        def judge(self, turn: JudgedTurn) -> Judgement:
            return Judgement({"a": float(ran.wait(timeout=10))})

    scoring = asyncio.create_task(judged(Slow()))
    await asyncio.sleep(0)
    ran.set()
    assert (await scoring).scores == {"a": 1.0}


TEXT: Any = "0.5"
NOTHING: Any = None


class Odd(RuleJudge):
    name, columns = "odd", ("a", "b")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([], "0 judgements"),
        ([Judgement({"c": 1.0})], "declared ones of"),
        ([Judgement({"a": TEXT})], r"judge odd returned '0.5' \(str\) in column 'a'"),
        ([{"a": 1.0}], r"\{'a': 1.0\} \(dict\) for a turn; expected a wire.messages.Judgement"),
        (None, r"judge odd returned None \(NoneType\); expected a list of Judgement"),
        ([Judgement({"a": 1.0}, explanation=NOTHING)], "the explanation None .* a text"),
        ([Judgement(NOTHING)], r"the scores None .* a number for each column"),
        ([Judgement({}, NOTHING)], r"invalid = None .* a list of columns"),
    ],
)
def test_a_judge_that_returns_something_else_is_a_fault_that_says_what(
    returned: Any, message: str
) -> None:
    with pytest.raises(InfrastructureFault, match=message):
        checked(Odd(), [turn()], returned)


async def test_the_exact_match_ablation_pays_right_answers_alone() -> None:
    turns = [turn(answer="sofia"), turn(answer="Rome"), turn(query="capital of Bulgaria")]
    right, wrong, search = [judgement.scores for judgement in await SlateEm().score(turns)]
    assert (right, wrong) == ({"think": 0, "answer": 1}, {"think": 0, "answer": 0})
    assert search == {"think": 0, "query": 0}
