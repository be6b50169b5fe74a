"""Changes of the reward before a scheme reads it, clips of the advantages, and trajectories that
the token limit cut."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coppice.learner.config import LearnerConfig, SoftOverlong
from coppice.learner.schemes import grpo
from coppice.learner.update import rewards
from coppice.learner.update.policy_step import Known
from coppice.learner.update.table import TurnTable
from coppice.learner.update.trainer import Trainer
from coppice.wire.messages import TrainGroup
from tests.updates import batch, episodes, trainer

NAN = float("nan")


def two_trajectories(**columns: list[float]) -> TurnTable:
    """Two trajectories of two turns of one task, with 2, 3, 1 and 4 tokens."""
    return TurnTable(
        tree=np.zeros(4, np.int64),
        group=np.zeros(4, np.int64),
        trajectory=np.array([0, 0, 1, 1]),
        turn=np.array([1, 2, 1, 2]),
        tokens=np.array([2, 3, 1, 4]),
        scores={name: np.array(values) for name, values in columns.items()},
    )


def seen(made: Trainer, some: Any) -> tuple[Known, dict[str, float]]:
    """What the first optimizer step of an update knows, and the update's metrics."""
    known: list[Known] = []
    step = made.policy_step.step

    def noting(first: Known, *rest: Any) -> dict[str, float]:
        known.append(first)
        return step(first, *rest)

    made.policy_step.step = noting  # pyright: ignore[reportAttributeAccessIssue]
    metrics = made.update(some)
    return known[0], metrics


def cut(some: Any, group: int, turn: int) -> Any:
    """The batch with one turn marked as cut by the token limit, and the others as whole."""
    groups = [
        TrainGroup(
            g.id, g.tree, g.nodes,
            [msgspec.structs.replace(t, scores=t.scores | {"truncated": float((i, j) == (group, turn))})
             for j, t in enumerate(g.turns)],
        )
        for i, g in enumerate(some.groups)
    ]  # fmt: skip
    return msgspec.structs.replace(some, groups=groups)


def test_the_soft_overlong_punishment_is_that_of_dapo() -> None:
    # L_max = 100, L_cache = 20: nothing up to 80, (80 - |y|) / 20 up to 100, then -1
    lengths = np.array([10, 80, 85, 90, 100, 300])
    assert rewards.overlong(lengths, 100, 20).tolist() == [0, 0, 0.25, 0.5, 1, 1]


def test_a_penalty_is_charged_to_the_first_score_at_its_turn_or_later() -> None:
    table = two_trajectories(reward=[NAN, 1.0, 2.0, 3.0])
    scores = rewards.charged(table, table.column("reward"), np.array([0.5, 0.25, 0.125, 1.0]))
    np.testing.assert_array_equal(scores, [NAN, 0.25, 1.875, 2.0])


def test_the_reward_is_scaled_then_clipped_and_the_penalties_come_after() -> None:
    table = two_trajectories(reward=[0.1, 0.4, -3.0, NAN])
    config = LearnerConfig(
        reward_scale=2.0, reward_clip=0.5, soft_overlong=SoftOverlong(max_tokens=4, cache_tokens=2)
    )
    np.testing.assert_allclose(
        rewards.shaped(table, "reward", config).column("reward"), [0.2, 0.0, -0.5, NAN]
    )


def test_k1_in_the_reward_reaches_a_group_scheme_as_the_kl_of_whole_trajectories() -> None:
    # Equal outcomes, so GRPO has only the KL to compare: .6 in the first trajectory and -.2 in the
    # second.
    table = two_trajectories(outcome=[NAN, 1.0, NAN, 1.0])
    kl = np.array([0.1, 0.1, 0.2, 0.1, 0.1, 0.1, -0.1, -0.1, -0.1, 0.0])
    table = msgspec.structs.replace(table, token_scores={"kl": kl})
    shaped = rewards.shaped(table, "outcome", LearnerConfig(kl_reward_coef=0.5))
    np.testing.assert_allclose(shaped.column("outcome"), [NAN, 0.7, NAN, 1.1])
    advantages = grpo.advantages(shaped, "outcome", std=False)
    np.testing.assert_allclose(advantages, np.repeat([-0.2, 0.2], 5))


