"""A run in a notebook: what each call returns, and the example of the documentation."""

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

from coppice.tools.inspecting import notebook
from coppice.tools.inspecting.frames import ACTION
from tests.tools.inspecting.test_replay import REWARDS, grown
from tests.tools.said import Patch

EXAMPLE = Path(__file__).parents[3] / "docs" / "notebook.ipynb"


@pytest.fixture
def run(llama: Path, tmp_path: Path) -> Path:
    """The run folder of ``grown`` with rloo, with two records of metrics."""
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    grown(folder, llama, scheme="rloo")
    (folder / "config.json").write_text("{}")
    record = {"learner/groups": 1.0, "learner/entropy": 1.0}
    records = [{"version": v, "time/run": v, "score/reward": v / 2, **record} for v in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_frames_and_records_are_data_frames(run: Path) -> None:
    opened = notebook.newest(run.parent)
    assert opened.nodes.filter(ACTION)["reward"].to_list() == [*REWARDS[0], *REWARDS[1]]
    assert opened.records["score/reward"].to_list() == [0.5, 1.0]
    with pytest.raises(FileNotFoundError, match="no run is below"):
        notebook.newest(run)


def test_the_example_of_the_documentation_runs(run: Path, monkeypatch: Patch) -> None:
    (folder := run.parents[1] / "docs").mkdir()  # Jupyter starts in the notebook's folder
    monkeypatch.chdir(folder)
    cells = json.loads(EXAMPLE.read_text())["cells"]
    cells = [cell for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        *body, last = ast.parse("".join(cell["source"])).body
        assert isinstance(last, ast.Expr)
        exec(compile(ast.Module(body, []), str(EXAMPLE), "exec"), names)
        shown.append(eval(compile(ast.Expression(last.value), str(EXAMPLE), "eval"), names))
    assert [type(value) for value in shown] == [pl.DataFrame] * 3 + [Figure]
    assert not [cell for cell in cells if cell["outputs"]]
    both = names["both"]
    correlation = np.corrcoef(both["advantage"], both["advantage_grpo"])[0, 1]
    assert shown[2].item() == pytest.approx(correlation)
