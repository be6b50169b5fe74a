"""The implicit process reward model (OPRL / iStar, methods.md 4.1, 4.2; PRIME's cross-entropy
variant, 4.5).

phi starts from the policy. A token's reward is beta (log pi_phi - log pi_reference), a step's score
is the sum over its sampled tokens, and a trajectory's score S is the sum (or mean) over its steps.
The loss depends only on the scores, so a first pass computes the exact coefficients dL/dS_i, and a
second pass is linear in the log-probabilities: any split into micro-batches and ranks gives the
same gradient.
"""

import math

import msgspec
import numpy as np
import torch

from coppice.learner.config import LearnerProcess, LoraConfig, PrmConfig
from coppice.learner.model.model import TreeModel
from coppice.learner.model.optimizer import Stepper
from coppice.learner.model.ranks import Ranks
from coppice.learner.update.passes import Plan, Rows, plan, sweep
from coppice.learner.update.table import TurnTable


class Preference(msgspec.Struct, frozen=True):
    """A loss over trajectory scores. slope: dL/dS [trajectories]. used: the number of comparisons
    in the loss; with 0 nothing can be learnt."""

    loss: float
    slope: np.ndarray
    accuracy: float
    used: int


def dpo(scores: np.ndarray, positive: np.ndarray, group: np.ndarray) -> Preference:
    """Return the mean of -log sigmoid(S+ - S-) over all positive x negative pairs of each group.

    scores: float64. positive: bool. group: the group of each trajectory. All are [trajectories].
    """
    groups = [np.flatnonzero(group == one) for one in np.unique(group)]
    sides = [(some[positive[some]], some[~positive[some]]) for some in groups]
    none = np.zeros(0, int)
    plus = np.concatenate([none, *(np.repeat(won, len(lost)) for won, lost in sides)])
    minus = np.concatenate([none, *(np.tile(lost, len(won)) for won, lost in sides)])
    slope, used = np.zeros(len(scores)), len(plus)
    if not used:
        return Preference(0.0, slope, math.nan, 0)
    margin = scores[plus] - scores[minus]
    pull = np.exp(-np.logaddexp(0.0, margin)) / used
    np.add.at(slope, plus, -pull)
    np.add.at(slope, minus, pull)
    loss, right = np.logaddexp(0.0, -margin).mean(), (margin > 0).mean()
    return Preference(float(loss), slope, float(right), used)


def cross_entropy(scores: np.ndarray, positive: np.ndarray) -> Preference:
    """Return the cross-entropy of sigmoid(S) against the outcome in {0, 1}, averaged over the
    trajectories (PRIME)."""
    if not len(scores):
        return Preference(0.0, np.zeros(0), math.nan, 0)
    probability = np.exp(-np.logaddexp(0.0, -scores))
    loss = np.where(positive, np.logaddexp(0.0, -scores), np.logaddexp(0.0, scores)).mean()
    slope = (probability - positive) / len(scores)
    return Preference(float(loss), slope, float(((scores > 0) == positive).mean()), len(scores))


