"""The plan of a learner against the trainer that follows it, and against the estimates of memory
and FLOPs that read it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from coppice.learner.config import LearnerConfig, LearnerProcess
from coppice.learner.model.model import TreeModel
from coppice.learner.model.ranks import Ranks
from coppice.learner.update.plan import LearnerPlan, plan_of
from coppice.learner.update.trainer import Batch, Trainer
from coppice.tools.launching.config import load
from coppice.tools.launching.memory import rank_gib
from tests.updates import episodes, trainer

ROOT = Path(__file__).parents[2]
OPRL: dict[str, Any] = {"scheme": "oprl", "kl_coef": 0.0}
GAE: dict[str, Any] = {"scheme": "gae", "kl_coef": 0.0}
WHOLE, RANK_2 = {"rank": 0}, {"rank": 2}


def agrees(made: Trainer, planned: LearnerPlan) -> None:
    """Check that the trainer holds the models, adapters and copies of the plan, and that the
    estimate counts exactly these."""
    parts = made.parts()
    assert parts.keys() == planned.models.keys()
    for name, (model, _) in parts.items():
        ranks = {p.shape[0] for key, p in model.trained().items() if "lora_A" in key} or {0}
        assert ranks == {planned.models[name].lora.rank}
    copies = int(made.policy.initial is not made.policy)
    assert copies == sum(model.copy for model in planned.models.values())
    adapted = sum(model.lora for model, _ in parts.values())
    few = msgspec.structs.replace(made.config, micro_tokens=1, sharding="replicate")
    frozen, rest = rank_gib(few, {}, 2.0**30, 4)
    assert frozen == 4 * adapted
    buckets = 0 if made.policy.lora else 1
    own = 16 * (len(parts) - adapted) + 0.8 * adapted + 4 * copies
    assert rest == pytest.approx(own + buckets)
    if not made.policy.lora:
        for publish, sent in (("file", 2), ("memory", 2.2), ("both", 4.2)):
            other = msgspec.structs.replace(few, publish=publish)
            assert rank_gib(other, {}, 2.0**30, 2)[1] == pytest.approx(own + buckets + sent)


@pytest.mark.parametrize(
    ("rank", "settings"),
    [
        (2, {"scheme": "grpo"}),
        (0, {"scheme": "grpo"}),
        (0, {"scheme": "grpo", "kl_coef": 0.0, "correction": "gspo", "epochs": 3}),
        (2, {"scheme": "grpo", "epochs": 2, "target_kl": 100.0}),
        (2, GAE),
        (2, GAE | {"critic": {"lora": WHOLE, "steps": 2}, "epochs": 2}),
        (
            0,
            GAE
            | {"critic": {"lora": RANK_2}, "scheme_options": {"targets": "vtrace", "kl_coef": 0.1}},
        ),
        (2, OPRL),
        (0, OPRL | {"prm": {"lora": RANK_2, "epochs": 2}}),
        (2, OPRL | {"prm": {"lora": WHOLE, "reference": "behaviour", "order": "update_first"}}),
        (0, OPRL | {"prm": {"reference": "initial"}}),
    ],
    ids=repr,
)
def test_the_trainer_holds_and_forwards_what_the_plan_says(
    tmp_path: Path, llama: Path, rank: int, settings: dict[str, Any]
) -> None:
    made = trainer(llama, tmp_path, rank, **settings)
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
