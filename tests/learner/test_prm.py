"""The implicit reward model: on a task with planted step values it learns from outcomes alone which
steps were good; its losses, and the critic's, against autograd."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from coppice.learner.config import PrmConfig
from coppice.learner.update.critic import value_loss
from coppice.learner.update.passes import Rows, plan, sweep
from coppice.learner.update.prm import ImplicitPrm, Preference, cross_entropy, dpo
from coppice.learner.update.table import TurnTable
from coppice.learner.update.trainer import Batch, Trainer
from coppice.wire.messages import TrainGroup, TreeNode, Turn
from tests.learner.conftest import Make
from tests.learner.tables import NO, made_of
from tests.updates import action, table_of

GOOD, BAD = range(10, 14), range(20, 24)
STEPS, PER_QUESTION = 3, 4


def planted(seed: int, questions: int = 6) -> tuple[Batch, np.ndarray]:
    """Trajectories of three steps, each worth +1 or -1 by its tokens, and the worths; the
    outcome is whether they sum above 0."""
    rng = np.random.default_rng(seed)
    groups, nodes, values = [], [], []
    for tree in range(questions):
        own, turns = [TreeNode(0, -1, "prompt", rng.integers(30, 90, 4).astype(np.int32))], []
        for trajectory in range(PER_QUESTION):
            worth, parent = rng.choice([-1.0, 1.0], STEPS), 0
            for step in range(STEPS):
                tokens = rng.choice(GOOD if worth[step] > 0 else BAD, 2)
                own.append(action(len(own), parent, tokens))
                scores = {"outcome": float(worth.sum() > 0)} if step == STEPS - 1 else {}
                turns.append(Turn(own[-1].id, trajectory, step + 1, scores))
                parent = own[-1].id
                values.append(worth[step])
        groups.append(TrainGroup(tree, tree, own, turns))
        nodes += [(tree, node) for node in own]
    return Batch(0, questions, groups, nodes), np.array(values)


def oprl(make: Make, prm: dict[str, Any], **settings: Any) -> tuple[Trainer, ImplicitPrm]:
    made = make(scheme="oprl", kl_coef=0.0, prm=prm, **settings)
    assert made.prm is not None
    return made, made.prm


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "score"), [("dpo", "sum"), ("cross_entropy", "mean")])
def test_scores_follow_planted_values(make: Make, loss: str, score: str) -> None:
    prm = {"loss": loss, "score": score, "lr": 1e-2, "beta": 0.5}
    # the policy stands still: a fresh model against its own log-probabilities
    made, model = oprl(make, prm, lr=1e-9)

    def measured(batch: Batch) -> tuple[float, np.ndarray]:
        table = table_of(batch)
        rows = Rows(table.paths)
        steps = plan(rows.trie, range(len(rows.paths)), 4096, made.ranks)
        reference = sweep(rows, steps, made.policy)
        rewards = model.rewards(rows, steps, reference)
        return model.preference(table, rewards)[0].accuracy, table.per_turn(rewards)

    held_out, values = planted(99)
    before, _ = measured(held_out)
    for seed in range(12):
        made.update(msgspec.structs.replace(planted(seed)[0], version=seed))
    after, scores = measured(held_out)
    assert after >= 0.8
    assert after >= before + 0.2
    assert np.corrcoef(scores, values)[0, 1] > 0.7


@pytest.mark.parametrize("order", ["score_first", "update_first"])
def test_scoring_and_updating_have_their_order(make: Make, order: str) -> None:
    """A model that never stepped gives exactly no step advantage."""
    made, _ = oprl(make, {"order": order, "lr": 1e-3}, scheme_options={"variant": "process"})
    batch, _ = planted(0)
    first = made.update(batch)
    assert first["learner/skipped"] == (order == "score_first")
    assert first["prm/comparisons"] > 0
    assert made.update(msgspec.structs.replace(batch, version=1))["learner/grad_norm"] > 0


def test_a_batch_of_one_class_teaches_no_reward_model(make: Make) -> None:
    made, prm = oprl(make, {"threshold": 5.0})
    assert made.update(planted(0)[0])["prm/skipped"] == 1
    assert prm.updates == 0


def test_the_reward_model_is_measured_beside_the_policy_and_an_oracle(make: Make) -> None:
    """The policy's log-probabilities order every pair and every step rightly, a fresh model none:
    it is unused even after its first step."""
    made, prm = oprl(make, {"only_better": True, "lr": 1e-3})
    batch, values = planted(0)
    made.update(batch)
    table = table_of(batch)
    table.scores["optimal"] = (values > 0).astype(float)
    rows = Rows(table.paths)
    rows.behaviour[:] = table.per_token(np.where(values > 0, -1.0, -2.0))
    steps = plan(rows.trie, range(len(rows.paths)), 4096, made.ranks)
    rewards, metrics = prm.score_and_learn(table, rows, steps, rows.behaviour, 1)
    assert metrics["prm/policy_accuracy"] == metrics["prm/policy_oracle_accuracy"] == 1
    assert metrics["prm/oracle_accuracy"] < 0.9 and metrics["prm/accuracy"] < 1
    assert metrics["prm/unused"] == 1 and not rewards.any()
    rows.behaviour[:] *= -1  # now it orders every pair wrongly
    rewards, metrics = prm.score_and_learn(table, rows, steps, rows.behaviour * 0 - 5.5, 2)
    assert metrics["prm/policy_accuracy"] == metrics["prm/policy_oracle_accuracy"] == 0
    assert metrics["prm/unused"] == 0 and rewards.any()


def test_only_pairs_can_be_ordered_better() -> None:
    with pytest.raises(ValueError, match=r"only_better.*'dpo'.*'cross_entropy'"):
        PrmConfig(loss="cross_entropy", only_better=True)


LOG_RATIOS = np.array([4.0, -2, 1, 0, -3])  # methods.md 5: trajectories of two and three steps


TWO = made_of([2, 3], {"outcome": [NO, 10, NO, NO, 0]})


def preference(
    table: TurnTable, rewards: np.ndarray, config: PrmConfig, questions: np.ndarray | None = None
) -> tuple[Preference, np.ndarray]:
    return ImplicitPrm.preference(
        cast(ImplicitPrm, SimpleNamespace(config=config)), table, rewards, questions
    )


@pytest.mark.parametrize(("score", "loss"), [("sum", 0.5981), ("mean", 0.6523)])
def test_dpo_known_answer_over_sums_and_means_of_step_scores(score: str, loss: float) -> None:
    config = PrmConfig(score=score)  # pyright: ignore[reportArgumentType]
    made, _ = preference(TWO, 0.05 * LOG_RATIOS, config)
    assert made.loss == pytest.approx(loss, abs=5e-5)
    assert (made.used, made.accuracy) == (1, 1.0)


def written_out(
    loss: str, scores: torch.Tensor, positive: np.ndarray, group: np.ndarray
) -> torch.Tensor:
    """The mean over every pair of one group, or torch's cross-entropy."""
    if loss == "cross_entropy":
        wanted = torch.tensor(positive, dtype=torch.float64)
        return torch.nn.functional.binary_cross_entropy_with_logits(scores, wanted)
    terms = []
    for i, j in np.ndindex(len(positive), len(positive)):
        if group[i] == group[j] and positive[i] and not positive[j]:
            terms.append(-torch.nn.functional.logsigmoid(scores[i] - scores[j]))
    return torch.stack(terms).mean() if terms else scores.sum() * 0