class ImplicitPrm:
    """Scores tokens and learns which trajectories succeeded. Call ``score_and_learn`` once per
    update."""

    def __init__(self, process: LearnerProcess, config: PrmConfig, lora: LoraConfig, ranks: Ranks):
        learner, seed, temperature = process.learner, process.seed, process.temperature
        self.config, self.ranks, self.seed = config, ranks, seed
        self.micro_tokens, self.updates = learner.micro_tokens, 0
        self.model = TreeModel(process.model, learner, temperature, ranks, seed, lora)
        self.stepper = Stepper("prm", self.model.trained(), config.optimizer(learner), ranks)

    def rewards(self, rows: Rows, steps: Plan, reference: np.ndarray) -> np.ndarray:
        """Return beta (log pi_phi - log pi_reference) per token and 0 for forced tokens, float64
        [tokens]."""
        ratio = sweep(rows, steps, self.model).astype(np.float64) - reference
        return np.where(rows.sampled, self.config.beta * ratio, 0.0)

    def score_and_learn(
        self, table: TurnTable, rows: Rows, steps: Plan, reference: np.ndarray, version: int
    ) -> tuple[np.ndarray, dict[str, float]]:
        """Return token rewards for the scheme [tokens] and metrics. Learns before or after the
        scoring (methods.md 4.2). Before its first step the model equals the policy, so its rewards
        would be numerical noise; they are exactly 0 then."""
        before = self.rewards(rows, steps, reference)
        metrics = self._agreement(table, before, rows.behaviour)
        unused = not self.updates
        metrics |= self._learn(table, rows, steps, reference, before, version)
        if self.config.order == "update_first" and self.updates:
            before, unused = self.rewards(rows, steps, reference), False
        if self.config.only_better:
            unused |= not metrics["prm/accuracy"] > metrics["prm/policy_accuracy"]
        metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
        return np.zeros_like(before) if unused else before, metrics | {"prm/unused": float(unused)}

    def _agreement(
        self, table: TurnTable, rewards: np.ndarray, behaviour: np.ndarray
    ) -> dict[str, float]:
        """Return how often the policy's own log-probabilities order the pairs of loss "dpo"
        rightly, and, where an oracle says which steps are optimal, how often they and the step
        scores order an optimal and another step of a question rightly."""
        measured = {}
        if self.config.loss == "dpo":
            measured["prm/policy_accuracy"] = self.preference(table, behaviour)[0].accuracy
        if "optimal" in table.scores:
            optimal = table.column("optimal")
            some = ~np.isnan(optimal)

            def right(scores: np.ndarray) -> float:
                return dpo(scores[some], optimal[some] == 1, table.tree[some]).accuracy

            measured["prm/oracle_accuracy"] = right(table.per_turn(rewards))
            measured["prm/policy_oracle_accuracy"] = right(table.per_turn(behaviour))
        return measured

    def preference(
        self, table: TurnTable, rewards: np.ndarray, questions: np.ndarray | None = None
    ) -> tuple[Preference, np.ndarray]:
        """Return the loss of a batch, or of some of its ``questions``, and dL / d(log pi_phi) per
        token [tokens]."""
        trajectories = table.trajectories()
        mean, tree = self.config.score == "mean", trajectories.tree
        scale = 1.0 / np.array([len(rows) if mean else 1 for rows in trajectories.rows])
        scores = trajectories.total(table.per_turn(rewards)) * scale
        outcomes = trajectories.total(table.column(self.config.outcome))
        # a missing outcome is neither class
        positive, some = outcomes > self.config.threshold, ~np.isnan(outcomes)
        if questions is not None:
            some &= np.isin(tree, questions)
        own = scores[some], positive[some]
        loss = dpo(*own, tree[some]) if self.config.loss == "dpo" else cross_entropy(*own)
        slope = np.zeros(len(tree))
        slope[some] = loss.slope * scale[some] * self.config.beta
        return loss, table.per_token(slope[trajectories.of]) * table.mask()

    def _learn(
        self, table: TurnTable, rows: Rows, steps: Plan, reference: np.ndarray,
        rewards: np.ndarray, version: int,
    ) -> dict[str, float]:  # fmt: skip
        """Make epochs x minibatches optimizer steps. Metrics are those of the batch before the
        first; a part without a comparison has no step."""
        loss, _ = self.preference(table, rewards)
        metrics = {
            "prm/loss": loss.loss,
            "prm/accuracy": loss.accuracy,
            "prm/comparisons": float(loss.used),
            "prm/step_score_std": float(table.per_turn(rewards).std()),
        }
        skipped = True
        for epoch in range(self.config.epochs):
            parts = table.questions(self.config.minibatches, [self.seed, version, epoch, 1])
            for part in parts:
                if len(parts) > 1:
                    turns = np.flatnonzero(np.isin(table.tree, part)).tolist()
                    steps = plan(rows.trie, turns, self.micro_tokens, self.ranks)
                if not skipped:
                    rewards = self.rewards(rows, steps, reference)
                loss, slope = self.preference(table, rewards, part)
                if not loss.used:
                    continue
                for some, filler in steps.mine:
                    current = self.model.read(rows.forest(some))[0]
                    pull = torch.as_tensor(slope[rows.index(some)], dtype=torch.float32)
                    factor = (0.0 if filler else 1.0) * pull.to(current.device)
                    (factor * current).sum().backward()
                metrics["prm/grad_norm"] = self.stepper.step(version)
                self.updates, skipped = self.updates + 1, False
        return metrics | {"prm/skipped": float(skipped)}
