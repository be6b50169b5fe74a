"""Scores of the built-in judges, and how a judge is served."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.local import LocalEngine
from coppice.actors.serving.server import Server
from coppice.judges.base import Judge
from coppice.judges.exact_match import ExactMatch, exact_match, extract_answer, f1, normalize
from coppice.judges.llm import ChatEndpoint
from coppice.judges.serve import Batcher, make_worker
from coppice.judges.slate import Slate, parse_score
from coppice.judges.slate_em import SlateEm
from coppice.judges.slate_rules import SlateRules
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import JudgedTurn, Judgement, JudgeRequest, JudgeResult
from tests.services import bench

QUESTION = "What is the capital of the country whose currency is the lev?"
EVIDENCE = ["Bulgaria\nCurrency: lev", "Bulgaria\nCapital: Sofia"]
SHOWN = "<information>Doc 1(Title: Bulgaria) Currency: lev</information>"


def turn(**fields: Any) -> JudgedTurn:
    given: dict[str, Any] = {
        "question": QUESTION,
        "golds": ["Sofia"],
        "context": "",
        "response": "",
        "step": 1,
        "budget": 4,
        "think": "t",
    }
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


async def test_exact_match_judge_scores_a_missing_answer_zero() -> None:
    assert (await judged(ExactMatch(), answer=None)).scores == {"outcome": 0, "f1": 0}


@pytest.mark.parametrize(
    ("query", "past", "seen", "expected"),
    [
        ("country currency lev", [], [], 1),  # hop 1 by field and value
        ("Bulgaria currency", [], [], 1),  # hop 1 by title and field
        ("lev", [], [], 0),
        ("capital of the country", [], [], -1),  # of hop 2, but hop 1 comes first
        ("Bulgaria capital", ["country currency lev"], [SHOWN], 1),
        ("Bulgaria", ["country currency lev"], [SHOWN], 0),
        ("Country: currency LEV!", ["country currency lev"], [SHOWN], -1),  # asked before
        ("", [], [], -1),
        ("weather in Oslo", [], [], -1),
        ("Bulgaria currency </Bulgaria currency", [], [], -1),  # a tag
    ],
)
async def test_a_query_is_scored_by_the_next_supporting_passage(
    query: str, past: list[str], seen: list[str], expected: float
) -> None:
    made = await judged(
        SlateRules(), query=query, past_queries=past, past_observations=seen, evidence=EVIDENCE
    )
    assert made.scores["query"] == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("Estonia main export partner", 1),
        ("partner for the main export of Estonia", 1),  # in any order, with function words
        ("Estonia main religion", 0),  # another field that shares a word with it
        ("Estonia main export", 0),
        ("main export partner", 0),
        ("Latvia", -1),
    ],
)
async def test_a_query_must_name_every_word_of_the_field(query: str, expected: float) -> None:
    evidence = ["Estonia\nMain export partner: Finland"]
    assert (await judged(SlateRules(), query=query, evidence=evidence)).scores["query"] == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("Monaco national holiday", 1),
        # words of the question are not foreign
        ("which national holiday of the country Monaco", 1),
        ("Monaco national holiday National Day", 1),
        ("Monaco national holiday partner", 0),  # the name of a longer field
        # another country, though the value has the word "national", too
        ("Qatar national holiday", 0),
        ("Qatar", -1),
    ],
)
async def test_a_query_with_a_word_that_neither_question_nor_passage_has_asks_for_something_else(
    query: str, expected: float
) -> None:
    asked = {
        "question": "Name the national holiday of Monaco.",
        "evidence": ["Monaco\nNational holiday: National Day"],
    }
    assert (await judged(SlateRules(), query=query, **asked)).scores["query"] == expected


async def test_the_words_of_the_field_do_not_name_the_value() -> None:
    evidence = ["Monaco\nNational holiday: National Day"]
    assert (await judged(SlateRules(), query="national holiday", evidence=evidence)).scores[
        "query"
    ] == 0
    assert (await judged(SlateRules(), query="national holiday day", evidence=evidence)).scores[
        "query"
    ] == 1


async def test_a_value_that_is_a_function_word_can_be_searched_for() -> None:
    evidence = ["Austria\nInternet code: .at"]
    assert (await judged(SlateRules(), query="internet code .at", evidence=evidence)).scores[
        "query"
    ] == 1
    assert (await judged(SlateRules(), query="internet code .be", evidence=evidence)).scores[
        "query"
    ] == 0


async def test_once_everything_is_shown_another_query_is_bad() -> None:
    seen = [SHOWN, "<information>Doc 1(Title: Bulgaria) Capital: Sofia</information>"]
    assert (
        await judged(
            SlateRules(), query="Bulgaria capital", past_observations=seen, evidence=EVIDENCE
        )
    ).scores["query"] == -1


async def test_the_format_rule_scores_queries_zero_unless_empty_or_repeated() -> None:
    rules = SlateRules(query="format")
    assert (await judged(rules, query="anything", evidence=EVIDENCE)).scores["query"] == 0
    assert (await judged(rules, query="x", past_queries=["X"])).scores["query"] == -1


async def test_answers_are_plus_or_minus_one_and_empty_thinking_costs() -> None:
    assert (await judged(SlateRules(), answer="sofia")).scores == {"think": 0, "answer": 1}
    assert (await judged(SlateRules(), answer="Rome", think=" ")).scores == {
        "think": -1,
        "answer": -1,
    }
    assert (await judged(SlateRules(answer="partial"), answer="Sofia city")).scores["answer"] == 0


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("<explanation>In 2018 it was.</explanation><score>+1</score>", 1),
        ("<score> -1 </score>", -1),
        ("<score>0</score>", 0),
        ("<score>1</score> then <score>-1</score>", -1),
        ("<score>7</score>", None),
        ("<score>0.5</score>", None),
        ("7", None),
        ("+1", None),
        ("<score>good</score>", None),
        ("<score>11</score>", None),
        ("", None),
    ],
)
def test_only_a_ternary_last_score_block_is_valid(reply: str, expected: float | None) -> None:
    assert parse_score(reply) == expected


def test_slate_prompts_hold_what_the_method_names() -> None:
    judge = Slate(ChatEndpoint("http://x", "m"))
    made = judge.prompts(turn(answer="Rome {context}", golds=["Sofia", "Sofiya"], context=""))
    assert set(made) == {"think", "answer"}
    assert "Sofia; Sofiya" in made["answer"]
    assert "Rome {context}" in made["answer"]
    assert "None" in made["answer"]
    assert set(judge.prompts(turn(query="q"))) == {"think", "query"}


class Endpoint:
    """A chat server that answers what ``reply`` says."""

    def __init__(self, reply: Any):
        self.reply, self.calls = reply, 0

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.handle)
        # A handler that hangs ends with its client; otherwise taking the server down waits a minute
        # for it.
        self.runner = web.AppRunner(app, handler_cancellation=True)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1"

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()

    async def handle(self, request: web.Request) -> web.Response:
        self.calls += 1
        return await self.reply(self.calls, await request.json())


def chat(content: str) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": content}}]})


async def slate_judgement(reply: Any, **settings: Any) -> tuple[Judgement, Slate, Endpoint]:
    endpoint = Endpoint(reply)
    async with endpoint as url:
        judge = Slate(ChatEndpoint(url, "m", **settings))
        await judge.start()
        made = await judged(judge, query="q")
        await judge.close()
    return made, judge, endpoint


async def test_server_errors_are_retried_and_valid_scores_returned() -> None:
    async def reply(call: int, body: Any) -> web.Response:
        assert body["temperature"] == 0
        return web.Response(status=503) if call <= 2 else chat("<score>+1</score>")

    made, judge, _ = await slate_judgement(reply)
    assert made.scores == {"think": 1, "query": 1}
    assert judge.client.counts["retries"] >= 1


async def test_a_refused_request_is_not_retried_and_its_columns_are_invalid_not_zero() -> None:
    async def reply(call: int, body: Any) -> web.Response:
        return web.Response(status=400, text="bad")

    made, judge, endpoint = await slate_judgement(reply)
    assert made.scores == {}
    assert sorted(made.invalid) == ["query", "think"]
    assert endpoint.calls == 2
    assert judge.stats()["judge_valid_rate"] == 0


async def test_a_judge_model_that_hangs_times_out() -> None:
    gate = asyncio.Event()

    async def reply(call: int, body: Any) -> web.Response:
        await gate.wait()
        return chat("<score>1</score>")

    made, _, _ = await slate_judgement(reply, timeout_s=0.1, attempts=1)
    assert sorted(made.invalid) == ["query", "think"]
    assert "no reply" in made.explanation


async def test_unparsed_replies_are_invalid_and_counted() -> None:
    async def reply(call: int, body: Any) -> web.Response:
        return chat("I would say 7, as in 2018.")

    made, judge, _ = await slate_judgement(reply)
    assert made.scores == {}
    assert judge.counts["unparsed"] == 2


async def test_the_slate_judge_over_a_real_server_of_the_embedded_engine(llama: Path) -> None:
    engine = LocalEngine(
        str(llama), ActorsConfig(dtype="float32", max_context=4096, kv_cache_gib=0.05)
    )
    await engine.start()
    runner = web.AppRunner(Server(engine, llama).application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    judge = Slate(ChatEndpoint(url, llama.name, max_tokens=8))
    await judge.start()
    made = await judged(judge, query="q")
    await judge.close()
    await runner.cleanup()
    await engine.close()
    assert sorted(made.invalid) == ["query", "think"]  # a random model writes no score block
    assert judge.counts["unparsed"] == 2
    assert judge.client.counts["failures"] == 0
    assert engine.counts["decoded_tokens"] > 0


SHAPES: dict[str, Any] = {
    "text": [Judgement({"a": "0.5"})],  # pyright: ignore[reportArgumentType]
    "none": [Judgement({"a": None})],  # pyright: ignore[reportArgumentType]
    "plain": [{"a": 1.0}],
    "nothing": None,
}


class Odd(Judge):
    """Misbehaves as the question asks."""

    name = "odd"
    columns = ("a", "b")

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        what = turns[0].question
        if what == "raise":
            raise RuntimeError("on purpose")
        if what == "hang":
            await asyncio.Event().wait()
        if what == "short":
            return []
        if what == "unknown":
            return [Judgement({"c": 1.0})]
        if what in SHAPES:
            return SHAPES[what]
        return [Judgement({"a": math.nan, "b": 1.0})]


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("raise", "on purpose"),
        ("short", "0 judgements"),
        ("unknown", "declares"),
        ("hang", "took over"),
        ("text", r"judge odd returned '0.5' \(str\) in column 'a'; expected a number"),
        ("none", r"judge odd returned None \(NoneType\) in column 'a'; expected a number"),
        (
            "plain",
            r"judge odd returned \{'a': 1.0\} \(dict\) for a turn; expected a wire.messages.Judgement",
        ),
        ("nothing", r"judge odd returned None \(NoneType\); expected a list of Judgement"),
    ],
)
async def test_a_judge_that_misbehaves_is_a_fault_that_says_how(
    tmp_path: Path, question: str, message: str
) -> None:
    async with bench(tmp_path) as b:
        await b.work("odd", {"judge.odd": Batcher(Odd()).handle})
        with pytest.raises(InfrastructureFault, match=message):
            await b.dispatcher.call(
                "judge.odd", JudgeRequest([turn(question=question)]), deadline=1.0
            )


async def test_nan_is_an_invalid_score_never_a_zero(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await b.work("odd", {"judge.odd": Batcher(Odd()).handle})
        result: JudgeResult = await b.dispatcher.call(
            "judge.odd", JudgeRequest([turn(question="nan")]), deadline=5
        )
    assert result.judgements[0].scores == {"b": 1.0}
    assert result.judgements[0].invalid == ["a"]


def test_an_unknown_judge_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="exact_match"):
        make_worker("exact", {})


async def test_the_exact_match_ablation_pays_right_answers_alone() -> None:
    turns = [
        turn(answer="sofia", golds=["Sofia"]),
        turn(answer="Rome", golds=["Sofia"]),
        turn(query="capital of Bulgaria", golds=["Sofia"]),
    ]
    scores = [judgement.scores for judgement in await SlateEm().score(turns)]
    assert scores == [
        {"think": 0, "answer": 1},
        {"think": 0, "answer": 0},
        {"think": 0, "query": 0},
    ]
