"""Settings of the objective without effect or counted twice are refused; processes get the rest."""

from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coppice.learner import schemes
from coppice.learner.config import LearnerProcess
from coppice.scheduler.config import SchedulerProcess
from coppice.scheduler.growth.strategies import slate
from coppice.tools.launching import processes, rules
from coppice.tools.launching.config import ConfigError, load
from coppice.tools.launching.settings import Assets

SLATE = Path(__file__).parents[3] / "configs" / "slate-cpu.toml"
PPR, SUDOKU = SLATE.with_name("ppr-cpu.toml"), SLATE.with_name("vpr-sudoku-cpu.toml")
SOKOBAN, PRIME = SLATE.with_name("oprl-sokoban-cpu.toml"), "method=prime"
FULL = ["scheduler.strategy=full"]
ALONE = [*FULL, "scheduler.strategy_options={k=1}", "learner.scheme=outcome"]
GAE = [*FULL, "learner.scheme=gae"]
MC_PR = "method=mc-pr"
TWO_COLUMNS = r"makes the rewards of turns from .* remove it"


@pytest.mark.parametrize(
    ("path", "settings", "reason"),
    [
        (SLATE, ["learner.target_kl=0.1", "learner.minibatches=1"], "one optimizer step"),
        (SLATE, ["learner.kl_coef=0.1", "learner.kl_reward_coef=0.1"], "expected 0 for one"),
        (SLATE, ["learner.lr_min_ratio=0.1", "learner.lr_schedule=constant"], "lr_schedule"),
        (SLATE, ["learner.soft_overlong={max_tokens=20, cache_tokens=30}"], "of at most"),
        (SLATE, [*GAE, "learner.kl_coef=0", "learner.kl_reward_coef=0.1"], "options.kl_coef"),
        (SLATE, [*GAE, "learner.scheme_options={targets='vtrace', c_max=2.0}"], "at most rho_max"),
        (SLATE, [*GAE, "learner.critic.policy_frozen_updates=100000"], "never trains"),
        (SLATE, [*GAE, "scheduler.dynamic_sampling_budget=4"], "no effect"),
        (SLATE, [*ALONE, "scheduler.dynamic_sampling_budget=4"], "no effect"),
        (PPR, ["learner.reward_scale=2.0"], TWO_COLUMNS),
        (PPR, ["learner.kl_reward_coef=0.1"], r"learner\.scheme_options\.kl_coef instead"),
        (
            SOKOBAN,
            [PRIME, "learner.prm.threshold=0.6"],
            r"options\.threshold = 0: expected .* 0\.6",
        ),
        (SOKOBAN, [PRIME, "learner.scheme_options={accuracy_low=0.9}"], "at most accuracy_high"),
        (SUDOKU, [MC_PR, "learner.reward_clip=0.5"], TWO_COLUMNS),
        (SUDOKU, [MC_PR, "learner.kl_reward_coef=0.1"], r"learner\.kl_coef is a KL in the loss"),
    ],
)
def test_a_setting_counted_twice_is_refused(path: Path, settings: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(path, settings)


def test_k1_in_the_loss_is_a_doubt() -> None:
    def doubts(estimator: str) -> list[str]:
        changes = ["learner.kl_coef=0.1", f"learner.kl_estimator={estimator}"]
        return rules.doubts(load(SLATE, changes))

    assert not doubts("k2")
    assert "0 in expectation" in doubts("k1")[-1]


def test_a_warm_up_that_never_ends_is_a_doubt() -> None:
    (doubt,) = rules.doubts(load(SLATE, ["scheduler.updates=5", "learner.warmup_updates=5"]))
    assert "learner.warmup_updates = 5 and scheduler.updates = 5: the rate never reaches" in doubt
    assert not rules.doubts(load(SLATE, ["scheduler.updates=6", "learner.warmup_updates=5"]))


def written(run: Path, name: str, kind: type[Any], *settings: str) -> Any:
    """What a process of a run would read."""
    processes.make(load(SLATE, list(settings)), Assets(str(run), "", "", "", ""), run)
    return msgspec.json.decode((run / "processes" / f"{name}.json").read_bytes(), type=kind)


def test_the_schedule_ends_with_the_run_and_the_scheduler_knows_the_reward(tmp_path: Path) -> None:
    linear = ["learner.scheme=gigpo", "learner.lr_schedule=linear", "scheduler.updates=7"]
    learner = written(tmp_path, "learner", LearnerProcess, *FULL, *linear)
    scheduler = written(tmp_path, "scheduler", SchedulerProcess, *FULL, *linear)
    assert (learner.learner.decay_updates, learner.learner.optimizer.schedule) == (7, "linear")
    assert (scheduler.reward, scheduler.equal) == ("reward", "turns")


def test_slate_selects_with_the_options_on_which_its_scheme_trains(tmp_path: Path) -> None:
    def selects(*settings: str) -> dict[str, Any]:
        process = written(tmp_path, "scheduler", SchedulerProcess, *settings)
        return process.scheduler.strategy_options

    grown = signature(slate.grow).parameters
    trained = signature(schemes.load("slate", {}).function).parameters
    for name in ("ddof", "eps"):
        assert grown[name].default == trained[name].default
    changed = selects() | {"ddof": 0, "eps": 0.5}
    assert selects("learner.scheme_options={ddof=0, eps=0.5}") == changed
    assert selects("learner.scheme=vpr_v2", "learner.scheme_options={ddof=1}") == selects()
    alone = r"\['ddof'\].* set them in learner\.scheme_options alone"
    with pytest.raises(ConfigError, match=alone):
        load(SLATE, ["scheduler.strategy_options.ddof=0"])
