"""The learner scores the distribution that was sampled, also where top-p or top-k cut it: real
samples of the embedded engine."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.local import LocalEngine
from coppice.common.support import encode
from coppice.learner.forest.trees import Path as Tokens
from coppice.learner.update.passes import Rows, plan
from coppice.learner.update.table import build
from coppice.learner.update.trainer import Batch, Trainer
from coppice.wire.messages import GenerateRequest, Sampling, TrainGroup, TreeNode, Turn
from tests.updates import table_of, trainer

CUTS = {"top_p": {"top_p": 0.9}, "top_k": {"top_k": 7}, "both": {"top_p": 0.8, "top_k": 20}}
TEMPERATURE = 0.8
CANDIDATES = 3


async def sampled(model: Path, **cut: Any) -> Batch:
    """Two questions of one step, whose candidates the embedded engine sampled from ``model``."""
    engine = LocalEngine(str(model), ActorsConfig(dtype="float32", max_context=256))
    await engine.start()
    groups, nodes = [], []
    for tree in range(2):
        prompt = np.random.default_rng(tree).integers(0, 256, 20).astype(np.int32)
        sampling = Sampling(12, TEMPERATURE, seed=tree, support=True, **cut)
        result = await engine.generate(GenerateRequest(prompt, CANDIDATES, sampling))
        own = [TreeNode(0, -1, "prompt", prompt)]
        for i, sample in enumerate(result.samples):
            record = sample.logprobs, sample.versions, np.ones(len(sample.tokens), bool)
            assert sample.support
            own.append(TreeNode(i + 1, 0, "action", sample.tokens, *record, support=sample.support))
        scores = [{"reward": float(i), "outcome": float(i > 0)} for i in range(CANDIDATES)]
        turns = [Turn(i + 1, i, 1, each) for i, each in enumerate(scores)]
        groups.append(TrainGroup(tree, tree, own, turns))
        nodes += [(tree, node) for node in own]
    await engine.close()
    torch.set_grad_enabled(True)  # the engine shares this process
    return Batch(0, 2, groups, nodes)


def tempered(model: Path, run: Path, rank: int = 4, **settings: object) -> Trainer:
    made = trainer(model, run, rank, **settings)
    for one in (made.policy, made.policy.initial, made.prm and made.prm.model):
        if one is not None:
            one.tower.temperature = TEMPERATURE
    return made


def explicit(made: Trainer, path: Tokens) -> torch.Tensor:
    """Log-probabilities by transformers' own forward and a softmax over an explicit mask."""
    assert path.support is not None
    ids = torch.as_tensor(np.asarray(path.tokens))
    scores = made.policy.causal(ids[None]).logits[0, path.start - 1 : -1].double() / TEMPERATURE
    left = torch.zeros_like(scores, dtype=torch.bool)
    left[torch.as_tensor(path.support.places), torch.as_tensor(path.support.ids)] = True
    logs = scores.masked_fill(~left, -torch.inf).log_softmax(-1)
    return logs.gather(1, ids[path.start :, None])[:, 0]


def slopes(made: Trainer, total: torch.Tensor) -> torch.Tensor:
    """The gradient of ``total`` in the policy, flat."""
    trained = [p for p in made.policy.trained().values() if p.requires_grad]
    found = torch.autograd.grad(total, trained, allow_unused=True)
    return torch.cat([slope.reshape(-1) for slope in found if slope is not None])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rank", [0, 4])
async def test_logprobs_and_gradients_are_those_of_the_masked_softmax(
    tmp_path: Path, llama: Path, cut: str, rank: int
) -> None:
    some, made = await sampled(llama, **CUTS[cut]), tempered(llama, tmp_path, rank)
    if rank:
        with torch.no_grad():
            for name, parameter in made.policy.trained().items():
                if "lora_B" in name:
                    parameter.normal_(0, 0.05)  # adapters whose gradient is not zero
    rows = Rows(table_of(some).paths)
    forest = rows.forest(range(len(rows.paths)))
    packed = made.policy.read(forest)[0]
    upstream = torch.randn(len(packed), generator=torch.Generator().manual_seed(1))
    expected = torch.cat([explicit(made, path) for path in rows.paths])
    torch.testing.assert_close(packed.double(), expected, atol=2e-5, rtol=0)
    if not rank:  # the policy is its own reference
        reference = made.policy.initial.read(forest)[0].double()
        torch.testing.assert_close(reference, expected.detach(), atol=2e-5, rtol=0)
    got = slopes(made, (packed * upstream).sum())
    slope = slopes(made, (expected.float() * upstream).sum())
    assert (got - slope).norm() < 1e-4 * slope.norm()


async def test_the_reward_model_begins_at_a_log_ratio_of_0(tmp_path: Path, llama: Path) -> None:
    some = await sampled(llama, top_p=0.9)
    made = tempered(llama, tmp_path, scheme="oprl", prm={"lr": 1e-3}, kl_coef=0.0)
    rows = Rows(table_of(some).paths)
    steps = plan(rows.trie, range(len(rows.paths)), 4096, made.ranks)
    assert made.prm is not None
    assert np.abs(made.prm.rewards(rows, steps, rows.behaviour)).max() < 1e-4


def test_a_token_that_could_not_have_been_sampled_is_refused(tmp_path: Path, llama: Path) -> None:
    record = np.zeros(2, np.float32), np.zeros(2, np.int32), np.ones(2, bool)
    prompt = TreeNode(0, -1, "prompt", np.arange(4, dtype=np.int32))
    tokens, left = np.array([7, 8], np.int32), encode([[7, 9], [1, 9]])
    action = TreeNode(1, 0, "action", tokens, *record, support=left)
    groups = [TrainGroup(0, 0, [prompt, action], [Turn(1, 0, 1, {})])]
    nodes = {(0, 0): prompt, (0, 1): action}
    with pytest.raises(ValueError, match="tree 0, node 1: a sampled token is not among those"):
        build(groups, nodes)
    forced = msgspec.structs.replace(action, sampled=np.array([True, False]))
    assert build(groups, nodes | {(0, 1): forced}).paths[0].support is not None
