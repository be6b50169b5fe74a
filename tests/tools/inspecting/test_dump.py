"""coppice trees: which trees it finds, and what it shows of them."""

import json
import shlex
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.finetuning.command import main as sft
from coppice.tools.inspecting import frames
from coppice.tools.inspecting.dump import main
from coppice.wire.messages import Turn
from tests.tools.said import Patch, Said

TREES = 6


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A run of six trees of two candidates. Tree i has the rewards i / 10 and -i / 10, trees 3 to 5
    were admitted at version 1, the last one grows, and a judge could not grade tree 2."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(frames, "_AT_ONCE", 4)
    journal = Journal(tmp_path / "journal.sqlite")
    for i in range(TREES):
        tree = Tree(i, f"task{i % 3}")
        root = tree.add(None, "prompt", ids(1, 2), f"What is the capital of country {i}?")
        for sign in (1, -1):
            scores = {"reward": sign * i / 10, "think": 1.0, "valid": float(i != 4), "step": 7.0}
            text = f"answer {i} {'plus' if sign > 0 else 'minus'}"
            node = tree.add(root, "action", ids(3, 4, 5 + sign), text, scores=scores)
            node.logprobs = np.full(3, -0.5, np.float32)
            node.versions = ids(i // 3, i // 3, i // 3 + 1)
            node.chosen, node.cached, node.finish = sign > 0, 2, "length"
            node.invalid = ["query"] if i == 2 else []
            node.notes = {"slate_rules": f"because {i}"}
        journal.start_tree(tree, i, i // 3)
        if i < TREES - 1:
            journal.save_group(tree, i, [Turn(node.id, 0, 0, {"reward": 1.0})])
            journal.mark_trained(i, i // 3 + 1)
            journal.close_tree(tree, *([] if i else ["quarantined", "a judge failed"]))
    journal.close()
    return tmp_path


def listed(said: str) -> list[int]:
    return [int(line.split()[0]) for line in said.splitlines()[1:]]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--list"], [4, 3, 2, 1, 0]),
        (["--where", "reward_max >= 0.2 AND version = 0", "--list"], [2]),
        (["--where", "status = 'quarantined' OR judge_invalid > 0"], [2, 0]),
        (["--text", "country [13]", "--where", "version = 1", "--list"], [3]),
        (["--sort", "spread", "--reverse", "--limit", "2"], [0, 1]),
        (["--surprising", "2"], [4, 3]),
        (["--tree", "5", "--list"], [5]),
    ],
)
def test_trees_are_found_by_their_columns_and_texts(
    run: Path, options: list[str], found: list[int], said: Said
) -> None:
    assert listed(said(main, run, *options)) == found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--where", "reword > 1"], "reword"),
        (["--where", "reward > 9"], "none of 5 trees matches"),
        (["--tree", "17"], "the journal holds trees 0 to 5"),
        (["--tree", "9" * 20], "too large"),
        (["--diff", "1", "x"], "--diff x: "),
        (["--diff", "elsewhere"], "no journal at elsewhere"),
        (["--judge", "text"], "no such column; expected one of logprob, outcome_below, "),
        (["--judge", "--count", "step"], "--judge tells of turns"),
        (["--again", "slate_em"], "--again has an effect with --judge"),
        (["--reverse"], "no effect without --sort"),
        (["--diff", "1", "2", "--limit", "3"], "--diff names its two trees"),
    ],
)
def test_what_is_not_there_or_contradicts_itself_is_told(
    run: Path, options: list[str], words: str, said: Said
) -> None:
    assert words in said(main, run, *options, status=2)


def test_what_is_no_journal_is_told(run: Path, said: Said) -> None:
    other = run / "notes.txt"
    other.write_text("no journal at all, but long enough to be taken for one\n" * 40)
    assert "is no journal of a run, or a damaged one" in said(main, other, status=2)


