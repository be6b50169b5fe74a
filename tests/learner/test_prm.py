"""The implicit reward model on a task with planted step values: it learns from outcomes alone which
steps were good."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coppice.learner.update.passes import Plan, Rows, plan, sweep
from coppice.learner.update.prm import ImplicitPrm
from coppice.learner.update.trainer import Batch, Trainer
from coppice.wire.messages import TrainGroup, TreeNode, Turn
from tests.updates import action, table_of, trainer

GOOD, BAD = range(10, 14), range(20, 24)
STEPS, PER_QUESTION = 3, 4


def planted(seed: int, questions: int = 6) -> tuple[Batch, np.ndarray]:
    """Trajectories of three steps; a step's value is +1 or -1 by the kind of its tokens, the
    outcome whether they sum above 0.

    Also the planted values, one a turn.
    """
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


def oprl(
    model: Path, run: Path, prm: dict[str, Any], **settings: Any
) -> tuple[Trainer, ImplicitPrm]:
    made = trainer(model, run, scheme="oprl", kl_coef=0.0, prm=prm, **settings)
    assert made.prm is not None
    return made, made.prm


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "cross_entropy"])
@pytest.mark.parametrize("score", ["sum", "mean"])
def test_accuracy_rises_and_step_scores_follow_the_planted_values(
    tmp_path: Path, llama: Path, loss: str, score: str
) -> None:
    made, prm = oprl(llama, tmp_path, {"loss": loss, "score": score, "lr": 1e-2, "beta": 0.5})

    def measured(batch: Batch, learn: bool) -> tuple[float, np.ndarray]:
        table = table_of(batch)
        rows = Rows(table.paths)
        steps = plan(rows.trie, range(len(rows.paths)), 4096, made.ranks)
        # A fresh model against its own log-probabilities, as when the policy that samples is the
        # one phi starts from.
        rewards = prm.rewards(rows, steps, reference(rows, steps))
        if learn:
            prm._learn(table, rows, steps, reference(rows, steps), rewards, 0)
        return prm.preference(table, rewards)[0].accuracy, table.per_turn(rewards)

    def reference(rows: Rows, steps: Plan) -> np.ndarray:
        with made.policy.inference():
            return sweep(rows, steps, made.ranks, lambda forest: made.policy.read(forest)[0])

    held_out, values = planted(99)
    before, _ = measured(held_out, learn=False)
    for seed in range(12):
        measured(planted(seed)[0], learn=True)
    after, scores = measured(held_out, learn=False)
    assert after >= 0.8
    assert after >= before + 0.2
    assert np.corrcoef(scores, values)[0, 1] > 0.7


def test_more_steps_of_the_reward_model_learn_more(tmp_path: Path, llama: Path) -> None:
    def after(folder: str, **more: int) -> tuple[int, float]:
        made, prm = oprl(llama, tmp_path / folder, {"lr": 1e-2, "beta": 0.5} | more, lr=1e-9)
        batch, _ = planted(0)
        made.update(batch)
        steps = prm.updates
        return steps, made.update(msgspec.structs.replace(batch, version=1))["prm/loss"]

    one, six = after("one"), after("six", epochs=2, minibatches=3)
    assert (one[0], six[0]) == (1, 6)
    assert six[1] < one[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reference", [{}, {"reference": "recomputed"}, {"reference": "behaviour"}])
def test_the_reference_is_one_in_every_number_type(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, dtype: str,
    reference: dict[str, str],
) -> None:  # fmt: skip
    made, prm = oprl(llama, tmp_path, {"lr": 1e-3, **reference}, dtype=dtype)
    seen = []
    monkeypatch.setattr(
        prm, "score_and_learn", lambda *a: (seen.append(a[3]), (np.zeros(len(a[3])), {}))[1]
    )
    batch, _ = planted(0)
    made.update(batch)
    engine = "behaviour" in reference.values()
    assert np.all(seen[0] == -5.5) == engine  # what ``planted`` says that the engine recorded


@pytest.mark.parametrize("order", ["score_first", "update_first"])
def test_scoring_and_updating_have_their_order(tmp_path: Path, llama: Path, order: str) -> None:
    """A model that never stepped gives exactly no step advantage."""
    options = {"variant": "process"}
    made, _ = oprl(llama, tmp_path, {"order": order, "lr": 1e-3}, scheme_options=options)
    batch, _ = planted(0)
    first = made.update(batch)
    assert ("learner/skipped" in first) == (order == "score_first")
    assert first["prm/comparisons"] > 0
    assert made.update(msgspec.structs.replace(batch, version=1))["learner/grad_norm"] > 0


def test_a_batch_of_one_class_teaches_no_reward_model(tmp_path: Path, llama: Path) -> None:
    made, prm = oprl(llama, tmp_path, {"threshold": 5.0})
    assert made.update(planted(0)[0])["prm/skipped"] == 1
    assert prm.updates == 0
