"""The policy's log-probabilities: reference, temperature, bfloat16, gradient checkpointing."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from coppice.learner.forest.trees import Path as Tokens
from coppice.learner.forest.trees import pack, share
from tests.updates import batch, state, steady, trainer

PATHS = [Tokens([1, 2, 3, 4, 5], 3), Tokens([1, 2, 3, 9, 8, 7], 3), Tokens([1, 2, 6, 6], 2)]


@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_stays_the_initial_policy(tmp_path: Path, llama: Path, rank: int) -> None:
    made = trainer(llama, tmp_path, rank)
    initial = torch.cat([made.policy.read(pack([path]), attention="causal")[0] for path in PATHS])
    assert_close(made.policy.reference_logprobs(pack(PATHS)), initial, atol=2e-5, rtol=1e-5)
    for version in range(2):
        made.update(batch(version, version))
    assert_close(made.policy.reference_logprobs(pack(PATHS)), initial, atol=2e-5, rtol=1e-5)
    assert (made.policy.read(pack(PATHS))[0] - initial).abs().max() > 1e-3
    assert made.policy.read(pack(PATHS))[0].requires_grad  # the adapters are on again


def test_logprobs_are_taken_at_the_sampling_temperature(tmp_path: Path, llama: Path) -> None:
    made = trainer(llama, tmp_path)
    made.policy.tower.temperature = 0.6
    got = made.policy.read(pack(PATHS))[0].detach()
    expected = []
    for path in PATHS:
        with torch.no_grad():
            scores = (
                made.policy.causal(torch.tensor(path.tokens)[None]).logits[0, path.start - 1 : -1]
                / 0.6
            )
        expected.append(
            scores.log_softmax(-1).gather(1, torch.tensor(path.tokens[path.start :])[:, None])[:, 0]
        )
    assert_close(got, torch.cat(expected), atol=2e-5, rtol=1e-5)


def test_gradient_checkpointing_changes_memory_not_the_update(tmp_path: Path, llama: Path) -> None:
    plain, saving = (
        steady(trainer(llama, tmp_path, gradient_checkpointing=saves)) for saves in (False, True)
    )
    for made in (plain, saving):
        made.update(batch(0, 0))
    for name, value in state(plain).items():
        assert_close(state(saving)[name], value, atol=1e-6, rtol=1e-5)


def test_bfloat16_keeps_float32_masters_and_is_near_float32(tmp_path: Path, llama: Path) -> None:
    exact, fast = trainer(llama, tmp_path), trainer(llama, tmp_path, dtype="bfloat16")
    assert fast.policy.compute == torch.bfloat16
    assert {p.dtype for p in fast.policy.trained().values()} == {torch.float32}
    gap = (exact.policy.read(pack(PATHS))[0] - fast.policy.read(pack(PATHS))[0]).abs().max()
    assert 0 < gap < 0.25
    metrics = fast.update(batch(0, 0))
    assert metrics["learner/grad_norm"] > 0


def test_more_ranks_than_micro_batches_leave_some_without_work() -> None:
    assert sorted(map(len, share([7], 3))) == [0, 0, 1]
