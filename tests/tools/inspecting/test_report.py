"""tools/report on run folders."""

import json
from pathlib import Path

import pytest

from tools.inspecting.report import main


def folder(path: Path, name: str, rewards: list[float]) -> Path:
    """A run folder with an update a reward, the second written twice as after a resume, and a half-written last line."""
    made = path / name
    made.mkdir()
    records = [
        {"version": float(i + 1), "score/reward": r, "learner/seconds": 1.0, "time/run": 10.0 * i}
        for i, r in enumerate(rewards)
    ]
    lines = [json.dumps(r) for r in [*records[:2], *records[1:]]]
    (made / "metrics.jsonl").write_text("\n".join([*lines, '{"version": 9']))
    score = {"measures": {key: {"mean": 0.25, "half": 0.1} for key in ("em", "f1", "return", "valid")}}
    (made / "summary.json").write_text(json.dumps({"heldout": {"start": score, "end": score}}))
    return made


def test_runs_are_drawn_side_by_side_with_their_names_and_held_out_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = folder(tmp_path, "a", [0.1, 0.2, 0.3]), folder(tmp_path, "b", [0.3, 0.2])
    out = tmp_path / "plot.svg"
    assert main([f"{first}=synchronous", str(second), "--out", str(out), "--metric", "score/reward"]) == 0
    printed = capsys.readouterr().out
    assert "| synchronous | 3 | 20 | 0.250 ±0.100 -> 0.250 ±0.100" in printed
    assert "| b | 2 | 10 |" in printed
    assert "synchronous" in out.read_text()
    again = out.read_bytes()
    main([f"{first}=synchronous", str(second), "--out", str(out), "--metric", "score/reward"])
    assert out.read_bytes() == again


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["/no/such"], "no metrics.jsonl"), (["{run}", "--metric", "score/rewrd"], "there are ['learner/seconds'")],
)
def test_what_cannot_be_drawn_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    run = folder(tmp_path, "a", [0.1])
    assert main([a.format(run=run) for a in arguments] + ["--out", str(tmp_path / "x.svg")]) == 2
    assert message in capsys.readouterr().err
