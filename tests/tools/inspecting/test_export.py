"""coppice export: the folder appears whole or not at all; what cannot be exported is one line."""

import resource
from pathlib import Path

import msgspec
import pytest
from transformers import AutoModelForCausalLM

from coppice.common.frontier import Frontier
from coppice.learner.config import LearnerConfig, LearnerProcess
from coppice.tools.inspecting.export import main
from tests.tools.said import Said


@pytest.fixture
def run(llama: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "processes").mkdir(parents=True)
    process = LearnerProcess("learner", str(folder), 0, str(llama), 1, 1.0, LearnerConfig())
    (folder / "processes" / "learner.json").write_bytes(msgspec.json.encode(process))
    return folder


def test_a_full_disk_leaves_no_folder_and_is_said(run: Path, tmp_path: Path, said: Said) -> None:
    out, limits = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        told = said(main, run, "--out", out, status=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"coppice export: the policy could not be written to {out}: " in told
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_that_lost_its_weights_is_not_taken_for_its_start(
    run: Path, tmp_path: Path, refused: Said
) -> None:
    (run / "learner.json").write_bytes(msgspec.json.encode(Frontier(3)))
    told = refused(main, run, "--out", tmp_path / "out")
    assert (
        "weights holds none of the 3 versions of this run: copy that folder again (learner" in told
    )
    assert main([str(run), "--version", "0", "--out", str(tmp_path / "out")]) == 0
    (run / "processes" / "learner.json").write_bytes(b'{"name": "\xff"}')
    assert "learner.json" in refused(main, run, "--version", 0, "--out", tmp_path / "other")


def test_only_an_empty_folder_takes_the_policy(run: Path, tmp_path: Path, refused: Said) -> None:
    (tmp_path / "empty").mkdir()
    assert main([str(run), "--out", str(tmp_path / "empty")]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "empty")
    for place, out, told in (
        (tmp_path, tmp_path / "out", f"export: {tmp_path} has no processes/learner.json"),
        (run, run, f"--out {run} exists and is no empty folder: choose another"),
        (run, run / "processes" / "learner.json" / "out", "out cannot be written: Not a directory"),
    ):
        assert told in refused(main, place, "--out", out)
