"""The plan of a learner against the trainer that follows it, and against the estimates of memory
and FLOPs that read it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import convert
from msgspec.structs import replace

from coppice.learner.config import LearnerConfig, LearnerProcess
from coppice.learner.model.memory import lacks, rank_parts, sizes
from coppice.learner.model.model import TreeModel
from coppice.learner.model.ranks import Ranks
from coppice.learner.update.plan import LearnerPlan, plan_of
from coppice.learner.update.trainer import Batch, Trainer
from coppice.tools.launching.config import load
from tests import tiny
from tests.learner.conftest import Make
from tests.updates import episodes, trainer

ROOT = Path(__file__).parents[2]
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
        (2, {"scheme": "grpo"}),
        (0, {"scheme": "grpo"}),
        (0, {"scheme": "grpo", "kl_coef": 0.0, "correction": "gspo", "epochs": 3}),
        (2, {"scheme": "grpo", "epochs": 2, "target_kl": 100.0}),
        (2, GAE),
        (2, GAE | {"critic": {"lora": WHOLE, "steps": 2}, "epochs": 2}),
        (0, GAE | {"critic": {"lora": RANK_2}, "scheme_options": VTRACE}),
        (2, OPRL),
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


@pytest.mark.slow
def test_every_shipped_config_is_trained_as_planned(tmp_path: Path, llama: Path) -> None:
    small = {
        "count": 1, "sharding": "replicate", "dtype": "float32", "gradient_checkpointing": False,
    }  # fmt: skip
    kinds: dict[bytes, LearnerConfig] = {}
    for path in sorted((ROOT / "configs").glob("*.toml")):
        config = msgspec.structs.replace(load(path, []).learner, **small, train_vision=False)
        kinds.setdefault(msgspec.json.encode(plan_of(config).models), config)
    assert len(kinds) > 3
    for config in kinds.values():
        made = Trainer(
            LearnerProcess("learner", str(tmp_path), 0, str(llama), 3, 1.0, config), Ranks(60)
        )
        agrees(made, plan_of(config))


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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


def test_moments_in_main_memory_leave_the_largest_of_step_and_passes() -> None:
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 9}
    ppo = convert({"scheme": "gae", "lora": WHOLE, "micro_tokens": 2**24}, LearnerConfig)
    gib = 2.0**30
    held = rank_parts(ppo, shape, gib, 4)
    assert (held["policy in training"], held["critic in training"]) == (16, 16)
    assert "activations" in held
    assert "optimizer step" not in held
    away = rank_parts(replace(ppo, offload_optimizer=True), shape, gib, 4)
    assert (away["policy in training"], away["activations"]) == (8, held["activations"])
    short = rank_parts(replace(ppo, offload_optimizer=True, micro_tokens=1), shape, gib, 4)
    assert short["optimizer step"] == 8 + 4  # one model's moments, and the sum of its gradients
    halved = replace(ppo, sharding="fsdp", count=2, micro_tokens=1)
    assert rank_parts(halved, shape, gib, 4)["critic in training"] == 8


def test_what_does_not_fit_names_the_largest_part_and_its_remedy() -> None:
    parts = {"frozen weights": 10.0, "policy in training": 20.0, "activations": 30.0}
    assert lacks(parts, 60) == ""
    assert lacks(parts, 59).endswith(
        "59.0 GiB are free: most is for activations; take learner.gradient_checkpointing, or a"
        " smaller learner.micro_tokens"
    )
