"""coppice dev judge-bench: its records, its builder, and the measurement of judges."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.judges.base import Judge
from coppice.research.judge_bench import building, main
from coppice.research.judge_bench.building import CATEGORIES, Item, build, category
from coppice.research.judge_bench.measuring import SHIPPED, baseline, measure
from coppice.tools.finetuning import records
from coppice.tools.finetuning.judging import Answers, JudgeSpec, StepAnswer, lasting
from coppice.tools.finetuning.records import THRESHOLD, Labelled, Trajectory, judged_turn, recorded
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import JudgedTurn, Judgement
from tests.tools.said import Patch, Said

replace = msgspec.structs.replace
ENDPOINT: dict[str, Any] = {"url": "http://127.0.0.1:1/v1", "model": "m"}
TURN = JudgedTurn(
    question="Who?", golds=["Ada"], context="Question: Who?\nThinking: a", step=2, budget=3,
    think="b", query="c", response="<think> b </think> <search> c </search>", past_queries=["q"],
    past_observations=["seen"], transcript="<think> a </think> <search> q </search>seen",
    observation="\n<information>Doc 1(Title: T) F: v</information>\n", evidence=["T\nF: v"],
)  # fmt: skip


def labelled(name: str, outcome: int, scores: list[float], asked: str = "", gold: str = "g") -> Any:
    question = asked or f"question of {name}?"
    steps = [
        Labelled(context=question, response=f"{name} step {i}", score_a=s, score_b=s, score=s)
        for i, s in enumerate(scores)
    ]
    told: Any = {"id": name, "data_source": "d", "question": question, "golden_answers": [gold]}
    return Trajectory(**told, outcome=1 if outcome else 0, steps=steps)


def item(name: str, outcome: int, scores: list[float]) -> Item:
    ((made,), _) = build([labelled(name, outcome, scores)], 1, 0.652)
    return made


def test_a_turn_survives_being_recorded() -> None:
    step = recorded(TURN)
    assert step.context == f"Who?\n\n{TURN.transcript}"
    assert step.response == TURN.response + (TURN.observation or "")
    held = replace(labelled("x", 1, [1.0], "Who?", "Ada"), evidence=TURN.evidence)
    assert judged_turn(held, step) == TURN


def test_a_record_is_read_and_a_bad_one_refused_with_its_line(tmp_path: Path) -> None:
    path, items = tmp_path / "b.jsonl", [item("x", 1, [0.9]), item("y", 1, [0.9])]
    records.write(path, items)
    assert records.read([path], Item) == items
    row = msgspec.to_builtins(items[1])
    for change, message in (
        ({"category": "good"}, "category"),
        ({"steps": [row["steps"][0] | {"score": 1.2}]}, "score"),
        ({"id": "x"}, "second time"),
    ):
        path.write_bytes(b"\n".join(map(msgspec.json.encode, (items[0], row | change))))
        with pytest.raises(ValueError, match=rf"b\.jsonl:2.*{message}"):
            records.read([path], Item)


@given(st.integers(0, 60), st.lists(st.integers(0, 30), min_size=1, max_size=5))
def test_shares_are_as_even_as_what_is_available_allows(size: int, available: list[int]) -> None:
    shares = building.even(size, available)
    assert sum(shares) == min(size, sum(available))
    assert all(share <= most for share, most in zip(shares, available, strict=True))
    unfilled = [share for share, most in zip(shares, available, strict=True) if share < most]
    assert all(max(shares) - share <= 1 for share in unfilled)


def test_the_categories_are_balanced_and_the_report_says_what_was_left_out() -> None:
    pool = [
        labelled(f"{kind}-{i}", outcome, [score] * (2 if i == 9 else 1))
        for kind, (outcome, score) in enumerate([(1, 0.9), (1, 0.1), (0, 0.9), (0, 0.1)])
        for i in range(10 if kind else 2)
    ]
    items, report = build(pool, 14, 0.652)
    assert report.taken == {"correct_good": 2, "correct_bad": 4, "wrong_good": 4, "wrong_bad": 4}
    assert report.dropped == {"not needed for the balance": 18}
    assert (len(items), report.multi_step, report.steps, report.good_steps) == (14, 3, 17, 7)
    assert all(step.label == (step.score > 0.652) for item in items for step in item.steps)


def test_duplicates_excluded_ids_and_excluded_questions_stay_out() -> None:
    twin = replace(labelled("a", 1, [1.0]), id="twin")
    rows = [labelled("a", 1, [1.0]), twin, labelled("b", 0, [1.0]), labelled("c", 0, [0.0])]
    rows.append(labelled("d", 1, [0.0], gold=""))
    exclude = [labelled("b", 1, [0.3], "else?"), labelled("z", 1, [0.3], "question of c?")]
    items, report = build(rows, 10, 0.652, exclude=exclude)
    assert [item.id for item in items] == ["a"]
    assert report.dropped == {
        "the same question and steps as another": 1, "no gold answer": 1,
        "id or question is in the excluded file": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match="no trajectory is left"):
        build(rows[2:3], 1, 0.652, exclude=exclude)


def test_the_mean_threshold_is_the_mean_over_steps() -> None:
    pair = [labelled("a", 1, [1.0, 1.0, 0.2]), labelled("b", 0, [0.6])]
    items, report = build(pair, 2, None)
    assert report.threshold == pytest.approx(0.7)
    assert [[step.label for step in item.steps] for item in items] == [[1, 1, 0], [0]]
    assert [item.category for item in items] == ["correct_good", "wrong_bad"]
    assert category(0, [0.652], 0.652) == "wrong_bad"


BENCH = [item("a", 1, [0.9, 0.1]), item("b", 0, [0.9]), item("c", 0, [0.1])]


def test_an_invalid_output_is_a_wrong_step() -> None:
    row = measure("j", BENCH, {"a#1": 0.7, "a#2": None, "b#1": 0.652, "c#1": 0.0}, 0.652)
    assert (row.accuracy.mean, row.accuracy.n, row.valid) == (0.5, 4, 0.75)
    assert row.multi_step is not None
    assert (row.multi_step.mean, row.multi_step.n) == (0.5, 2)


def test_baselines_are_what_they_say() -> None:
    mostly_bad = [*BENCH, item("d", 1, [0.0])]
    assert baseline("majority", mostly_bad, 0.652).accuracy.mean == pytest.approx(3 / 5)
    assert baseline("constant 0.9", mostly_bad, 0.652).accuracy.mean == pytest.approx(2 / 5)
    assert baseline("first-turn", BENCH, 0.652).accuracy.mean == 0.5
    many = [item(str(i), 1, [0.9]) for i in range(400)]
    assert 0.4 < baseline("random", many, 0.652).accuracy.mean < 0.6


class Told(Judge):
    """Scores "good" 1, "bad" 0 and "mute" not at all. before: what happens at each step; asked: the
    responses so far; failed: an LLM judge's count of failures."""

    name, columns, concurrency = "told", ("process",), 1
    asked: ClassVar[list[str]] = []
    before: Any = lambda: None
    failed = 0

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        response = turns[0].response
        Told.asked.append(response)
        if Told.before() == "hang" and "mute" in response:
            await asyncio.Event().wait()
        if "mute" in response or Told.failed:
            return [Judgement({}, ["process"], "I am no judge")]
        return [Judgement({"process": float("good" in response)})]


