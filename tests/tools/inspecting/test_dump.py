"""tools/dump: what it shows of a tree."""

from pathlib import Path

import numpy as np
import pytest

from scheduler.journal import Journal
from scheduler.tree import Tree
from tools.inspecting.dump import main


def test_every_score_of_a_turn_is_shown_known_ones_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    tokens = np.arange(3, dtype=np.int32)
    tree = Tree(0, "task")
    root = tree.add(None, "prompt", tokens, "question")
    scores = {"process": 0.5, "a_plug_ins": -0.25, "outcome": 1.0, "reward": 0.75, "valid": 1.0, "judge_valid": 1.0}
    tree.add(root, "action", tokens, "answer", scores=scores, chosen=True)
    journal = Journal(tmp_path / "journal.sqlite")
    journal.start_tree(tree, 0, 0)
    journal.close()
    assert main([str(tmp_path)]) == 0
    (title,) = (line for line in capsys.readouterr().out.splitlines() if "action 1" in line)
    assert title.endswith("  reward +0.750  outcome +1.000  a_plug_ins -0.250  process +0.500")
