"""The critic of PPO (methods.md 2.4): a value model of the policy's size with its own optimizer.
Returns carry no gradient."""

import numpy as np
import torch

from coppice.learner.config import CriticConfig, LearnerProcess, LoraConfig
from coppice.learner.model.model import TreeModel
from coppice.learner.model.optimizer import Stepper
from coppice.learner.model.ranks import Ranks
from coppice.learner.update.passes import Plan, Rows


def value_loss(
    values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float
) -> torch.Tensor:
    """Return max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) per token. R is constant
    (methods.md 6, row 16)."""
    near = old + (values - old).clamp(-clip, clip)
    return torch.maximum((values - returns) ** 2, (near - returns) ** 2)


class Critic:
    """Estimates the value of the state before each action token. An update reads the values of its
    ``model`` first (``sweep``), then calls ``learn`` for each step."""

    def __init__(
        self, process: LearnerProcess, config: CriticConfig, lora: LoraConfig, ranks: Ranks
    ):
        self.config, self.ranks, learner = config, ranks, process.learner
        self.model = TreeModel(process.model, learner, 1.0, ranks, process.seed, lora, True)
        self.stepper = Stepper("critic", self.model.trained(), config.optimizer(learner), ranks)

    def learn(
        self, rows: Rows, steps: Plan, chosen: np.ndarray, old: np.ndarray, returns: np.ndarray,
        version: int,
    ) -> dict[str, float]:  # fmt: skip
        """Make one optimizer step towards ``returns`` on the tokens of ``chosen`` (bool [tokens]).
        Returns the step's metrics."""
        if not chosen.any():
            return {}
        count, total = int(chosen.sum()), torch.zeros(1, dtype=torch.float64)
        columns = torch.as_tensor(np.stack([chosen, old, returns]), dtype=torch.float32)
        for some, filler in steps.mine:
            weight, before, target = columns[:, rows.index(some)].to(self.ranks.device)
            values = self.model.read(rows.forest(some))[0]
            losses = value_loss(values, before, target, self.config.value_clip)
            loss = (0.0 if filler else 1.0 / count) * (weight * losses).sum()
            (self.config.loss_factor * loss).backward()
            total += float(loss.detach())
        variance, error = np.var(returns[chosen]), np.mean((returns - old)[chosen] ** 2)
        return {
            "critic/grad_norm": self.stepper.step(version),
            "critic/loss": float(self.ranks.add(total)),
            "critic/value_mean": float(old[chosen].mean()),
            "critic/explained_variance": float(1 - error / variance) if variance > 0 else 0.0,
        }
