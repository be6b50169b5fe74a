"""Random SLATE batches and trainers for the learner's tests."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from coppice.learner.config import LearnerConfig, LearnerProcess, LoraConfig
from coppice.learner.model.ranks import Ranks
from coppice.learner.update.table import TurnTable, build
from coppice.learner.update.trainer import Batch, Trainer
from coppice.wire.messages import TrainGroup, TreeNode, Turn


def action(
    number: int, parent: int, tokens: np.ndarray, logprobs: np.ndarray | None = None,
    sampled: np.ndarray | None = None,
) -> TreeNode:  # fmt: skip
    """A node of tokens that version 0 sampled, where ``sampled`` says so."""
    n = len(tokens)
    logprobs = np.full(n, -5.5) if logprobs is None else logprobs
    return TreeNode(
        number, parent, "action", tokens.astype(np.int32), logprobs.astype(np.float32),
        np.zeros(n, np.int32), np.ones(n, bool) if sampled is None else sampled,
    )  # fmt: skip


def groups(
    seed: int, trees: int = 3, k: int = 3
) -> tuple[list[TrainGroup], list[tuple[int, TreeNode]]]:
    """Random SLATE groups: one step a tree."""
    rng = np.random.default_rng(seed)
    made, nodes = [], []
    for tree in range(trees):
        own = [TreeNode(0, -1, "prompt", rng.integers(0, 256, 6).astype(np.int32))]
        for i in range(k):
            tokens = rng.integers(0, 256, int(rng.integers(2, 6)))
            own.append(action(i + 1, 0, tokens))
        turns = [Turn(i + 1, i, 1, {"reward": float(rng.integers(-2, 3))}) for i in range(k)]
        made.append(TrainGroup(seed * 100 + tree, seed * 10 + tree, own, turns))
        nodes += [(seed * 10 + tree, node) for node in own]
    return made, nodes


def batch(seed: int, version: int) -> Batch:
    made, nodes = groups(seed)
    return Batch(version, 3, made, nodes)


def few(*sampled: list[bool]) -> Batch:
    """One question whose candidates have these tokens: True where the policy sampled one, False
    where it was forced."""
    own = [TreeNode(0, -1, "prompt", np.arange(6, dtype=np.int32))]
    for i, mask in enumerate(sampled):
        tokens = np.arange(20 + 9 * i, 20 + 9 * i + len(mask))
        own.append(action(i + 1, 0, tokens, sampled=np.array(mask, bool)))
    turns = [Turn(i + 1, i, 1, {"reward": float(i + 1)}) for i in range(len(sampled))]
    return Batch(0, 1, [TrainGroup(1, 1, own, turns)], [(1, node) for node in own])


def episodes(
    seed: int, version: int, trees: int = 3, k: int = 3, turns: int = 2, fresh: bool = False
) -> Batch:
    """Whole trajectories of uneven lengths, with an outcome at the end, step rewards, judge scores
    and Monte Carlo values. Observations are appended to one growing text; or, fresh, each turn has
    a prompt of its own below the root, as in the games."""
    rng = np.random.default_rng(seed)
    made, nodes = [], []
    for tree in range(seed * 10, seed * 10 + trees):
        own, trained = [TreeNode(0, -1, "prompt", rng.integers(0, 256, 6).astype(np.int32))], []
        for trajectory in range(k):
            parent, length = 0, int(rng.integers(1, turns + 1))
            for turn in range(1, length + 1):
                if fresh:
                    prompt = np.array([7, tree % 7, turn, trajectory % 2], np.int32)
                    own.append(TreeNode(len(own), 0, "prompt", prompt))
                    parent = len(own) - 1
                n, last = int(rng.integers(2, 6)), turn == length
                tokens, logprobs = rng.integers(0, 256, n), rng.normal(-5.5, 0.3, n)
                node = action(len(own), parent, tokens, logprobs)
                scores = {"reward": float(rng.integers(-2, 3)), "mc_value": float(rng.random())}
                scores["valid"] = 1.0
                if last:
                    scores["outcome"] = float((trajectory + tree) % 2)
                else:
                    scores["process"] = float(rng.random())
                own.append(node)
                trained.append(Turn(node.id, trajectory, turn, scores))
                if not last and not fresh:
                    seen = np.array([7, tree % 7], np.int32)
                    own.append(TreeNode(len(own), node.id, "observation", seen))
                    parent = len(own) - 1
        made.append(TrainGroup(tree, tree, own, trained))
        nodes += [(tree, node) for node in own]
    return Batch(version, trees, made, nodes)


def newest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run."""
    return max((run / "checkpoints").glob("v??????"), default=None)


def rescored(some: Batch, scores: Callable[[Turn], dict[str, float]]) -> Batch:
    """The batch with other scores of each turn."""

    def changed(turn: Turn) -> Turn:
        return msgspec.structs.replace(turn, scores=scores(turn))

    return msgspec.structs.replace(
        some,
        groups=[
            msgspec.structs.replace(group, turns=[changed(turn) for turn in group.turns])
            for group in some.groups
        ],
    )


def table_of(some: Batch) -> TurnTable:
    return build(some.groups, {(tree, node.id): node for tree, node in some.nodes})


def process(model: Path, run: Path, rank: int = 4, **settings: object) -> LearnerProcess:
    """A learner that moves visibly in one step; ``rank`` 0 trains every weight."""
    given = {
        "lr": 1e-2, "kl_coef": 0.01, "dtype": "float32", "lora": LoraConfig(rank, 8.0), **settings,
    }  # fmt: skip
    config = msgspec.convert(given, LearnerConfig, from_attributes=True)
    return LearnerProcess("learner", str(run), 0, str(model), 3, 1.0, config)


def trainer(model: Path, run: Path, rank: int = 4, **settings: object) -> Trainer:
    return Trainer(process(model, run, rank, **settings), Ranks(60))


def steady(made: Trainer) -> Trainer:
    """The trainer with an epsilon of Adam far above rounding: by default Adam divides a gradient
    that is rounding alone by its own size, and so moves a weight by up to the learning rate in a
    direction that depends on the processor."""
    for _, stepper in made.parts().values():
        stepper.adamw.param_groups[0]["eps"] = 1e-3
    return made


def everything(made: Trainer) -> dict[str, torch.Tensor]:
    """A copy of what trains in policy, critic and reward model. A collective when sharded."""
    models = {part: model.gathered().items() for part, (model, _) in made.parts().items()}
    return {f"{part}/{name}": p.clone() for part, held in models.items() for name, p in held}


def changed(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> set[str]:
    """The parts that differ by a bit: policy, critic or prm."""
    return {key.split("/")[0] for key, p in some.items() if not torch.equal(p, others[key])}


def gradient(made: Trainer, some: Batch) -> torch.Tensor:
    """The policy's gradient of the update, flat."""
    found: list[torch.Tensor] = []

    def keep() -> None:
        slopes = (p.grad for p in made.policy.trained().values())
        found.append(torch.cat([slope.reshape(-1) for slope in slopes if slope is not None]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made.stepper.adamw, "step", keep)
        made.update(msgspec.structs.replace(some, version=made.version))
    return torch.cat(found) if found else torch.zeros(1)
