"""The configs in configs/ are accepted, and those for GPUs sample with SGLang."""

import inspect
from pathlib import Path

import pytest

from scheduler.strategies import mc_value
from tools.launching import config

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_accepted_and_its_engine_fits_its_hardware(path: Path) -> None:
    found = config.load(path, [])
    on_cpu = path.stem.endswith(("-cpu", "-tiny"))
    assert found.actors.engine == ("local" if on_cpu else "sglang")
    assert on_cpu or found.actors.sglang.gpus > 0


@pytest.mark.parametrize("game", ["tictactoe", "sudoku", "minesweeper"])
@pytest.mark.parametrize(
    "baseline", [["learner.scheme=outcome"], ["learner.scheme=mc_pr", "scheduler.strategy=mc_value"]]
)
def test_the_baselines_of_the_games_on_gpus_are_accepted(game: str, baseline: list[str]) -> None:
    found = config.load(ROOT / "configs" / f"vpr-{game}.toml", baseline)
    assert found.actors.max_batch >= inspect.signature(mc_value.grow).parameters["continuations"].default
