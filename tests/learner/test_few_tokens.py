"""Batches with hardly a token: one sampled token, none in a forest or in the whole batch, one turn;
at every correction and level."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coppice.learner.update import corrections
from coppice.learner.update.corrections import LEVELS
from tests.updates import few, gradient, trainer

ONE, NONE, THREE = [True], [False, False], [True] * 3
BATCHES = {
    "one token in each of two forests": (few(ONE, ONE), 1),
    "one token among forced ones": (few([False, True, False], THREE), 1),
    "no sampled token in one forest": (few(NONE, THREE), 1),
    "one token in a forest of many": (few(ONE, NONE, THREE), 1000), "no sampled token at all": (few(NONE, NONE), 1),
    "a whole batch of one turn": (few(THREE), 1000), "a whole batch of one token": (few(ONE), 1000),
}  # fmt: skip
"""Batch and micro_tokens: 1 gives each path a forest of its own."""


@pytest.mark.slow
@pytest.mark.parametrize("correction", corrections.CORRECTIONS)
def test_few_tokens_give_the_gradient_of_one_forest_at_every_level(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, correction: str
) -> None:
    for level in LEVELS:
        settings: dict[str, Any] = {
            "correction": correction,
            "correction_options": {"level": level},
        }
        made = trainer(llama, tmp_path, kl_coef=0.05, entropy_coef=0.01, grad_clip=1e9, **settings)
        for name, (some, micro_tokens) in BATCHES.items():
            slopes = []
            for tokens in (micro_tokens, 1000):
                made.config = made.policy_step.config = msgspec.structs.replace(
                    made.config, micro_tokens=tokens
                )
                slopes.append(gradient(made, some, monkeypatch))
            assert (slopes[0] - slopes[1]).norm() <= 1e-4 * slopes[1].norm() + 1e-7, (level, name)
            assert bool(slopes[0].norm() > 0) == (name != "no sampled token at all"), (level, name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BATCHES)
def test_critic_and_reward_model_learn_from_few_tokens(
    tmp_path: Path, llama: Path, name: str, dtype: str
) -> None:
    some, micro_tokens = BATCHES[name]
    scored = [
        msgspec.structs.replace(t, scores={"outcome": float(i)})
        for i, t in enumerate(some.groups[0].turns)
    ]
    some = msgspec.structs.replace(
        some, groups=[msgspec.structs.replace(some.groups[0], turns=scored)]
    )
    settings: dict[str, Any] = {"scheme": "oprl", "scheme_options": {"base": "ppo"}, "dtype": dtype}
    made = trainer(llama, tmp_path, micro_tokens=micro_tokens, **settings)
    metrics = made.update(some)
    assert all(np.isfinite(value) for value in metrics.values()), metrics


def test_an_empty_action_is_refused_by_name(tmp_path: Path, llama: Path) -> None:
    some = few([], THREE)
    with pytest.raises(ValueError, match="tree 1, node 1: a trained turn without a token"):
        trainer(llama, tmp_path).update(some)