@pytest.fixture(autouse=True)
def new_judge() -> None:
    Told.asked, Told.before, Told.failed = [], lambda: None, 0


def fails() -> None:
    Told.failed += 1


def breaks() -> None:
    if len(Told.asked) > 2:
        raise InfrastructureFault("the endpoint is gone")


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    words, scores = "good bad good mute bad".split(), [0.9, 0.1, 0.1, 0.9, 0.1]
    items = [item(str(i), i % 2, [score]) for i, score in enumerate(scores)]
    for i, one in enumerate(items):
        items[i] = replace(one, steps=[replace(one.steps[0], response=f"{words[i]} {i}")])
    records.write(tmp_path / "bench.jsonl", items)
    return tmp_path / "bench.jsonl"


Measured = Callable[..., str]


@pytest.fixture
def measured(said: Said, bench: Path, tmp_path: Path) -> Measured:
    def of(words: str = "", status: int = 0) -> str:
        given = f"measure --bench {bench} --out {tmp_path}/out {words}"
        return said(main, *given.split(), status=status)

    return of


TOLD = f"{Told.__module__}:Told"


def test_several_judges_make_one_table(measured: Measured, tmp_path: Path) -> None:
    words = f"--judge {TOLD} --judge pprm_rules --option view=retrieval --json"
    found = json.loads(measured(f"{words} --baseline constant 1"))
    names = ["majority class", "constant 1", TOLD, "pprm_rules view=retrieval"]
    assert [row["judge"] for row in found["rows"]] == names
    told = found["rows"][2]
    assert (told["accuracy"]["mean"], told["accuracy"]["n"], told["valid"]) == (0.6, 5, 0.8)
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == found