def test_a_run_without_scores_or_rewards_is_listed_too(tmp_path: Path, said: Said) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    for i in range(2):
        tree = Tree(i, f"task{i}")
        root = tree.add(None, "prompt", ids(1), "question")
        scores = {"risk": 1.0, "risk_min": 0.5} if i else {}
        tree.add(root, "action", ids(2), "answer", scores=scores)
        journal.start_tree(tree, i, 0)
    journal.start_tree(Tree(2, "task2"), 2, 0)
    journal.close()
    assert listed(said(main, tmp_path, "--where", "risk_min = 0.5", "--list")) == [1]
    assert "it has no nodes yet" in said(main, tmp_path, "--diff", "0", "2", status=2)
    assert "the run has none of the columns" in said(main, tmp_path, "--surprising", "1", status=2)


def test_the_frames_hold_every_score(run: Path) -> None:
    trees, nodes = frames.read(run)
    assert len(trees) == TREES and len(nodes) == 3 * TREES
    scores = {"reward", "think", "valid", "score_step"}  # nodes have a column "step" of their own
    assert set(nodes.columns) == {*frames.NODE, *scores}
    last = trees.row(by_predicate=pl.col("tree") == 4, named=True)
    sums = {"actions": 2, "turns": 1, "sampled": 6, "invalid": 2, "trained_by": 2}
    rewards = {"reward": 0.0, "reward_min": -0.4, "reward_max": 0.4, "spread": 0.8}
    assert last | sums | rewards == last
    node = nodes.row(by_predicate=(pl.col("tree") == 4) & (pl.col("node") == 2), named=True)
    sampled = {"first_version": 1, "last_version": 2, "logprob": -1.5, "reward": -0.4}
    assert node | sampled | {"score_step": 7.0, "step": 1} == node


def test_two_trees_stand_side_by_side(run: Path, said: Said) -> None:
    lines = said(main, run, "--diff", "3", "4").splitlines()
    assert lines[2] == "step 1: reward, outcome_below"
    assert lines[3] == "*  +0.30      -  answer 3 plus         | *  +0.40      -  answer 4 plus"


def test_every_view_tells_that_retention_removed_a_tree(run: Path, said: Said) -> None:
    (run / "marks.jsonl").write_text('{"tree": 1, "node": 1, "mark": "good", "task": "task1"}\n')
    book, gone = Journal(run / "journal.sqlite"), "removed by retention"
    book.remove(1)
    book.close()
    assert gone in said(main, run, "--tree", "1")
    assert listed(said(main, run, "--where", f"question LIKE '%{gone}%'", "--list")) == [1]
    assert gone in said(main, run, "--diff", "1", "2", status=2)
    for tree, told in ((1, True), (4, False)):  # both trees are of one task
        said(main, run, "--tree", tree, "--html", run / "page.html")
        assert (gone in (run / "page.html").read_text()) == told
    marked = said(sft, "marked", run, "--marks", "good", "--out", f"{run}.out", status=2)
    assert "no candidate is marked good" in marked
    (run / "journal.sqlite").write_bytes(b"no database" * 99)
    lost = said(sft, "marked", run, "--marks", "good", "--out", f"{run}.out", status=2)
    assert "journal.sqlite is no journal of a run" in lost


def test_why_an_episode_crashed_is_always_shown(tmp_path: Path, said: Said) -> None:
    journal, tree = Journal(tmp_path / "journal.sqlite"), Tree(0, "task")
    root = tree.add(None, "prompt", ids(1), "Question")
    crash = "exit status 1: TypeError: bad\n\nIts last output:\n" + "looking\n" * 40
    notes = {"crashed": crash, "judge": "well"}
    tree.add(root, "action", ids(2), "answer", scores={"crashed": 1.0}, chosen=True, notes=notes)
    journal.start_tree(tree, 0, 0)
    journal.save_group(tree, 0, [Turn(1, 0, 0, {})])
    journal.close_tree(tree)
    journal.close()
    shown = said(main, tmp_path, "--tree", "0")
    assert "# crashed: exit status 1: TypeError: bad" in shown and "lines (--full)" in shown
    assert "well" not in shown
    _, nodes = frames.read(tmp_path)
    assert "crashed: exit status 1: TypeError: bad" in nodes["fate"].to_list()