LOSSES = {"dpo": dpo, "cross_entropy": lambda scores, positive, _: cross_entropy(scores, positive)}


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_losses_and_slopes_are_those_written_out(loss: str, seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    scores, positive, group = rng.normal(0, 2, n), rng.random(n) < 0.5, rng.integers(0, 3, n)
    made = LOSSES[loss](scores, positive, group)
    leaf = torch.tensor(scores, requires_grad=True)
    expected = written_out(loss, leaf, positive, group)
    (slope,) = torch.autograd.grad(expected, leaf)
    assert made.loss == pytest.approx(float(expected.detach()), abs=1e-12)
    assert_allclose(made.slope, slope.numpy(), atol=1e-12)


def test_the_accuracy_is_the_share_of_pairs_in_the_right_order() -> None:
    made = dpo(np.array([1.0, -1, 0]), np.array([True, True, False]), np.zeros(3))
    assert (made.used, made.accuracy) == (2, 0.5)
    each = cross_entropy(np.array([1.0, -1, 2]), np.array([True, True, False]))
    assert (each.used, each.accuracy) == (3, pytest.approx(1 / 3))


def test_scores_too_large_for_a_float_leave_losses_and_slopes_finite() -> None:
    scores, positive = np.array([900.0, -900]), np.array([False, True])
    with np.errstate(over="ignore"):
        pairs, each = dpo(scores, positive, np.zeros(2)), cross_entropy(scores, positive)
    assert pairs.loss == pytest.approx(1800)
    assert pairs.slope.tolist() == [1, -1]
    assert each.loss == pytest.approx(900)
    assert each.slope.tolist() == [0.5, -0.5]


@pytest.mark.parametrize("loss", ["dpo", "cross_entropy"])
@pytest.mark.parametrize("score", ["sum", "mean"])
def test_a_tokens_slope_is_that_of_the_loss_in_its_log_probability(loss: str, score: str) -> None:
    rng = np.random.default_rng(3)
    config = PrmConfig(beta=0.3, loss=loss, score=score)  # pyright: ignore[reportArgumentType]
    rows = [(0, 0, 2, 1.0), (1, 0, 1, 0.0), (0, 1, 1, 0.0)]
    rows += [(0, 0, 1, NO), (1, 1, 1, 1.0), (0, 2, 1, 1.0)]
    tree, trajectory, turn, outcome = (np.array(column) for column in zip(*rows, strict=True))
    tokens = np.array([2, 1, 3, 2, 1, 2])
    sampled = rng.random(11) < 0.7
    table = TurnTable(tree, tree, trajectory, turn, tokens, {"outcome": outcome}, sampled=sampled)
    log_ratio = np.where(sampled, rng.normal(0, 1, 11), 0.0)
    _, slope = preference(table, config.beta * log_ratio, config)

    leaf = torch.tensor(log_ratio, requires_grad=True)
    own = torch.where(torch.tensor(sampled), config.beta * leaf, 0.0)
    row = np.repeat(np.arange(6), tokens)
    totals, positive, group = [], [], []
    for name in sorted({(t, i) for t, i, _, _ in rows}):
        mine = [r for r in range(6) if rows[r][:2] == name]
        total = own[torch.tensor(np.isin(row, mine))].sum()
        totals.append(total / len(mine) if score == "mean" else total)
        positive.append(np.nansum(outcome[mine]) > 0)
        group.append(name[0])
    made = written_out(loss, torch.stack(totals), np.array(positive), np.array(group))
    (expected,) = torch.autograd.grad(made, leaf)
    assert np.abs(slope).max() > 1e-3
    assert_allclose(slope, expected.numpy(), atol=1e-12)
    assert (slope[~sampled] == 0).all()


@pytest.mark.parametrize("loss", ["dpo", "cross_entropy"])
def test_the_losses_of_two_halves_of_the_questions_are_parts_of_the_whole_loss(loss: str) -> None:
    config = PrmConfig(beta=0.3, loss=loss, score="mean")  # pyright: ignore[reportArgumentType]
    outcome: list[float] = [NO, 1, 0, 1, NO, 0, 1, 0, NO, 1, 1, 0]
    table = made_of([2, 1, 1] * 3, {"outcome": outcome}, tree=[4] * 3 + [7] * 3 + [9] * 3)
    rewards = np.random.default_rng(5).normal(0, 1, 12)
    whole, slope = preference(table, rewards, config)
    first, second = (preference(table, rewards, config, np.array(part)) for part in ([4, 9], [7]))
    uses = np.array([first[0].used, second[0].used])
    assert uses.sum() == whole.used
    assert (first[1][4:8] == 0).all()
    assert (second[1][[0, 1, 2, 3, 8, 9, 10, 11]] == 0).all()
    share = uses / uses.sum()
    assert_allclose(first[1] * share[0] + second[1] * share[1], slope, atol=1e-12)
    assert first[0].loss * share[0] + second[0].loss * share[1] == pytest.approx(whole.loss)


def test_a_trajectory_is_positive_when_its_outcome_is_above_the_threshold() -> None:
    for threshold, used in ((6.0, 1), (10.0, 0)):
        assert preference(TWO, LOG_RATIOS, PrmConfig(threshold=threshold))[0].used == used


def test_the_value_loss_is_the_squared_error_and_beyond_the_clip_the_worse_of_two() -> None:
    values = torch.tensor([1.2, 2.0, 2.0, -1.0, 0.9], requires_grad=True)
    old, returns = torch.ones(5), torch.tensor([2.0, 3.0, 0.0, -3.0, 1.0])
    made = value_loss(values, old, returns, 0.5)
    # near: (1.2 - 2)^2; moved by 1 towards its return: (1.5 - 3)^2 counts; away from it: (2 - 0)^2
    # counts; moved by -2 towards: (.5 + 3)^2; near again: (.9 - 1)^2
    torch.testing.assert_close(made.detach(), torch.tensor([0.64, 2.25, 4.0, 12.25, 0.01]))
    (slope,) = torch.autograd.grad(made.sum(), values)
    torch.testing.assert_close(slope, torch.tensor([-1.6, 0.0, 4.0, 0.0, -0.2]))
