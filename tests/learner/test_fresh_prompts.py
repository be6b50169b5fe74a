"""The games' layout, where each turn is a prompt of its own below the root: packed training equals
path-by-path training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coppice.learner.forest.trees import Forest
from coppice.learner.model.model import TreeModel
from coppice.learner.update.trainer import Trainer
from tests.updates import episodes, everything, steady, trainer

BATCH = episodes(6, 0, trees=2, turns=3, fresh=True)


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every model reads a single path by its own causal attention."""

    read = TreeModel.read

    def causal(self: TreeModel, forest: Forest, initial: bool = False) -> Any:
        assert forest.depth.tolist() == list(range(len(forest.tokens)))
        return read(self, forest, initial, attention="causal")

    monkeypatch.setattr(TreeModel, "read", causal)
    # the self-check would compare single paths with themselves
    monkeypatch.setattr("coppice.learner.update.trainer.check", lambda *_: True)


def shaken(made: Trainer) -> Trainer:
    """Trained parameters away from the zeros that adapters and a critic start with."""
    torch.manual_seed(3)
    for model, _ in made.parts().values():
        for parameter in model.trained().values():
            parameter.data.normal_(0, 0.1)
    return made


@pytest.mark.slow
def test_sequence_ratios_follow_the_policy_through_two_epochs_of_minibatches_of_fresh_prompts(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trajectory's turns lie in different forests; its ratio must still be that of the policy as
    it stands."""
    settings: dict[str, Any] = {
        "scheme": "gae", "critic": {"lr": 1e-2}, "epochs": 2, "minibatches": 2,
        "correction": "gspo", "correction_options": {"clip_low": 0.1, "clip_high": 0.1},
    }  # fmt: skip

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
