"""NVProcessBench: its records, its builder, and the measurement of judges."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.judges.base import Judge
from coppice.judges.pprm import messages, read_templates
from coppice.research.judge_bench import building, main
from coppice.research.judge_bench.building import CATEGORIES, Item, build, category
from coppice.research.judge_bench.measuring import SHIPPED, baseline, measure
from coppice.tools.finetuning import records
from coppice.tools.finetuning.judging import Answers, JudgeSpec, StepAnswer, lasting
from coppice.tools.finetuning.records import THRESHOLD, Labelled, Trajectory, judged_turn, recorded
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import JudgedTurn, Judgement

ENDPOINT: dict[str, Any] = {"url": "http://127.0.0.1:1/v1", "model": "m"}
TURN = JudgedTurn(
    question="Who?",
    golds=["Ada"],
    context="Question: Who?\nThinking: a",
    response="<think> b </think> <search> c </search>",
    step=2,
    budget=3,
    think="b",
    query="c",
    observation="\n<information>Doc 1(Title: T) F: v</information>\n",
    past_queries=["q"],
    past_observations=["seen"],
    evidence=["T\nF: v"],
    transcript="<think> a </think> <search> q </search>seen",
)


def labelled(
    name: str,
    outcome: int,
    scores: list[float],
    question: str = "",
    golds: tuple[str, ...] = ("g",),
) -> Any:
    question = question or f"question of {name}?"
    steps = [
        Labelled(context=question, response=f"{name} step {i}", score_a=s, score_b=s, score=s)
        for i, s in enumerate(scores)
    ]
    return Trajectory(
        id=name, data_source="d", question=question, golden_answers=list(golds),
        outcome=1 if outcome else 0, steps=steps,
    )  # fmt: skip


def item(name: str, outcome: int, scores: list[float]) -> Item:
    ((made,), _) = build([labelled(name, outcome, scores)], 1, 0.652)
    return made


# ----------------------------------------------------------------------------------------------
# records


def test_the_category_is_the_outcome_and_the_mean_step_score() -> None:
    assert category(1, [1.0, 0.5], 0.652) == "correct_good"
    assert category(1, [1.0, 0.0], 0.652) == "correct_bad"
    assert category(0, [0.8], 0.652) == "wrong_good"
    assert category(0, [0.652], 0.652) == "wrong_bad"


def test_a_turn_survives_being_recorded() -> None:
    step = recorded(TURN)
    assert step.context == f"Who?\n\n{TURN.transcript}"
    assert step.response == TURN.response + (TURN.observation or "")
    held = labelled("x", 1, [1.0], "Who?", ("Ada",))
    held = msgspec.structs.replace(held, evidence=TURN.evidence)
    assert judged_turn(held, step) == TURN


def test_a_step_of_context_and_response_alone_makes_the_same_prompt_of_a_pprm() -> None:
    whole = recorded(TURN)
    bare = msgspec.structs.replace(whole, turn=None)
    held, texts = labelled("x", 1, [1.0], "Who?"), read_templates()
    assert messages(judged_turn(held, bare), texts) == messages(TURN, texts)
    foreign = msgspec.structs.replace(bare, context="Another wording of it?")
    shown = messages(judged_turn(held, foreign), texts)[1]["content"]
    assert "Another wording of it?" in shown


STEP = {"context": "q?", "response": "r", "score_a": 1.0, "score_b": 0.5, "score": 0.75, "label": 1}
FIVE = {
    "id": "1", "data_source": "nq", "question": "q?", "golden_answers": ["a"], "outcome": 1,
    "steps": [STEP], "category": "correct_good",
}  # fmt: skip


def test_a_record_without_optional_fields_is_read(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps(FIVE) + "\n")
    (read,) = records.read([path], Item)
    assert read.steps[0].turn is None
    assert msgspec.to_builtins(read) == FIVE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outcome": 2}, "outcome"),
        ({"category": "good"}, "category"),
        ({"steps": []}, "steps"),
        ({"more": 1}, "more"),
        ({"steps": [{**STEP, "score": 1.2}]}, "score"),
        ({"id": "1"}, "second time"),
    ],
)
def test_a_bad_record_is_refused_with_its_line(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps(FIVE) + "\n" + json.dumps({**FIVE, "id": "2", **change}) + "\n")
    with pytest.raises(ValueError, match=rf"b\.jsonl:2.*{message}"):
        records.read([path], Item)


# ----------------------------------------------------------------------------------------------
# builder


@given(st.integers(0, 60), st.lists(st.integers(0, 30), min_size=1, max_size=5))
def test_shares_are_as_even_as_what_is_available_allows(size: int, available: list[int]) -> None:
    shares = building.even(size, available)
    assert sum(shares) == min(size, sum(available))
    assert all(share <= most for share, most in zip(shares, available, strict=True))
    unfilled = [share for share, most in zip(shares, available, strict=True) if share < most]
    assert all(max(shares) - share <= 1 for share in unfilled)


def pool() -> list[Any]:
    made = []
    for kind, (outcome, score) in enumerate([(1, 0.9), (1, 0.1), (0, 0.9), (0, 0.1)]):
        for i in range(10 if kind else 2):
            made.append(labelled(f"{kind}-{i}", outcome, [score] * (2 if i == 9 else 1)))
    return made


def test_the_categories_are_balanced_and_the_report_says_what_was_left_out() -> None:
    items, report = build(pool(), 14, 0.652)
    assert report.taken == {"correct_good": 2, "correct_bad": 4, "wrong_good": 4, "wrong_bad": 4}
    assert report.pool == {"correct_good": 2, "correct_bad": 10, "wrong_good": 10, "wrong_bad": 10}
    assert (report.trajectories, report.missing) == (32, 0)
    assert report.dropped == {"not needed for the balance": 18}
    assert (len(items), report.multi_step, report.steps, report.good_steps) == (14, 3, 17, 7)
    assert {"1-9", "2-9", "3-9"} <= {item.id for item in items}
    assert all(step.label == (step.score > 0.652) for item in items for step in item.steps)


def test_duplicates_excluded_ids_and_excluded_questions_stay_out() -> None:
    twin = msgspec.structs.replace(labelled("a", 1, [1.0]), id="twin")
    rows = [labelled("a", 1, [1.0]), twin, labelled("b", 0, [1.0]), labelled("c", 0, [0.0])]
    rows.append(labelled("d", 1, [0.0], golds=("",)))
    exclude = [labelled("b", 1, [0.3], "else?"), labelled("z", 1, [0.3], "question of c?")]
    items, report = build(rows, 10, 0.652, exclude=exclude)
    assert [item.id for item in items] == ["a"]
    assert report.dropped == {
        "the same question and steps as another": 1,
        "id or question is in the excluded file": 2,
        "no gold answer": 1,
    }
    with pytest.raises(ValueError, match="no trajectory is left"):
        build(rows[2:3], 1, 0.652, exclude=exclude)


def test_the_mean_threshold_is_the_mean_over_steps() -> None:
    pair = [labelled("a", 1, [1.0, 1.0, 0.2]), labelled("b", 0, [0.6])]
    items, report = build(pair, 2, None)
    assert report.threshold == report.mean_score == pytest.approx(0.7)
    assert [[step.label for step in item.steps] for item in items] == [[1, 1, 0], [0]]
    assert [item.category for item in items] == ["correct_good", "wrong_bad"]


# ----------------------------------------------------------------------------------------------
# metric

BENCH = [item("a", 1, [0.9, 0.1]), item("b", 0, [0.9]), item("c", 0, [0.1])]


def test_an_invalid_output_is_a_wrong_step() -> None:
    row = measure("j", BENCH, {"a#1": 0.7, "a#2": None, "b#1": 0.652, "c#1": 0.0}, 0.652)
    assert (row.accuracy.mean, row.accuracy.n, row.valid) == (0.5, 4, 0.75)
    assert {name: found.mean for name, found in row.by_category.items()} == {
        "correct_bad": 0.5, "wrong_good": 0.0, "wrong_bad": 1.0,
    }  # fmt: skip
    assert {name: (found.mean, found.n) for name, found in row.by_steps.items()} == {
        "single-step": (0.5, 2), "multi-step": (0.5, 2),
    }  # fmt: skip


def test_baselines_are_what_they_say() -> None:
    mostly_bad = [*BENCH, item("d", 1, [0.0])]
    assert baseline("majority", mostly_bad, 0.652).accuracy.mean == pytest.approx(3 / 5)
    assert baseline("constant 0.9", mostly_bad, 0.652).accuracy.mean == pytest.approx(2 / 5)
    assert baseline("constant 0.652", mostly_bad, 0.652).accuracy.mean == pytest.approx(3 / 5)
    later = msgspec.structs.replace(BENCH[0].steps[1], context="question of a?\n\nearlier")
    told = [msgspec.structs.replace(BENCH[0], steps=[BENCH[0].steps[0], later])]
    assert baseline("first-turn", told, 0.652).accuracy.mean == 1.0
    assert baseline("first-turn", BENCH, 0.652).accuracy.mean == 0.5
    many = [item(str(i), 1, [0.9]) for i in range(400)]
    assert 0.4 < baseline("random", many, 0.652).accuracy.mean < 0.6


# ----------------------------------------------------------------------------------------------
# command


class Told(Judge):
    """Scores a step by its label as the test's responses tell it: "good" 1, "bad" 0, "mute" not at
    all."""

    name, columns = "told", ("process",)
    asked: list[str] = []

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        Told.asked += [turn.response for turn in turns]
        return [self.one(turn) for turn in turns]

    def one(self, turn: JudgedTurn) -> Judgement:
        if "mute" in turn.response:
            return Judgement({}, ["process"], "I am no judge")
        return Judgement({"process": float("good" in turn.response)})


class Breaks(Told):
    """Fails from its third step on, as long as ``broken``."""

    name = "breaks"
    concurrency = 1
    broken = True
    asked: list[str] = []

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        Breaks.asked += [turn.response for turn in turns]
        if Breaks.broken and len(Breaks.asked) > 2:
            raise InfrastructureFault("the endpoint is gone")
        return [self.one(turn) for turn in turns]


class Silent(Told):
    """An LLM judge whose endpoint fails: it answers that the column is invalid and counts the
    failure."""

    name = "silent"
    concurrency = 1
    failed = 0

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        Silent.failed += 1
        return [Judgement({}, ["process"], "no connection") for _ in turns]

    def stats(self) -> dict[str, float]:
        return {"failed": Silent.failed}


class Wild(Told):
    """Scores outside of the range of a step."""

    name = "wild"

    def one(self, turn: JudgedTurn) -> Judgement:
        return Judgement({"process": 4.0})


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    path = tmp_path / "bench.jsonl"
    said = ["good", "bad", "good", "mute", "bad"]
    items = []
    for number, (word, score) in enumerate(zip(said, [0.9, 0.1, 0.1, 0.9, 0.1], strict=True)):
        one = item(str(number), number % 2, [score])
        step = msgspec.structs.replace(one.steps[0], response=f"{word} {number}")
        items.append(msgspec.structs.replace(one, steps=[step]))
    records.write(path, items)
    return path


def run(bench: Path, out: Path, *arguments: str) -> int:
    return main(["measure", "--bench", str(bench), "--out", str(out), *arguments])


def spec(judge: type[Judge]) -> str:
    return f"{judge.__module__}:{judge.__name__}"


def test_several_judges_make_one_table_beside_the_majority_class(
    bench: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--judge {spec(Told)} --judge pprm_rules --option view=retrieval --json"
    code = run(bench, tmp_path / "out", *words.split(), "--baseline", "constant", "1")
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [row["judge"] for row in found["rows"]] == [
        "majority class", "constant 1", spec(Told), "pprm_rules view=retrieval",
    ]  # fmt: skip
    told = found["rows"][2]
    assert (told["accuracy"]["mean"], told["accuracy"]["n"], told["valid"]) == (0.6, 5, 0.8)
    assert found["rows"][0]["accuracy"]["mean"] == 0.6
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == found


def test_an_evaluation_goes_on_where_a_judge_failed(
    bench: Path, tmp_path: Path, capsys: Any
) -> None:
    Breaks.asked, Breaks.broken = [], True
    assert run(bench, tmp_path / "out", "--judge", spec(Breaks)) == 1
    assert "the endpoint is gone" in capsys.readouterr().err
    assert len(Answers(tmp_path / "out" / "answers.jsonl").found) == 2
    Breaks.asked, Breaks.broken = [], False
    assert run(bench, tmp_path / "out", "--judge", spec(Breaks)) == 0
    assert sorted(Breaks.asked) == ["bad 4", "good 2", "mute 3"]
    assert "0.600" in capsys.readouterr().out
    Breaks.asked = []
    assert run(bench, tmp_path / "out", "--judge", spec(Breaks)) == 0
    assert Breaks.asked == []


def test_an_endpoint_that_fails_is_not_an_invalid_output(
    bench: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run(bench, tmp_path / "out", "--judge", spec(Silent)) == 1
    assert "5 steps failed" in capsys.readouterr().err
    assert Answers(tmp_path / "out" / "answers.jsonl").found == {}
    assert run(bench, tmp_path / "out", "--judge", spec(Silent), "--count-failed") == 0
    assert "0.000" in capsys.readouterr().out


def test_a_judge_that_is_not_there_ends_the_evaluation_soon(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "many.jsonl"
    records.write(path, [item(str(number), 1, [0.9]) for number in range(50)])
    Silent.failed = 0
    assert run(path, tmp_path / "out", "--judge", spec(Silent), "--count-failed") == 1
    assert "10 steps in a row" in capsys.readouterr().err
    assert Silent.failed == 10


class Hangs(Told):
    """Never answers about a step that says "mute"."""

    name = "hangs"
    concurrency = 1
    asked: list[str] = []

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        if "mute" in turns[0].response:
            await asyncio.Event().wait()
        return [self.one(turn) for turn in turns]


def test_a_judge_that_hangs_fails_at_its_step_and_says_how_far_it_is(
    bench: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run(bench, tmp_path / "out", "--judge", spec(Hangs), "--deadline", "0.05") == 1
    said = capsys.readouterr().err
    assert "1 steps failed, the first is 3#1: no judgement within 0.05 s (--deadline)" in said
    assert f"{spec(Hangs)}: 4 of 5 steps" in said
    assert len(Answers(tmp_path / "out" / "answers.jsonl").found) == 4


def test_answers_by_other_texts_or_another_plug_in_are_not_gone_on_with(
    bench: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in = tmp_path / "a_judge_of_mine.py"
    plug_in.write_text(f"from {Told.__module__} import Told\n\n\nclass Mine(Told):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run(bench, tmp_path / "out", "--judge", "a_judge_of_mine:Mine") == 0
    assert run(bench, tmp_path / "out", "--judge", "a_judge_of_mine:Mine") == 0
    plug_in.write_text(plug_in.read_text() + "    # says something else\n")
    capsys.readouterr()
    assert run(bench, tmp_path / "out", "--judge", "a_judge_of_mine:Mine") == 2
    assert "begun with judges =" in capsys.readouterr().err
    template = tmp_path / "user.txt"
    options = {"endpoint": ENDPOINT, "templates": {"user": str(template)}}
    texts = []
    for more in ("", "more"):
        template.write_text("{query_str} {solution_str}" + more)
        texts += [one.texts for one in lasting([JudgeSpec("j", "pprm", options)])]
    assert texts[0] != texts[1]


def test_a_threshold_that_the_labels_were_not_made_with_is_told(
    bench: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run(bench, tmp_path / "out") == 0
    assert "another threshold" not in capsys.readouterr().err
    assert run(bench, tmp_path / "other", "--threshold", "0.05") == 0
    told = "3 of 5 labels of bench.jsonl were made with another threshold than 0.05"
    assert told in capsys.readouterr().err


def test_other_settings_are_refused_but_another_address_is_not(
    bench: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    assert run(bench, out, "--judge", spec(Told)) == 0
    assert run(bench, out, "--judge", spec(Told), "--threshold", "0.5") == 2
    assert "begun with threshold = 0.652" in capsys.readouterr().err
    one = lasting([JudgeSpec("j", "pprm", {"endpoint": ENDPOINT})])
    reached = {"url": "http://127.0.0.1:2/v1", "api_key_env": "KEY", "timeout_s": 9.0}
    reached |= {
        "patience_s": 99.0,
        "attempts": 2,
        "backoff_s": 1.0,
        "concurrency": 3,
        "wait_s": 1.0,
    }
    for key, value in {**reached, "temperature": 0.5, "model": "n"}.items():
        found = lasting([JudgeSpec("j", "pprm", {"endpoint": ENDPOINT | {key: value}})])
        assert (found == one) == (key in reached), key


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--judge slate_rules", "columns"),
        ("--judge none", "expected one of"),
        ("--judge nope:X", "ModuleNotFoundError: No module named 'nope'; expected module:Class"),
        ("--judge coppice.judges.pprm:Nope", "no attribute 'Nope'; expected module:Class"),
        ("--threshold 1.5", "--threshold 1.5: expected a score"),
        ("--deadline 0", "--deadline 0: expected more than 0"),
        ("--judge pprm_rules --option view=x", "view"),
        ("--judge pprm_rules --judge pprm_rules", "--name"),
        ("--judge tictactoe_minimax", "expected a judge"),
        ("--baseline best", "majority, random"),
        ("--baseline constant", "constant S"),
        ("--baseline constant x", "--baseline constant x: expected a score, a number from 0 to 1"),
        ("--baseline constant 5", "--baseline constant 5: expected a score"),
        ("--baseline constant nan", "--baseline constant nan: expected a score"),
        ("--bench nowhere.jsonl", "--bench nowhere.jsonl cannot be read (No such file"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: str, message: str, bench: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run(bench, tmp_path / "out", *arguments.split()) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------------
# the shipped set


def test_the_shipped_set_is_consistent_small_and_no_class_rules_it() -> None:
    items = records.read([SHIPPED], Item)
    assert SHIPPED.stat().st_size < 1_500_000
    assert 100 <= len(items) <= 300
    for one in items:
        scores = [step.score for step in one.steps]
        assert one.category == category(one.outcome, scores, THRESHOLD)
        for step in one.steps:
            assert step.label == records.label(step.score, THRESHOLD)
            assert step.score == pytest.approx((step.score_a + step.score_b) / 2)
            assert abs(step.score_a - step.score_b) <= 0.4 + 1e-9
            assert step.context.startswith(one.question)
            assert step.turn is not None
    assert baseline("majority", items, THRESHOLD).accuracy.mean < 0.6
    counted = [sum(one.category == name for one in items) for name in CATEGORIES]
    assert min(counted) >= 0.7 * max(counted)


def test_a_torn_answer_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    Answers(path).add(StepAnswer("j", "a#1", 0.5))
    with path.open("ab") as file:
        file.write(b'{"judge":"j","ste')
    again = Answers(path)
    assert list(again.found) == [("j", "a#1")]
    again.add(StepAnswer("j", "a#2", None))
    assert len(Answers(path).found) == 2


def test_a_score_out_of_range_is_an_error_and_no_answer(
    bench: Path, tmp_path: Path, capsys: Any
) -> None:
    assert run(bench, tmp_path / "out", "--judge", spec(Wild)) == 1
    assert "a number from 0 to 1" in capsys.readouterr().err