def test_groups_are_listed_filtered_and_counted(run: Path, said: Said) -> None:
    assert listed(said(main, run, "--groups", "--where", "step = 1 and spread > 0.3")) == [4, 3, 2]
    counts = said(main, run, "--groups", "--count", "version,texts,texts").split()
    assert counts == ["version", "texts", "count", "0", "2", "3", "1", "2", "2"]
    (group,) = frames.sql(run, "SELECT * FROM groups WHERE tree = 4").to_dicts()
    asked = {"question": "What is the capital of country 4?", "chosen": "answer 4 plus"}
    rewards = {"reward_chosen": 0.4, "reward_min": -0.4, "spread": 0.8, "candidates": 2}
    assert group | asked | rewards == group
    refusal = said(main, run, "--groups", "--count", "hop", status=2)
    assert "no such column; expected one of tree, parent" in refusal


def test_a_tree_of_several_groups_is_written_once(run: Path, said: Said) -> None:
    journal = Journal(run / "journal.sqlite")
    tree = next(journal.tree(row) for row in journal.trees() if row.id == 3)
    below = [tree.add(tree.nodes[1], "action", ids(3), "x", scores={"reward": 1.0}) for _ in "ab"]
    tree.changed |= {node.id: node for node in below}
    journal.save_nodes(tree)
    journal.close()
    rows = [json.loads(line) for line in said(main, run, "--groups", "--json").splitlines()]
    assert [row["tree"] for row in rows] == [4, 3, 2, 1, 0]


def test_the_documented_questions_are_answered_by_their_lines(
    tmp_path: Path, said: Said, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    journal = Journal(tmp_path / "journal.sqlite")
    for i in range(4):
        tree = Tree(i, f"task{i}")
        node = tree.add(None, "prompt", ids(1), f"Rules.\nQuestion: what is {i % 3}?")
        for step in (1, 2):
            found = [
                tree.add(node, "action", ids(2, 3), f"look {i} {k}", chosen=k == 0)
                for k in range(2)
            ]
            for k, one in enumerate(found):
                answers = step == 2 and i != 1
                kind = {"answer": 1.0, "outcome": float(i == 3)} if answers else {"query": 1.0}
                one.scores = {"reward": float(k * (i == 1)), **kind}
            node = found[0]
        journal.start_tree(tree, i, i // 2)
        journal.close_tree(tree)
    journal.close()
    page = (Path(__file__).parents[3] / "docs/dump.md").read_text()
    lines = page.partition("## Questions")[2].partition("## Judges")[0].splitlines()
    answers = [
        [row.split() for row in said(main, tmp_path, *shlex.split(line)[3:]).splitlines()[1:]]
        for line in lines
        if line.startswith("coppice")
    ]
    same, wrong, second, never, against, changed = answers
    assert same == [["1", "0", "1"], ["1", "1", "2"], ["2", "0", "1"], ["2", "1", "2"]]
    assert [row[:2] for row in wrong] == [["0", "1"], ["2", "1"]]
    assert second == [["0", "0.50"], ["1", "0.00"]]
    assert sorted(" ".join(row) for row in never) == ["what is 0? 4 0.00", "what is 2? 2 0.00"]
    assert [row[0] for row in against] == ["1", "1"]
    assert [row[:2] for row in changed] == [["0", "1"], ["1", "1"], ["0", "2"], ["1", "2"]]


def test_sql_joins_trees_groups_turns_and_tokens(run: Path, said: Said) -> None:
    query = (
        "SELECT t.question, COUNT(*) AS n, MIN(k.logprob) AS least FROM tokens k JOIN trees t"
        " USING (tree) JOIN turns n USING (tree, node) WHERE k.version = 1 AND n.chosen"
        " GROUP BY t.question ORDER BY t.question"
    )
    rows = said(main, run, "--sql", query).splitlines()
    assert [row.split()[-2:] for row in rows[1:]] == [["1", "-0.50"]] * 3 + [["2", "-0.50"]] * 3
    wrong = said(main, run, "--sql", "SELECT reword FROM trees", status=2)
    assert "reword" in wrong and "the tables: trees: tree, task" in wrong