def test_an_evaluation_goes_on_where_a_judge_failed(measured: Measured, tmp_path: Path) -> None:
    Told.before = breaks
    assert "the endpoint is gone" in measured(f"--judge {TOLD}", status=1)
    assert len(Answers(tmp_path / "out" / "answers.jsonl").found) == 2
    Told.asked, Told.before = [], lambda: None
    for _ in range(2):
        assert "0.600" in measured(f"--judge {TOLD}")
        assert sorted(Told.asked) == ["bad 4", "good 2", "mute 3"], "no answer is asked for again"


def test_a_failing_endpoint_is_no_invalid_output(measured: Measured, tmp_path: Path) -> None:
    Told.before = fails
    assert "5 steps failed" in measured(f"--judge {TOLD}", status=1)
    assert Answers(tmp_path / "out" / "answers.jsonl").found == {}
    assert "0.000" in measured(f"--judge {TOLD} --count-failed")


def test_an_absent_judge_ends_the_evaluation_soon(bench: Path, measured: Measured) -> None:
    Told.before = fails
    records.write(bench, [item(str(number), 1, [0.9]) for number in range(50)])
    assert "10 steps in a row" in measured(f"--judge {TOLD} --count-failed", status=1)
    assert Told.failed == 10


def test_a_judge_that_hangs_fails_at_its_step(measured: Measured, tmp_path: Path) -> None:
    Told.before = lambda: "hang"
    told = measured(f"--judge {TOLD} --deadline 0.05", status=1)
    assert "1 steps failed, the first is 3#1: no judgement within 0.05 s (--deadline)" in told
    assert f"{TOLD}: 4 of 5 steps" in told
    assert len(Answers(tmp_path / "out" / "answers.jsonl").found) == 4


def test_answers_by_another_plug_in_are_not_gone_on_with(
    measured: Measured, tmp_path: Path, monkeypatch: Patch
) -> None:
    plug_in = tmp_path / "a_judge_of_mine.py"
    plug_in.write_text(f"from {Told.__module__} import Told\n\n\nclass Mine(Told):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    measured("--judge a_judge_of_mine:Mine")
    plug_in.write_text(plug_in.read_text() + "    # says something else\n")
    assert "begun with judges =" in measured("--judge a_judge_of_mine:Mine", status=2)


def test_other_settings_are_refused_but_another_address_is_not(measured: Measured) -> None:
    measured(f"--judge {TOLD}")
    told = measured(f"--judge {TOLD} --threshold 0.5", status=2)
    assert "begun with threshold = 0.652" in told
    one, moved, other = (
        lasting([JudgeSpec("j", "pprm", {"endpoint": ENDPOINT | change})])
        for change in ({}, {"url": "http://127.0.0.1:2/v1", "concurrency": 3}, {"model": "n"})
    )
    assert one == moved != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--judge slate_rules", "columns"),
        ("--judge nope:X", "ModuleNotFoundError: No module named 'nope'; expected module:Class"),
        ("--deadline 0", "--deadline: 0: expected a number, more than 0"),
        ("--judge pprm_rules --judge pprm_rules", "--name"),
        ("--judge tictactoe_minimax", "expected a judge"),
        ("--baseline best", "majority, random"),
        ("--baseline constant nan", "--baseline constant nan: expected majority"),
        ("--bench nowhere.jsonl", "--bench nowhere.jsonl cannot be read (No such file"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: str, message: str, measured: Measured, tmp_path: Path
) -> None:
    assert message in measured(arguments, status=2)
    assert not (tmp_path / "out").exists()


def test_a_torn_answer_is_asked_again_and_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    Answers(path).add(StepAnswer("j", "a#1", 0.5))
    with path.open("ab") as file:
        file.write(b'{"judge":"j","ste')
    again = Answers(path)
    assert list(again.found) == [("j", "a#1")]
    again.add(StepAnswer("j", "a#2", None))
    assert len(Answers(path).found) == 2
    path.write_bytes(path.read_bytes() + b"nonsense\n")
    with pytest.raises(InfrastructureFault, match=r"answers\.jsonl:3: .*remove that line"):
        Answers(path)


def test_the_shipped_set_is_consistent_and_no_class_rules_it() -> None:
    items = records.read([SHIPPED], Item)
    assert len(items) == 240
    for one in items:
        assert one.category == category(one.outcome, [step.score for step in one.steps], THRESHOLD)
        for step in one.steps:
            assert step.label == records.label(step.score, THRESHOLD)
            assert step.score == pytest.approx((step.score_a + step.score_b) / 2)
            assert abs(step.score_a - step.score_b) <= 0.4 + 1e-9
            assert step.context.startswith(one.question)
    assert baseline("majority", items, THRESHOLD).accuracy.mean < 0.6
    counted = [sum(one.category == name for one in items) for name in CATEGORIES]
    assert min(counted) >= 0.7 * max(counted)
