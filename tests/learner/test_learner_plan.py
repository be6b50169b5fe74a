"""The plan of a learner against the trainer that follows it, and against the estimates of memory
and FLOPs that read it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import convert

from coppice.learner.config import LearnerConfig
from coppice.learner.model.memory import rank_parts, sizes
from coppice.learner.model.model import TreeModel
from coppice.learner.update.plan import LearnerPlan, plan_of
from coppice.learner.update.trainer import Batch, Trainer
from tests import tiny
from tests.learner.conftest import Make
from tests.updates import episodes, trainer

OPRL: dict[str, Any] = {"scheme": "oprl", "kl_coef": 0.0}
GAE: dict[str, Any] = {"scheme": "gae", "kl_coef": 0.0}
VTRACE = {"targets": "vtrace", "kl_coef": 0.1}
WHOLE, RANK_2 = {"rank": 0}, {"rank": 2}


def agrees(made: Trainer, planned: LearnerPlan) -> None:
    """Check that trainer and memory estimate have the plan's models, adapters and copies."""
    parts = made.parts()
    assert parts.keys() == planned.models.keys()
    for name, (model, _) in parts.items():
        ranks = {p.shape[0] for key, p in model.trained().items() if "lora_A" in key} or {0}
        assert ranks == {planned.models[name].lora.rank}
    copies = int(made.policy.initial is not made.policy)
    assert copies == sum(model.copy for model in planned.models.values())
    adapted = sum(model.lora for model, _ in parts.values())
    few = msgspec.structs.replace(
        made.config, micro_tokens=1, sharding="replicate", offload_optimizer=False
    )
    told = rank_parts(few, {}, 2.0**30, 4)
    assert told.get("frozen weights", 0) == 4 * adapted
    assert told.get("initial policy", 0) == 4 * copies
    trained = {name for name, (model, _) in parts.items() if not model.lora}
    assert {n.partition(" ")[0]: gib for n, gib in told.items() if n.endswith("training")} == (
        dict.fromkeys(trained, 16)
    )
    if not made.policy.lora:
        assert told["published weights"] == 1 + 8 * (made.config.publish != "file")
        for publish, sent in (("file", 2), ("memory", 2.2), ("both", 4.2)):
            other = rank_parts(msgspec.structs.replace(few, publish=publish), {}, 2.0**30, 2)
            assert other["published weights"] == pytest.approx(1 + sent)


@pytest.mark.parametrize(
    ("rank", "settings"),
    [
        (0, {"scheme": "grpo"}),
        (0, {"scheme": "grpo", "kl_coef": 0.0, "correction": "gspo", "epochs": 3}),
        (2, {"scheme": "grpo", "epochs": 2, "target_kl": 100.0}),
        (2, GAE | {"critic": {"lora": WHOLE, "steps": 2}, "epochs": 2}),
        (0, GAE | {"critic": {"lora": RANK_2}, "scheme_options": VTRACE}),
        (0, OPRL | {"prm": {"lora": RANK_2, "epochs": 2}}),
        (2, OPRL | {"prm": {"lora": WHOLE, "reference": "behaviour", "order": "update_first"}}),
        (0, OPRL | {"prm": {"reference": "initial"}}),
    ],
    ids=repr,
)
def test_the_trainer_holds_and_forwards_what_the_plan_says(
    make: Make, rank: int, settings: dict[str, Any]
) -> None:
    made = make(rank, **settings)
    agrees(made, planned := plan_of(made.config))
    some = episodes(0, 0)
    made.update(some)  # the self-check forwards, too
    before = TreeModel.passes
    made.update(Batch(1, some.questions, some.groups, some.nodes))  # one micro-batch
    assert TreeModel.passes - before == sum(
        m.forwards + m.backwards for m in planned.models.values()
    )


@pytest.mark.parametrize(("rank", "dtype"), [(0, "float32"), (4, "bfloat16")])
def test_the_sum_is_what_a_rank_holds(tmp_path: Path, rank: int, dtype: str) -> None:
    folder = tiny.save(tmp_path / "wide", hidden_size=128, intermediate_size=256)
    made = trainer(folder, tmp_path, rank, dtype=dtype)
    shape, weights = sizes(folder)
    told = rank_parts(made.config, shape, weights, 4 if dtype == "float32" else 2)
    initial = made.policy.initial.tower.parameters()
    frozen = sum(p.nbytes for p in initial if not p.requires_grad)
    trained = sum(p.nbytes for p in made.policy.trained().values())
    names = ("frozen weights", "initial policy", "policy in training")
    held = [told.get(name, 0) * 2**30 for name in names]
    assert sum(held[:2]) == pytest.approx(frozen, rel=0.01)
    assert held[2] == pytest.approx(4 * trained, rel=0.01)


def test_offloaded_moments_leave_the_largest_of_step_and_passes() -> None:
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 9}
    held, away, short = (
        rank_parts(convert(GAE | {"lora": WHOLE} | more, LearnerConfig), shape, 2.0**30, 4)
        for more in (
            {"micro_tokens": 2**24}, {"micro_tokens": 2**24, "offload_optimizer": True},
            {"micro_tokens": 1, "offload_optimizer": True},
        )
    )  # fmt: skip
    assert held["policy in training"] == away["policy in training"] + 8 == 16
    assert "activations" in held
    assert short["optimizer step"] == 8 + 4  # one model's moments, and the sum of its gradients


def test_autocast_keeps_rounded_weights_for_the_backward() -> None:
    def kept(sharding: str = "replicate", count: int = 1, size: int = 2, **more: Any) -> float:
        settings = GAE | {"lora": WHOLE, "sharding": sharding, "count": count} | more
        shape = {"hidden_size": 4096, "intermediate_size": 2**14, "num_hidden_layers": 99}
        told = rank_parts(convert(settings, LearnerConfig), shape, 2.0**30, size)
        return told.get("rounded weights", 0.0)

    assert kept() == 2
    assert kept(size=4) == kept("fsdp", 2) == kept(gradient_checkpointing=True) == 0
    adapted = GAE | {"lora": RANK_2, "critic": {"lora": RANK_2}}
    assert kept(**adapted) == 0
