"""Batches and models that would train wrong without a word: each is harmless or refused by name;
and batches with hardly a token, at every correction and level."""

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
from coppice.learner.update import corrections
from coppice.learner.update.batches import Inbox
from coppice.learner.update.corrections import LEVELS
from coppice.learner.update.trainer import Batch
from coppice.wire.messages import TrainGroup, TreeClosed
from tests import tiny
from tests.learner.conftest import Make
from tests.learner.tables import made_of
from tests.updates import batch, few, gradient, rescored, trainer


@pytest.mark.parametrize("base", ["grpo", "rloo", "reinforce_pp"])
def test_an_invalid_step_among_equal_outcomes_costs_its_penalty_alone(base: str) -> None:
    t = made_of([1] * 4, {"outcome": [0] * 4, "valid": [1, 0, 1, 1]}, token_scores={"prm": [0] * 4})
    made = schemes.load("oprl", {"base": base})(t).advantages
    assert np.abs(made).max() < 2
    assert made[1] < 0


@pytest.mark.parametrize("value", [2.05, 0.1, -1e9])
def test_equal_scores_leave_exactly_no_advantage(value: float) -> None:
    same = np.full(6, value)
    every = np.ones(6, bool)
    for made in (standardise(same), leave_one_out(same), whiten(same, every)):
        assert not made.any()


def test_an_infinite_score_is_named_with_its_scheme(make: Make) -> None:
    bad = rescored(batch(7, 0), lambda turn: {"reward": float("inf" if turn.node == 1 else 1)})
    told = r"scheme 'grpo'.*not finite"
    with pytest.raises(ValueError, match=told), np.errstate(invalid="ignore"):
        make(scheme="grpo").update(bad)


def test_groups_without_turns_are_an_update_without_a_step(make: Make) -> None:
    made = make()
    metrics = made.update(Batch(0, 1, [TrainGroup(1, 1, [], [])], []))
    assert "learner/grad_norm" not in metrics
    assert made.version == 1


def test_the_self_check_waits_for_a_shared_prefix(make: Make) -> None:
    made = make()
    assert not check(made.policy, [Tokens([1, 2, 3], 1), Tokens([4, 5, 6], 1)])
    assert check(made.policy, [Tokens([1, 2, 3, 4], 3), Tokens([1, 2, 3, 5], 3)])
    made.update(batch(0, 0))
    assert made.checked


def test_a_model_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    config = GraniteConfig(**tiny.SHAPE, logits_scaling=8.0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "granite")
    with pytest.raises(ValueError, match=r"logits_scaling = 8\.0"):
        trainer(tmp_path / "granite", tmp_path)


async def test_idle_ranks_hear_of_rank_0_also_while_groups_trickle_in(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(collective_timeout_s=0.4)
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
    "one token among forced ones": (few([False, True, False], THREE), 1),
    "one token in a forest of many": (few(ONE, NONE, THREE), 1000),
    "no sampled token at all": (few(NONE, NONE), 1),
    "a whole batch of one turn": (few(THREE), 1000),
    "a whole batch of one token": (few(ONE), 1000),
}
"""Batch and micro_tokens: 1 gives each path a forest of its own."""


@pytest.mark.slow
@pytest.mark.parametrize("correction", corrections.CORRECTIONS)
def test_few_tokens_give_the_gradient_of_one_forest_at_every_level(
    make: Make, correction: str
) -> None:
    for level in LEVELS:
        options = {"correction": correction, "correction_options": {"level": level}}
        made = make(kl_coef=0.05, entropy_coef=0.01, grad_clip=1e9, **options)
        for name, (some, micro_tokens) in BATCHES.items():
            slopes = []
            for tokens in (micro_tokens, 1000):
                made.config = made.policy_step.config = msgspec.structs.replace(
                    made.config, micro_tokens=tokens
                )
                slopes.append(gradient(made, some))
            assert (slopes[0] - slopes[1]).norm() <= 1e-4 * slopes[1].norm() + 1e-7, (level, name)
            assert bool(slopes[0].norm() > 0) == (name != "no sampled token at all"), (level, name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BATCHES)
def test_critic_and_prm_learn_from_few(make: Make, name: str, dtype: str) -> None:
    some, micro_tokens = BATCHES[name]
    scored = rescored(some, lambda turn: {"outcome": float(turn.trajectory)})
    settings: dict[str, Any] = {"scheme": "oprl", "scheme_options": {"base": "ppo"}, "dtype": dtype}
    metrics = make(micro_tokens=micro_tokens, **settings).update(scored)
    assert all(np.isfinite(value) for value in metrics.values()), metrics


def test_an_empty_action_is_refused_by_name(make: Make) -> None:
    with pytest.raises(ValueError, match="tree 1, node 1: a trained turn without a token"):
        make().update(few([], THREE))