def test_k1_in_the_reward_of_a_trainer_is_the_log_ratio_of_its_samples(
    tmp_path: Path, llama: Path
) -> None:
    plain, charging = (
        trainer(llama, tmp_path, kl_coef=0.0, scheme="grpo", scheme_options={"std": False}, **some)
        for some in (dict[str, Any](), dict[str, Any](kl_reward_coef=0.25))
    )
    some = episodes(0, 0)
    before, after = seen(plain, some)[0], seen(charging, some)[0]
    assert after.reference is not None
    rows = after.rows
    own = np.array([(rows.behaviour[span] - after.reference[span]).sum() for span in rows.spans])
    trees = [g.tree for g in some.groups for _ in g.turns]
    trajectories = [(g.tree, t.trajectory) for g in some.groups for t in g.turns]
    totals = {
        key: sum(own[i] for i, k in enumerate(trajectories) if k == key)
        for key in set(trajectories)
    }
    for i, span in enumerate(rows.spans):
        mates = [total for (tree, _), total in totals.items() if tree == trees[i]]
        expected = -0.25 * (totals[trajectories[i]] - np.mean(mates))
        np.testing.assert_allclose(
            (after.advantages - before.advantages)[span], expected, atol=1e-4
        )


def test_advantages_are_scaled_then_clipped(tmp_path: Path, llama: Path) -> None:
    plain = seen(trainer(llama, tmp_path), batch(0, 0))[0].advantages
    changed = seen(trainer(llama, tmp_path, advantage_scale=2.0, advantage_clip=1.5), batch(0, 0))[
        0
    ].advantages
    assert np.abs(plain).max() > 0.75
    np.testing.assert_allclose(changed, np.clip(2 * plain, -1.5, 1.5), rtol=1e-6)


@pytest.mark.parametrize("aggregation", ["token", "trajectory"])
def test_a_trajectory_with_a_cut_action_carries_no_loss_but_is_still_compared(
    tmp_path: Path, llama: Path, aggregation: str
) -> None:
    some = cut(episodes(0, 0, turns=3), 1, 0)
    settings = {
        "scheme": "grpo",
        "scheme_options": {"column": "outcome"},
        "aggregation": aggregation,
    }
    kept, kept_metrics = seen(trainer(llama, tmp_path, **settings), some)
    known, metrics = seen(trainer(llama, tmp_path, overlong_filter=True, **settings), some)
    trajectories = [(g.id, t.trajectory) for g in some.groups for t in g.turns]
    dropped = (some.groups[1].id, some.groups[1].turns[0].trajectory)
    out = np.concatenate(
        [
            np.full(s.stop - s.start, t == dropped)
            for s, t in zip(known.rows.spans, trajectories, strict=True)
        ]
    )
    assert (known.weights[out] == 0).all()
    assert out.sum() > 0
    np.testing.assert_array_equal(known.advantages, kept.advantages)
    if aggregation == "token":
        np.testing.assert_allclose(known.weights[~out], 1 / (~out).sum(), rtol=1e-6)
    else:
        np.testing.assert_array_equal(known.weights[~out], kept.weights[~out])
    assert (
        metrics["learner/trained_tokens"]
        == (~out).sum()
        == kept_metrics["learner/trained_tokens"] - out.sum()
    )
    assert metrics["score/truncated"] == pytest.approx(1 / len(trajectories))


def test_an_update_of_cut_trajectories_alone_changes_nothing(tmp_path: Path, llama: Path) -> None:
    made = trainer(llama, tmp_path, overlong_filter=True, scheme="grpo")
    some = episodes(0, 0, trees=1, k=2, turns=1)
    turns = [
        msgspec.structs.replace(t, scores=t.scores | {"truncated": 1.0})
        for t in some.groups[0].turns
    ]
    metrics = made.update(
        msgspec.structs.replace(some, groups=[msgspec.structs.replace(some.groups[0], turns=turns)])
    )
    assert (metrics["learner/skipped"], made.version) == (1, 1)
