"""The configs in configs/ are accepted, and those for GPUs sample with SGLang."""

import inspect
from pathlib import Path

import pytest

from coppice.actors.environments import registry
from coppice.scheduler.growth.strategies import mc_value
from coppice.tools.launching import config

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
    "baseline",
    [["learner.scheme=outcome"], ["learner.scheme=mc_pr", "scheduler.strategy=mc_value"]],
)
def test_the_baselines_of_the_games_on_gpus_are_accepted(game: str, baseline: list[str]) -> None:
    found = config.load(ROOT / "configs" / f"vpr-{game}.toml", baseline)
    assert (
        found.actors.max_batch
        >= inspect.signature(mc_value.grow).parameters["continuations"].default
    )


def test_visual_sokoban_holds_the_papers_settings_and_refuses_a_warm_start() -> None:
    path = ROOT / "configs" / "oprl-visualsokoban.toml"
    found = config.load(path, [])
    s, w = found.scheduler, found.learner
    assert found.model.name == "Qwen/Qwen2.5-VL-7B-Instruct"
    assert (s.questions_per_update, s.strategy_options, s.updates, s.evaluation.every) == (
        32,
        {"k": 8},
        200,
        5,
    )
    assert (s.max_action_tokens, found.actors.max_context) == (512, 1024 + 512)
    assert (w.scheme, w.scheme_options["base"], w.lr, w.kl_coef) == ("oprl", "rloo", 5e-7, 0.0)
    assert w.correction_options == {"clip_low": 0.2, "clip_high": 0.2}
    assert w.prm is not None
    assert (w.prm.lr, w.prm.beta, w.train_vision) == (1e-6, 0.05, False)
    environment = registry.load(found.data.environment, found.data.options)
    assert environment.pictures
    assert environment.max_turns == 15  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="shows pictures, which no warm start reads"):
        config.load(path, ["warm_start.steps=10"])
    adapters = ["learner.lora={ rank = 16, alpha = 32.0 }", "learner.train_vision=true"]
    with pytest.raises(ValueError, match="SGLang applies adapters to the language layers only"):
        config.load(path, adapters)
    config.load(path, [*adapters, "actors.sglang.lora=merged"])
