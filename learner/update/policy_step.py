"""The policy's optimizer step: forward, correct, weigh and backward each forest, and record values
for the numerics watch.

Current, proximal and reference log-probabilities are all of the distribution over what top-p and
top-k left when the token was sampled, as the behaviour policy's are (docs/learner.md, "Top-p and
top-k").
"""

import msgspec
import numpy as np
import torch

from coppice.learner.config import LearnerConfig
from coppice.learner.model.model import Policy
from coppice.learner.model.optimizer import Stepper
from coppice.learner.model.ranks import Ranks
from coppice.learner.update import watch
from coppice.learner.update.corrections import Corrected, Logprobs, Segments, Surrogate, k3
from coppice.learner.update.kl import estimated
from coppice.learner.update.passes import Plan, Rows, plan
from coppice.learner.update.stopwatch import Stopwatch
from coppice.learner.update.table import TurnTable

MEASURES = 6
"""The number of recorded values per token: current, entropy, kl, coefficient, cut (1 clipped, 2
masked), forwarded."""


class Known(msgspec.Struct, frozen=True):
    """The values of a batch's tokens before the policy steps, each [tokens], float32 unless said
    otherwise.

    segment: int64, the turn or trajectory over which the correction takes its ratio. proximal: if
    nothing reads it, the behaviour policy's log-probabilities (nothing reads it with one optimizer
    step, in which the current policy is the proximal one). reference: None if nothing reads it.
    standing: the policy's log-probabilities before this optimizer step, for the tokens of a segment
    that lie in another micro-batch. kl_coef: weight of the KL in the loss.
    """

    rows: Rows
    advantages: np.ndarray
    weights: np.ndarray
    proximal: np.ndarray
    reference: np.ndarray | None
    segment: np.ndarray
    standing: np.ndarray
    kl_coef: float = 0.0


