"""Judges on trial, and two runs on the same questions, with counts of their own."""

import json
from itertools import combinations
from pathlib import Path

import msgspec
import numpy as np
import pytest

from coppice.actors.environments.search_qa.environment import SearchState, Step
from coppice.judges.serve import JudgeProcess
from coppice.judges.slate import SlateRules
from coppice.scheduler.config import SchedulerConfig, SchedulerProcess
from coppice.scheduler.dispatch.bounds import JudgeGives
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.inspecting.dump import main
from coppice.wire.messages import JudgedTurn, Judgement
from tests.tools.said import Patch, Said

COUNTRIES = ["Peru", "Chile", "Ghana", "Nepal", "Kenya", "Malta"]
RIGHT, WRONG, VAGUE = "main export", "main export partner", "climate"
CONTINUED = [RIGHT, WRONG, RIGHT, WRONG, RIGHT, VAGUE]
PAID = {RIGHT: 1.0, WRONG: 0.0, VAGUE: 0.0}


class Inverted(SlateRules):
    """Pays what the rules punish."""

    name = "inverted"

    def judge(self, turn: JudgedTurn) -> Judgement:
        scores = super().judge(turn).scores
        return Judgement({name: -value for name, value in scores.items()})


class Failing(SlateRules):
    """Fails at one country, and where it sees what a search found, which the run's judge did not."""

    def judge(self, turn: JudgedTurn) -> Judgement:
        if turn.observation is not None or "Peru" in turn.question:
            raise ValueError("no idea")
        return super().judge(turn)


def recorded(folder: Path, answers: list[bool]) -> Path:
    """A run of a tree for each country with the scores of the default judge: three searches, of
    which one is continued and found wanting, or answered as ``answers`` says."""
    (folder / "processes").mkdir(parents=True)
    rows = [
        {
            "id": name, "question": f"What is the main export of {name}?", "golden_answers": ["tin"],
            "evidence": [{"title": name, "text": "Main export: tin"}],
        }
        for name in COUNTRIES
    ]  # fmt: skip
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file, gives = str(folder / "tasks.jsonl"), JudgeGives(("think", "query", "answer"), (-1, 1))
    process = SchedulerProcess(
        "scheduler", str(folder), 0, "", "search_qa", {}, file, file, 1, [], 4, SchedulerConfig(),
        judges={"judge.slate_rules": gives},
    )  # fmt: skip
    judges = JudgeProcess("judges", str(folder), {"slate_rules": {"query": "evidence"}})
    for one in (process, judges):
        (folder / "processes" / f"{one.name}.json").write_bytes(msgspec.json.encode(one))
    journal, none = Journal(folder / "journal.sqlite"), np.zeros(1, np.int32)
    for i, (name, field, right) in enumerate(zip(COUNTRIES, CONTINUED, answers, strict=True)):
        tree, question = Tree(i, name, "heldout"), str(rows[i]["question"])
        state = msgspec.to_builtins(SearchState(question))
        root = tree.add(None, "prompt", none, f"Question: {question}", state=state)
        for asked in (RIGHT, WRONG, VAGUE):
            text = f"<think> t </think> <search> {name} {asked} </search>"
            scores = {"think": 0.0, "query": PAID[asked], "reward": PAID[asked], "valid": 1.0}
            chosen = asked == field
            node = tree.add(root, "action", none, text, scores=scores, chosen=chosen)
            if chosen:
                steps = (Step("t", f"{name} {asked}", "nothing"),)
                state = msgspec.to_builtins(SearchState(question, steps))
                seen = tree.add(node, "observation", none, "nothing", chosen=True, state=state)
                text = f"<think> t </think> <answer> {'tin' if right else 'gold'} </answer>"
                scores = {"think": 0.0, "answer": 2.0 * right - 1, "outcome": float(right)}
                last = seen, "action", none, text
                tree.add(*last, scores=scores | {"valid": 1.0, "reward": 0.0}, chosen=True)
        journal.start_tree(tree, i, 0)
        journal.close_tree(tree)
    journal.close()
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("COLUMNS", "80")
    return recorded(tmp_path / "run", [True, False, True, False, False, True])


def test_scores_are_counted_against_the_outcomes_below_them(run: Path, said: Said) -> None:
    lines = said(main, run, "--heldout", "--judge", "query").splitlines()
    points = list(zip([1, 0, 1, 0, 1, 0], [1, 0, 1, 0, 0, 1], strict=True))
    unequal = [(x, y) for x, y in combinations(points, 2) if x[1] != y[1]]
    alike = [0.5 if x[0] == y[0] else (x[0] > y[0]) == (x[1] > y[1]) for x, y in unequal]
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:4]}
    assert rows["+0.00"][:2] == ["3", "0.333"] and rows["+1.00"][:2] == ["3", "0.667"]
    assert rows["agreement"][:2] == ["6", f"{sum(alike) / len(alike):.3f}"]
    assert lines[6].startswith("5:3, step 1: What is the main export of Malta?")
    assert lines[9].startswith("*  +0.00  +1.00") and max(map(len, lines)) <= 80
    assert said(main, run, "--heldout", "--judge").count("outcome below") == 4


def test_a_judge_that_pays_queries_for_a_wrong_field_is_exposed(run: Path, said: Said) -> None:
    """The default run's first judge, on turns that its successor scored."""
    command = (main, run, "--heldout", "--judge", "--again")
    lines = said(*command, "tests.first_judge:FirstRules", "--limit", "1").splitlines()
    assert "6 turns got more from the other judge; outcome below 2 of them: 0.000 ±0.653" in lines
    shown = [line for line in lines if "<search> Malta main export partner" in line]
    assert shown[0].split()[:3] == ["+0.00", "+1.00", "-"]
    own = said(*command, "slate_rules")
    assert "24 turns judged again, 0 not" in own and "got more" not in own + "got less"
    assert "18 turns of both judges: 18 equal scores" in own, "its requests are those of the run"


def test_an_inverted_judge_is_exposed_and_faults_are_counted(run: Path, said: Said) -> None:
    command = (main, run, "--heldout", "--judge", "answer", "--again")
    lines = said(*command, f"{__name__}:Inverted").splitlines()
    (agreement,) = (line.split() for line in lines if line.startswith("agreement"))
    assert agreement == ["agreement", "6", "1.000", "±0.000", "6", "0.000", "±0.000"]
    assert "order alike 0.000" in lines[5]
    failing = said(*command, f"{__name__}:Failing").splitlines()
    assert failing[0] == "20 turns judged again, 4 not because of faults"
    assert failing[1].startswith("  4 times: ValueError: no idea")


def test_two_runs_are_compared_on_the_questions_of_both(run: Path, said: Said) -> None:
    other = recorded(run.parent / "other", [True, True, True, True, False, False])
    lines = said(main, run, "--diff", other).splitlines()
    assert lines[0].startswith("6 questions of both: outcome 0.500") and "change 0.167" in lines[0]
    assert lines[1] == "2 rose, 1 fell, 3 did not change"
    assert [line.split()[0] for line in lines[3:]] == ["1.00", "1.00", "-1.00"]
    lines = said(main, run, "--diff", other, "--where", "task = 'Nepal'").splitlines()
    assert lines[2] == f"{'run, tree 3, version 0':<38} | other, tree 3, version 0"
    assert max(map(len, lines)) <= 80
    ends = [line for line in lines if line.endswith(("gold", "tin", "</answer>"))]
    assert "gold" in " ".join(ends).split("|")[0] and "tin" in " ".join(lines)
    assert "share no question" in said(main, run, "--diff", other, "--where", "tree = 9", status=2)
