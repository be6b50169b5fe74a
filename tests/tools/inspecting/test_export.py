"""coppice export: the folder appears whole or not at all; what cannot be exported is one line."""

import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from coppice.learner.config import LearnerConfig, LearnerProcess
from coppice.tools.inspecting.export import main


@pytest.fixture
def run(llama: Path, tmp_path: Path) -> Path:
    """A run whose only version is the model of its start."""
    folder = tmp_path / "run"
    (folder / "processes").mkdir(parents=True)
    process = LearnerProcess("learner", str(folder), 0, str(llama), 1, 1.0, LearnerConfig())
    (folder / "processes" / "learner.json").write_bytes(msgspec.json.encode(process))
    return folder


def test_a_full_disk_leaves_no_folder_and_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save, limits = LlamaForCausalLM.save_pretrained, resource.getrlimit(resource.RLIMIT_FSIZE)

    def full(*given: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
        try:
            save(*given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", full)
    capsys.readouterr()
    out = tmp_path / "out"
    assert main([str(run), "--out", str(out)]) == 2
    assert f"coppice export: the policy could not be written to {out}: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_empty_folder_takes_the_policy_and_other_places_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main([str(run), "--out", str(tmp_path / "empty")]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "empty")
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert f"coppice export: {tmp_path} has no processes/learner.json" in capsys.readouterr().err
    assert main([str(run), "--out", str(run)]) == 2
    assert f"--out {run} holds something already: choose another" in capsys.readouterr().err
    assert main([str(run), "--out", str(run / "processes" / "learner.json" / "out")]) == 2
    assert "out cannot be written: Not a directory; choose another" in capsys.readouterr().err
