"""A run in a notebook: what each call returns, and the example of the documentation."""

import ast
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

from coppice.actors.environments import registry
from coppice.actors.environments.task_files import load_tasks
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.inspecting import notebook, replay
from coppice.tools.inspecting.frames import ACTION
from tests.tools.inspecting.test_replay import REWARDS, grown

EXAMPLE = Path(__file__).parents[3] / "docs" / "notebook.ipynb"


@pytest.fixture
def run(llama: Path, tmp_path: Path) -> Path:
    """The run folder of ``grown`` with rloo, and with the files that a search run has besides."""
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    grown(folder, llama, scheme="rloo")
    task = {"question": "capital of Peru?", "golden_answers": ["Lima"]}
    lines = [json.dumps({"id": f"task{i}", **task}) for i in range(2)]
    (folder / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    files, options = str(folder / "tasks.jsonl"), {"prompt": "question"}
    plays = {"environment": "search_qa", "train": files, "heldout": files, "options": options}
    (folder / "processes" / "scheduler.json").write_text(json.dumps(plays))
    (folder / "config.json").write_text("{}")
    record = {"learner/groups": 1.0, "learner/entropy": 1.0}
    records = [{"version": v, "time/run": v, "score/reward": v / 2, **record} for v in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    journal = Journal(folder / "journal.sqlite")
    tree = journal.tree(*journal.trees("id=1"))
    environment = registry.load("search_qa", options)
    tree.nodes[0].state = msgspec.to_builtins(environment.initial(load_tasks(files)[0][1]))
    for node, answer in zip((1, 2, 3), ("Lima", "Cusco", "Quito"), strict=True):
        tree.nodes[node].text = text = f"<think> a city </think> <answer> {answer} </answer>"
        tree.nodes[node].scores = {**tree.nodes[node].scores, "outcome": float("Lima" in text)}
    tree.changed = dict(tree.nodes)
    journal.save_nodes(tree)
    journal.close()
    return folder


def test_frames_and_records_are_data_frames(run: Path) -> None:
    opened = notebook.newest(run.parent)
    assert opened.trees["task"].to_list() == ["task0", "task1"]
    assert opened.nodes.filter(ACTION)["reward"].to_list() == [*REWARDS[0], *REWARDS[1]]
    assert opened.records["score/reward"].to_list() == [0.5, 1.0]
    with pytest.raises(FileNotFoundError, match="no run is below"):
        notebook.newest(run)


def test_turns_through_another_scheme(run: Path) -> None:
    opened = notebook.OpenedRun(run)
    own, other = opened.advantages(), opened.advantages("slate")
    assert own["advantage"].to_list() == opened.nodes.filter(ACTION)["advantage"].to_list()
    assert own.join(other, on=["tree", "node"]).height == 6
    assert not np.allclose(own["advantage"], other["advantage"])


@pytest.mark.parametrize("level", ["token", "turn"])
def test_the_weight_of_a_turn_is_what_the_correction_makes_of_its_ratios(
    run: Path, level: str
) -> None:
    opened = notebook.OpenedRun(run)
    with opened.journal() as (journal, rows):
        _, newest = replay.newest(journal, rows, run)
    plain, cut = opened.weights("none", level), opened.weights("tis", level, upper=0.5)
    for row, upper in zip(plain.iter_rows(named=True), cut.iter_rows(named=True), strict=True):
        # each token was sampled with a log-probability of -1.5
        logs = newest[row["tree"], row["node"]] + 1.5
        assert row["ratio"] == pytest.approx(math.exp(logs.mean()), rel=1e-4)
        assert row["weight"] == pytest.approx(1.0)
        ratios = np.exp(logs) if level == "token" else np.array([math.exp(max(-20.0, logs.sum()))])
        assert upper["weight"] == pytest.approx(np.minimum(ratios, 0.5).mean(), rel=1e-3)
    with pytest.raises(ValueError, match="level = 'sequence': expected token or turn"):
        opened.weights("tis", "sequence")


def test_a_judge_scores_the_actions_of_a_tree(run: Path) -> None:
    opened = notebook.OpenedRun(run)
    scores = opened.judge("exact_match", tree=1)
    assert scores["node"].to_list() == [1, 2, 3]
    assert scores["outcome"].to_list() == [1.0, 0.0, 0.0]
    for judge, tree, words in (
        ("exact_match", 9, "tree = 9: the journal has no such train tree"),
        ("tictactoe_mcts", 1, "tictactoe_mcts"),
    ):
        with pytest.raises(ValueError, match=words):
            opened.judge(judge, tree=tree)
    (run / "tasks.jsonl").write_text('{"id": "other", "question": "q", "golden_answers": ["a"]}\n')
    with pytest.raises(ValueError, match="its task 'task1' is not among the run's tasks"):
        opened.judge("exact_match", tree=1)


def test_the_example_runs_from_its_first_cell_to_its_last(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parents[1])
    cells = json.loads(EXAMPLE.read_text())["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        *body, last = ast.parse("".join(cell["source"])).body
        assert isinstance(last, ast.Expr)
        exec(compile(ast.Module(body, []), str(EXAMPLE), "exec"), names)
        shown.append(eval(compile(ast.Expression(last.value), str(EXAMPLE), "eval"), names))
    assert [type(value) for value in shown] == [pl.DataFrame] * 5 + [Figure]
    assert not [cell for cell in cells if cell["outputs"]]
    both = names["both"]
    correlation = np.corrcoef(both["advantage"], both["advantage_grpo"])[0, 1]
    assert shown[2].item() == pytest.approx(correlation)
