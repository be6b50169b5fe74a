"""Changes of the reward before a scheme reads it, clips of the advantages, and trajectories that
the token limit cut."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.testing import assert_allclose

from coppice.common.statistics import centre, within
from coppice.learner.config import LearnerConfig, SoftOverlong
from coppice.learner.update.objective import overlong, shaped
from coppice.learner.update.policy_step import Objective
from coppice.learner.update.table import TurnTable
from coppice.learner.update.trainer import Trainer
from tests.learner.tables import NO, made_of
from tests.updates import batch, episodes, rescored, table_of, trainer


def two_trajectories(**columns: list[float]) -> TurnTable:
    """Two trajectories of two turns of one task, with 2, 3, 1 and 4 tokens."""
    return made_of([2, 2], columns, tokens=[2, 3, 1, 4])


def seen(made: Trainer, some: Any) -> tuple[Objective, dict[str, float]]:
    """The objective of the first optimizer step of an update, and the update's metrics."""
    known: list[Objective] = []
    step = made.policy_step.step

    def noting(first: Objective, *rest: Any) -> dict[str, float]:
        known.append(first)
        return step(first, *rest)

    made.policy_step.step = noting  # pyright: ignore[reportAttributeAccessIssue]
    metrics = made.update(some)
    return known[0], metrics


def test_the_soft_overlong_punishment_is_that_of_dapo() -> None:
    # L_max = 100, L_cache = 20: nothing up to 80, (80 - |y|) / 20 up to 100, then -1
    lengths = np.array([10, 80, 85, 90, 100, 300])
    assert overlong(lengths, 100, 20).tolist() == [0, 0, 0.25, 0.5, 1, 1]


def test_a_penalty_is_charged_to_the_first_score_at_its_turn_or_later() -> None:
    table = two_trajectories(reward=[NO, 1.0, 2.0, 3.0])
    kl = table.at_last_token(np.array([0.5, 0.25, 0.125, 1.0]))
    table = msgspec.structs.replace(table, token_scores={"kl": kl})
    charged = shaped(table, "reward", LearnerConfig(kl_reward_coef=1.0)).column("reward")
    np.testing.assert_array_equal(charged, [NO, 0.25, 1.875, 2.0])


def test_the_reward_is_scaled_then_clipped_and_the_penalties_come_after() -> None:
    table = two_trajectories(reward=[0.1, 0.4, -3.0, NO])
    config = LearnerConfig(
        reward_scale=2.0, reward_clip=0.5, soft_overlong=SoftOverlong(max_tokens=4, cache_tokens=2)
    )
    changed = shaped(table, "reward", config).column("reward")
    assert_allclose(changed, [0.2, 0.0, -0.5, NO])


def test_k1_in_the_reward_is_the_log_ratio_of_the_samples(tmp_path: Path, llama: Path) -> None:
    settings: dict[str, Any] = {"kl_coef": 0.0, "scheme": "grpo", "scheme_options": {"std": False}}
    some = episodes(0, 0)
    before, after = (
        seen(trainer(llama, tmp_path, **settings, kl_reward_coef=coefficient), some)[0]
        for coefficient in (0.0, 0.25)
    )
    assert after.reference is not None
    table = table_of(some)
    kl = table.per_turn(after.rows.behaviour - after.reference)
    trajectories = table.trajectories()
    centred = within(trajectories.tree, trajectories.total(kl), centre)[trajectories.of]
    gap = after.advantages - before.advantages
    assert_allclose(gap, -0.25 * table.per_token(centred), atol=1e-4)


def test_advantages_are_scaled_then_clipped(tmp_path: Path, llama: Path) -> None:
    scaling = trainer(llama, tmp_path, advantage_scale=2.0, advantage_clip=1.5)
    plain = seen(trainer(llama, tmp_path), batch(0, 0))[0].advantages
    changed = seen(scaling, batch(0, 0))[0].advantages
    assert np.abs(plain).max() > 0.75
    assert_allclose(changed, np.clip(2 * plain, -1.5, 1.5), rtol=1e-6)


@pytest.mark.parametrize("aggregation", ["token", "trajectory"])
def test_a_trajectory_with_a_cut_action_carries_no_loss_but_is_still_compared(
    tmp_path: Path, llama: Path, aggregation: str
) -> None:
    some = episodes(0, 0, turns=3)
    cut = some.groups[1].turns[0]
    some = rescored(some, lambda turn: turn.scores | {"truncated": float(turn is cut)})
    settings: dict[str, Any] = {"scheme": "grpo", "scheme_options": {"column": "outcome"}}
    kept, filtering = (
        seen(
            trainer(llama, tmp_path, overlong_filter=on, aggregation=aggregation, **settings), some
        )
        for on in (False, True)
    )
    table = table_of(some)
    out = table.per_token((table.group == some.groups[1].id) & (table.trajectory == cut.trajectory))
    objective, metrics = filtering
    assert out.any()
    assert not objective.weights[out].any()
    np.testing.assert_array_equal(objective.advantages, kept[0].advantages)
    expected = kept[0].weights[~out]
    if aggregation == "token":
        expected = np.full(len(expected), 1 / len(expected))
    assert_allclose(objective.weights[~out], expected, rtol=1e-6)
    assert metrics["learner/trained_tokens"] == (~out).sum()
    assert kept[1]["learner/trained_tokens"] == len(out)
    assert metrics["score/truncated"] == pytest.approx(1 / len(table))


def test_an_update_of_cut_trajectories_alone_changes_nothing(tmp_path: Path, llama: Path) -> None:
    made = trainer(llama, tmp_path, overlong_filter=True, scheme="grpo")
    some = episodes(0, 0, trees=1, k=2, turns=1)
    metrics = made.update(rescored(some, lambda turn: turn.scores | {"truncated": 1.0}))
    assert (metrics["learner/skipped"], made.version) == (1, 1)
