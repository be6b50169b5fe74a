"""The games' layout, where each turn is a prompt of its own below the root: packed training equals
path-by-path training."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coppice.learner.forest.trees import Forest
from coppice.learner.forest.trees import Path as Tokens
from coppice.learner.model.model import Row, TreeModel
from coppice.learner.update.table import build
from coppice.learner.update.trainer import Trainer
from tests.updates import episodes, everything, steady, trainer

BATCH = episodes(6, 0, trees=2, turns=3, fresh=True)


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every model reads a single path by its own causal attention."""

    def row(self: TreeModel, forest: Forest) -> Row:
        assert forest.depth.tolist() == list(range(len(forest.tokens)))
        return self.plain_row(Tokens(forest.tokens, len(forest.tokens) - len(forest.target)))

    monkeypatch.setattr(TreeModel, "row", row)


def shaken(made: Trainer) -> Trainer:
    """Trained parameters away from the zeros that adapters and a critic start with."""
    torch.manual_seed(3)
    for model, _ in made.parts().values():
        for parameter in model.trained().values():
            parameter.data.normal_(0, 0.1)
    return made


def gradients(
    made: Trainer, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradient of all that trains on the batch, and the metrics of the update."""
    found: dict[str, torch.Tensor] = {}
    for part, (_, stepper) in made.parts().items():

        def keep(
            part: str = part, parameters: dict[str, torch.nn.Parameter] = stepper.parameters
        ) -> None:
            found.update(
                {
                    f"{part}/{name}": p.grad.clone()
                    for name, p in parameters.items()
                    if p.grad is not None
                }
            )

        monkeypatch.setattr(stepper.adamw, "step", keep)
    return found, made.update(BATCH)


def test_the_turns_of_a_fresh_batch_share_the_root_and_do_not_extend_each_other() -> None:
    growing = episodes(6, 0, trees=2, turns=3)
    (table, turns), (_, chained) = (
        build(b.groups, {(t, n.id): n for t, n in b.nodes}) for b in (BATCH, growing)
    )
    trajectories = table.trajectories()
    assert max(map(len, trajectories.rows)) == 3
    for rows in trajectories.rows:
        for earlier, later in itertools.pairwise(rows):
            before = [*turns[earlier].prefix, *turns[earlier].action]
            assert turns[later].prefix[: len(before)].tolist() != before
            assert turns[later].prefix[:6].tolist() == turns[earlier].prefix[:6].tolist()
    assert [turn.action.tolist() for turn in turns] == [turn.action.tolist() for turn in chained]
    assert [len(turn.prefix) for turn in turns] == [10] * len(turns)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "correction", "level"),
    [
        ("turn_grpo", "ppo_clip", "token"),
        ("outcome", "gspo", "sequence"),
        ("gae", "decoupled", "turn"),
    ],
)
def test_the_packed_gradient_of_a_fresh_batch_is_the_path_by_path_gradient_also_of_a_critic(
    tmp_path: Path,
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str,
    correction: str,
    level: str,
) -> None:
    settings: dict[str, Any] = {
        "scheme": scheme,
        "correction": correction,
        "correction_options": {"level": level},
    }
    settings |= {"kl_coef": 0.05, "entropy_coef": 0.01, "grad_clip": 1e9}
    if scheme == "gae":
        settings["critic"] = {"grad_clip": 1e9}
    packed, metrics = gradients(shaken(trainer(llama, tmp_path, **settings)), monkeypatch)
    cut, few = gradients(shaken(trainer(llama, tmp_path, micro_tokens=30, **settings)), monkeypatch)
    one_by_one(monkeypatch)
    plain, alone = gradients(
        shaken(trainer(llama, tmp_path, micro_tokens=1, **settings)), monkeypatch
    )
    assert (
        metrics["learner/forwarded_tokens"]
        < few["learner/forwarded_tokens"]
        < alone["learner/forwarded_tokens"]
    )
    assert alone["learner/forwarded_tokens"] == alone["learner/path_tokens"]
    assert {name.split("/")[0] for name in plain} == (
        {"policy", "critic"} if scheme == "gae" else {"policy"}
    )
    assert packed.keys() == cut.keys() == plain.keys()
    for name, value in plain.items():
        assert value.norm() > 0, name
        for mine in (packed[name], cut[name]):
            assert (mine - value).norm() <= 1e-4 * value.norm() + 1e-7, name


@pytest.mark.slow
def test_sequence_ratios_follow_the_policy_through_two_epochs_of_minibatches_of_fresh_prompts(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trajectory's turns lie in different forests; its ratio must still be that of the policy as
    it stands."""
    settings: dict[str, Any] = {"scheme": "gae", "correction": "gspo", "critic": {"lr": 1e-2}}
    settings |= {
        "correction_options": {"clip_low": 0.1, "clip_high": 0.1},
        "epochs": 2,
        "minibatches": 2,
    }

    def trained(micro_tokens: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        made = steady(shaken(trainer(llama, tmp_path, micro_tokens=micro_tokens, **settings)))
        before = everything(made)
        made.update(BATCH)
        return before, everything(made)

    before, packed = trained(1000)
    _, cut = trained(30)
    one_by_one(monkeypatch)
    _, plain = trained(1)
    moved = {
        part: max(_gap(plain[n], before[n]) for n in plain if n.startswith(part))
        for part in ("policy", "critic")
    }
    assert min(moved.values()) > 1e-3
    for name, value in plain.items():
        torch.testing.assert_close(packed[name], value, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(cut[name], value, atol=1e-5, rtol=1e-4)


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(np.abs((a - b).numpy()).max())
