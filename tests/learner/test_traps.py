"""Batches and models that would train wrong without a word: each is harmless or refused by name; and
batches with hardly a token, at every correction and level."""

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, GraniteConfig

from coppice.common.statistics import leave_one_out, standardise, whiten
from coppice.learner import schemes
from coppice.learner.forest.selfcheck import check
from coppice.learner.forest.trees import Path as Tokens
from coppice.learner.main import Leader
from coppice.learner.model.model import TreeModel
from coppice.learner.model.ranks import Ranks
from coppice.learner.update import corrections
from coppice.learner.update.batches import Inbox
from coppice.learner.update.corrections import LEVELS
from coppice.learner.update.trainer import Batch
from coppice.wire.messages import TrainGroup, TreeClosed
from tests.learner.tables import made_of
from tests.updates import batch, few, gradient, groups, process, trainer


@pytest.mark.parametrize("base", ["grpo", "rloo", "reinforce_pp"])
def test_an_invalid_step_among_equal_outcomes_costs_its_penalty_alone(base: str) -> None:
    t = made_of([1] * 4, {"outcome": [0] * 4, "valid": [1, 0, 1, 1]}, token_scores={"prm": [0] * 4})
    made = schemes.load("oprl", {"base": base})(t).advantages
    assert np.abs(made).max() < 2
    assert made[1] < 0


@pytest.mark.parametrize("value", [2.05, 0.1, -1e9])
def test_equal_scores_leave_exactly_no_advantage(value: float) -> None:
    same = np.full(6, value)
    for made in (
        standardise(same),
        standardise(same, eps=1e-8),
        leave_one_out(same),
        whiten(same, same == same),
    ):
        assert not made.any()


def test_an_infinite_score_is_named_with_its_scheme(tmp_path: Path, llama: Path) -> None:
    some, nodes = groups(7)
    turns = [msgspec.structs.replace(t, scores={"reward": float("inf")}) for t in some[0].turns[:1]]
    bad = TrainGroup(some[0].id, some[0].tree, some[0].nodes, turns + some[0].turns[1:])
    with (
        pytest.raises(ValueError, match=r"scheme 'grpo'.*not finite"),
        np.errstate(invalid="ignore"),
    ):
        trainer(llama, tmp_path, scheme="grpo").update(Batch(0, 3, [bad, *some[1:]], nodes))


def test_groups_without_turns_are_an_update_without_a_step(tmp_path: Path, llama: Path) -> None:
    made = trainer(llama, tmp_path)
    metrics = made.update(Batch(0, 1, [TrainGroup(1, 1, [], [])], []))
    assert "learner/grad_norm" not in metrics
    assert made.version == 1


def test_the_self_check_waits_for_a_shared_prefix(tmp_path: Path, llama: Path) -> None:
    made = trainer(llama, tmp_path)
    assert not check(made.policy, [Tokens([1, 2, 3], 1), Tokens([4, 5, 6], 1)])
    assert check(made.policy, [Tokens([1, 2, 3, 4], 3), Tokens([1, 2, 3, 5], 3)])
    made.update(batch(0, 0))
    assert made.checked


def test_a_model_that_scales_its_logits_is_refused(tmp_path: Path, llama: Path) -> None:
    config = GraniteConfig(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, logits_scaling=8.0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "granite")
    with pytest.raises(ValueError, match=r"logits_scaling = 8\.0"):
        TreeModel(str(tmp_path / "granite"), process(llama, tmp_path).learner, 1.0, Ranks(60))


async def test_idle_ranks_hear_of_rank_0_also_while_groups_trickle_in(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(llama, tmp_path, collective_timeout_s=0.4)
    heard = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(made.ranks, "broadcast", lambda _: loop.call_soon_threadsafe(heard.set))
    leader = Leader(made, tmp_path, Inbox(3, {}))
    call = cast(Any, None)
    working = asyncio.create_task(leader.work())
    async with asyncio.timeout(10):
        while not heard.is_set():
            await leader.close(TreeClosed(0, []), call)  # completes no batch
            await asyncio.sleep(0.02)
    leader.stop()
    await working


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
def test_critic_and_prm_learn_from_few(tmp_path: Path, llama: Path, name: str, dtype: str) -> None:
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