class PolicyStep:
    """Makes the policy's optimizer steps. For each step, call ``plan`` and pass the result to
    ``step``."""

    def __init__(
        self, policy: Policy, stepper: Stepper, correct: Corrected, config: LearnerConfig, ranks: Ranks,
        timed: Stopwatch | None = None,
    ):  # fmt: skip
        self.policy, self.stepper, self.correct, self.config, self.ranks = (
            policy,
            stepper,
            correct,
            config,
            ranks,
        )
        self.timed = timed or Stopwatch()

    def plan(self, known: Known, turns: list[int]) -> Plan | None:
        """Return the forwards of a step. Without a KL or entropy term, turns whose advantage is 0
        have no gradient and are left out."""
        c = self.config
        always = c.kl_coef > 0 or c.entropy_coef > 0
        live = [
            i for i in turns
            if known.weights[known.rows.spans[i]].any() and (always or known.advantages[known.rows.spans[i]].any())
        ]  # fmt: skip
        return plan(known.rows.trie, live, c.micro_tokens, self.ranks) if live else None

    def step(
        self, known: Known, steps: Plan, scale: float, version: int, noted: torch.Tensor | None
    ) -> dict[str, float]:
        """Backward all forests and make one optimizer step. Weights are multiplied by ``scale``.
        noted: is filled for the watch.

        If KL(proximal || current) exceeds target_kl, no step is made, and the metrics hold only
        this KL.
        """
        sums = torch.zeros(7, dtype=torch.float64)
        for number, (chosen, filler) in enumerate(steps.mine):
            part = self._micro_batch(
                known, chosen, 0.0 if filler else scale, None if filler else noted
            )
            sums[:4] += (
                torch.zeros(4, dtype=torch.float64)
                if filler
                else torch.tensor(part, dtype=torch.float64)
            )
            if number == 0:
                sums[4:] = torch.tensor([self.stepper.local_square(), sums[3], sums[3] ** 2])
        objective, kl, tokens, weight, square, first, squares = self.ranks.add(sums).tolist()
        metrics = {"learner/proximal_kl": kl / max(1.0, tokens)} if self.config.target_kl else {}
        if self.config.target_kl and metrics["learner/proximal_kl"] > self.config.target_kl:
            self.stepper.adamw.zero_grad(set_to_none=True)
            return metrics
        with self.timed("step"):
            norm = self.stepper.step(version)
        share = first / weight
        parts = share**2 if self.ranks.sharded else squares / weight**2
        metrics |= watch.gradient_noise(norm**2, square, share, parts)
        return metrics | {
            "learner/grad_norm": norm,
            "learner/surrogate": objective,
            "learner/lr": self.stepper.rate(version),
            "learner/forwarded_tokens": float(steps.forwarded),
            "learner/path_tokens": float(sum(len(p.tokens) for p in known.rows.paths)),
            "learner/trunk_repeat": steps.forwarded / max(1, steps.whole),
        }

    def _micro_batch(
        self, known: Known, chosen: list[int], scale: float, noted: torch.Tensor | None
    ) -> tuple[float, float, int, float]:
        """Backward one forest's share of the objective. Returns this share, the sum of KL(proximal
        || current) over the tokens, their number and the sum of their weights."""
        c, device = self.config, self.policy.device
        index = known.rows.index(chosen)
        sampled = known.rows.sampled[index]
        index, live = index[sampled], torch.as_tensor(sampled, device=device)
        with self.timed("pack"):
            forest = known.rows.forest(chosen)
        with self.timed("forward"):
            current, entropy = (values[live] for values in self.policy.logprobs(forest))

        def here(column: np.ndarray) -> torch.Tensor:
            return torch.as_tensor(column[index], device=device)

        surrogate = self.correct(self._compared(known, index, current), here(known.advantages))
        term, kl = surrogate.term, torch.zeros_like(current)
        if known.reference is not None:
            kl = estimated(c.kl_estimator, current, here(known.reference))
            term = term - known.kl_coef * kl
        if c.entropy_coef > 0:
            # d entropy = -E[(log pi + entropy) d log pi], estimated on the sampled tokens; unbiased
            # if on-policy
            term = term - c.entropy_coef * (current.detach() + entropy) * (
                current - current.detach()
            )
        objective = (scale * here(known.weights) * term).sum()
        with self.timed("backward"):
            (-objective).backward()
        if noted is not None:
            _note(noted, index, current, entropy, kl, surrogate)
        moved = k3(here(known.proximal), current.detach()).sum()
        return (
            float(objective.detach()),
            float(moved),
            len(index),
            float(known.weights[index].sum()),
        )

    def _compared(self, known: Known, index: np.ndarray, current: torch.Tensor) -> Logprobs:
        """Return the log-probabilities that the correction compares, with the part of each segment
        outside this micro-batch."""
        rows, device, level = known.rows, current.device, self.correct.level
        proximal, behaviour = (
            torch.as_tensor(a[index], device=device) for a in (known.proximal, rows.behaviour)
        )
        if self.config.steps == 1:
            proximal = current.detach()
        if level == "token":
            return Logprobs(current, proximal, behaviour)
        log = np.where(rows.sampled, known.standing - rows.behaviour, 0.0)
        outside = np.bincount(known.segment, weights=log)
        ids = known.segment[index]
        np.subtract.at(outside, ids, log[index])
        tokens = np.bincount(known.segment, weights=rows.sampled)
        segments = Segments(
            torch.as_tensor(ids, device=device),
            torch.as_tensor(outside, dtype=torch.float32, device=device),
            torch.as_tensor(tokens, dtype=torch.float32, device=device),
        )
        return Logprobs(current, proximal, behaviour, {level: segments})


def _note(
    noted: torch.Tensor, index: np.ndarray, current: torch.Tensor, entropy: torch.Tensor, kl: torch.Tensor, surrogate: Surrogate
) -> None:  # fmt: skip
    """Record the values that the watch reads. Only the rank that forwarded a token writes its
    values."""
    cut = surrogate.clipped.float() + 2 * surrogate.masked.float()
    columns = [current, entropy, kl, surrogate.coefficient, cut, torch.ones_like(cut)]
    noted[:, index] = torch.stack([column.detach().float().cpu() for column in columns])


def measured(
    table: TurnTable, known: Known, untouched: np.ndarray, noted: np.ndarray, version: int
) -> watch.Measured:
    """Return the watch's measurements of the first epoch. noted: [6, tokens] from ``_note``; the
    last row is 0 for tokens without a forward.

    untouched: bool [turns], whether the turn was forwarded before the first optimizer step, when
    learner and engine had the same weights.
    """
    forwarded = noted[5] > 0
    current, entropy, kl, coefficient, cut, _ = noted[:, forwarded]
    stale = (version - known.rows.versions)[forwarded]
    oldest = np.array([known.rows.versions[span].min() for span in known.rows.spans])
    fresh = table.per_token(untouched & (oldest == version))[forwarded]
    behaviour, turn = known.rows.behaviour[forwarded], table.per_token(table.turn)[forwarded]
    return watch.Measured(
        current, behaviour, entropy, kl, coefficient, cut == 1, cut == 2, stale, turn, fresh
    )
