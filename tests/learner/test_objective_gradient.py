"""An update's gradient is that of the objective written out turn by turn (methods.md 1.2)."""

import numpy as np
import pytest
import torch

from coppice.learner.update.trainer import Batch, Trainer
from coppice.wire.messages import TrainGroup, TreeNode, Turn
from tests.learner.conftest import Make
from tests.updates import action, gradient

KL = 0.05


def two_questions() -> Batch:
    """Question 0 with two steps of three, question 1 with one of two, question 2 none."""
    rng = np.random.default_rng(4)
    made, nodes = [], []
    for group, (tree, parent, first, k) in enumerate([(0, 0, 1, 3), (0, 9, 10, 3), (1, 0, 1, 2)]):
        own = [TreeNode(0, -1, "prompt", np.arange(5 + tree, dtype=np.int32))]
        if parent == 9:
            own = [TreeNode(9, 1, "observation", np.array([7, 8], np.int32))]
        for i in range(k):
            n = int(rng.integers(2, 6))
            logprobs, tokens = rng.uniform(-7, -4, n), rng.integers(0, 256, n)
            own.append(action(first + i, parent, tokens, logprobs, np.arange(n) >= i % 2))
        turns = [Turn(first + i, i, 1 + group, {"reward": float(i * i - group)}) for i in range(k)]
        made.append(TrainGroup(group, tree, own, turns))
        nodes += [(tree, node) for node in own]
    return Batch(0, 3, made, nodes)


def written_out(made: Trainer, batch: Batch) -> torch.Tensor:
    """Mean over the 2 questions with a group of the sum over steps of the mean over candidates of
    the token-mean of (clipped term - beta k3)."""
    nodes = {(tree, node.id): node for tree, node in batch.nodes}
    total = torch.zeros(())
    for group in batch.groups:
        rewards = np.array([turn.scores["reward"] for turn in group.turns])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for turn, advantage in zip(group.turns, advantages, strict=True):
            node = nodes[group.tree, turn.node]
            prefix, parent = [], node.parent
            while parent >= 0:
                prefix = nodes[group.tree, parent].tokens.tolist() + prefix
                parent = nodes[group.tree, parent].parent
            ids = torch.tensor(prefix + node.tokens.tolist())
            current = _logprobs(made, ids, len(prefix))
            with torch.no_grad(), made.policy.model.disable_adapter():
                reference = _logprobs(made, ids, len(prefix))
            assert node.logprobs is not None
            assert node.sampled is not None
            ratio = (current - torch.tensor(node.logprobs)).exp()
            clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            if advantage < 0:  # dual clip, 3 by default
                clipped = clipped.maximum(torch.tensor(3 * advantage))
            d = reference - current
            term = (clipped - KL * (d.exp() - d - 1).clamp(-10, 10))[torch.tensor(node.sampled)]
            total = total + term.mean() / len(group.turns) / 2
    return -total


def _logprobs(made: Trainer, ids: torch.Tensor, start: int) -> torch.Tensor:
    scores = made.policy.causal(ids[None]).logits[0, start - 1 : -1].log_softmax(-1)
    return scores.gather(1, ids[start:, None])[:, 0]


@pytest.mark.parametrize("micro_tokens", [12, 1000])
def test_an_updates_gradient_is_that_of_the_objective_written_out(
    make: Make, micro_tokens: int
) -> None:
    made = make(kl_coef=KL, micro_tokens=micro_tokens, grad_clip=1e9)
    torch.manual_seed(3)
    for parameter in made.policy.trained().values():
        parameter.data.normal_(0, 0.1)
    batch = two_questions()
    written_out(made, batch).backward()
    slopes = [p.grad for p in made.policy.trained().values() if p.grad is not None]
    expected = torch.cat([slope.reshape(-1).clone() for slope in slopes])
    made.stepper.adamw.zero_grad(set_to_none=True)
    got = gradient(made, batch)
    assert (got - expected).norm() <= 1e-4 * expected.norm() + 1e-8
