"""The policy's optimizer step: forward, correct, weigh and backward each forest, and record values
for the numerics watch. All log-probabilities are over what top-p and top-k left when the token was
sampled (docs/learner.md, "Top-p and top-k").
"""

import msgspec
import numpy as np
import torch

from coppice.common.phases import Phases
from coppice.learner.config import LearnerConfig
from coppice.learner.model.model import TreeModel
from coppice.learner.model.optimizer import Stepper
from coppice.learner.model.ranks import Ranks
from coppice.learner.update import watch
from coppice.learner.update.corrections import Corrected, Logprobs, Segments, kl
from coppice.learner.update.passes import Plan, Rows, plan
from coppice.learner.update.table import TurnTable

MEASURES = 6
"""The number of recorded values per token: current, entropy, kl, coefficient, cut (1 clipped, 2
masked), forwarded."""


class Objective(msgspec.Struct, frozen=True):
    """What the policy's steps on a batch maximise, each [tokens], float32 unless said otherwise.

    segment: int64, the turn or trajectory over which the correction takes its ratio. proximal: the
    behaviour policy's log-probabilities if nothing reads it, as with one optimizer step. reference:
    None if nothing reads it. latest: the policy's log-probabilities before this optimizer step, for
    the tokens of a segment that lie in another micro-batch. kl_coef: weight of the KL in the loss.
    """

    rows: Rows
    advantages: np.ndarray
    weights: np.ndarray
    proximal: np.ndarray
    reference: np.ndarray | None
    segment: np.ndarray
    latest: np.ndarray
    kl_coef: float = 0.0


class PolicyStep:
    """Makes the policy's optimizer steps: for each, ``plan`` and then ``step``."""

    def __init__(
        self, policy: TreeModel, stepper: Stepper, correct: Corrected, config: LearnerConfig,
        ranks: Ranks, timed: Phases,
    ):  # fmt: skip
        self.policy, self.stepper, self.correct = policy, stepper, correct
        self.config, self.ranks, self.timed = config, ranks, timed

    def plan(self, objective: Objective, turns: list[int]) -> Plan | None:
        """Return the forwards of a step. Without a KL or entropy term, turns whose advantage is 0
        have no gradient and are left out."""
        c, rows = self.config, objective.rows
        acts = objective.weights != 0
        if c.kl_coef <= 0 and c.entropy_coef <= 0:
            acts &= objective.advantages != 0
        live = [i for i in turns if acts[rows.spans[i]].any()]
        return plan(rows.trie, live, c.micro_tokens, self.ranks) if live else None

    def step(
        self, objective: Objective, steps: Plan, scale: float, version: int,
        record: torch.Tensor | None,
    ) -> dict[str, float]:  # fmt: skip
        """Backward all forests and make one optimizer step. Weights are multiplied by ``scale``.
        record: is filled for the watch.

        If KL(proximal || current) exceeds target_kl, no step is made, and the metrics hold only
        this KL.
        """
        sums = torch.zeros(3, dtype=torch.float64)
        for chosen, filler in steps.mine:
            if filler:
                self._micro_batch(objective, chosen, 0.0, None)
            else:
                sums += self._micro_batch(objective, chosen, scale, record)
        surrogate, moved, tokens = self.ranks.add(sums).tolist()
        metrics = {"learner/proximal_kl": moved / max(1.0, tokens)} if self.config.target_kl else {}
        if self.config.target_kl and metrics["learner/proximal_kl"] > self.config.target_kl:
            self.stepper.adamw.zero_grad(set_to_none=True)
            return metrics
        with self.timed.over("step"):
            norm = self.stepper.step(version)
        return metrics | {
            "learner/grad_norm": norm,
            "learner/surrogate": surrogate,
            "learner/lr": self.stepper.rate(version),
            "learner/skipped": 0.0,
            "learner/forwarded_tokens": float(steps.forwarded),
            "learner/trunk_repeat": steps.forwarded / max(1, steps.whole),
        }

    def _micro_batch(
        self, objective: Objective, chosen: list[int], scale: float, record: torch.Tensor | None
    ) -> torch.Tensor:
        """Backward one forest's share of the objective. Returns, as float64 [3], this share, the
        sum of KL(proximal || current) over the tokens, and their number."""
        c, rows, device = self.config, objective.rows, self.policy.device
        index = rows.index(chosen)
        sampled = rows.sampled[index]
        index, live = index[sampled], torch.as_tensor(sampled, device=device)
        with self.timed.over("pack"):
            forest = rows.forest(chosen)
        with self.timed.over("forward"):
            current, entropy = (values[live] for values in self.policy.read(forest))

        def here(column: np.ndarray) -> torch.Tensor:
            return torch.as_tensor(column[index], device=device)

        logprobs = self._compared(objective, index, current)
        surrogate = self.correct(logprobs, here(objective.advantages))
        term, initial_kl = surrogate.term, torch.zeros_like(current)
        if objective.reference is not None:
            initial_kl = kl(c.kl_estimator, current, here(objective.reference))
            term = term - objective.kl_coef * initial_kl
        if c.entropy_coef > 0:
            # d entropy = -E[(log pi + entropy) d log pi], estimated on the sampled tokens; unbiased
            # if on-policy
            slope = current.detach() + entropy
            term = term - c.entropy_coef * slope * (current - current.detach())
        share = (scale * here(objective.weights) * term).sum()
        with self.timed.over("backward"):
            (-share).backward()
        if record is not None:
            cut = surrogate.clipped.float() + 2 * surrogate.masked.float()
            forwarded = torch.ones_like(cut)
            columns = [current, entropy, initial_kl, surrogate.coefficient, cut, forwarded]
            record[:, index] = torch.stack([column.detach().float().cpu() for column in columns])
        moved = kl("k3", here(objective.proximal), current.detach()).sum()
        return torch.tensor([float(share.detach()), float(moved), len(index)], dtype=torch.float64)

    def _compared(self, objective: Objective, index: np.ndarray, current: torch.Tensor) -> Logprobs:
        """Return the log-probabilities that the correction compares, with the part of each segment
        outside this micro-batch."""
        rows, level, segment = objective.rows, self.correct.level, objective.segment

        def here(values: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
            return torch.as_tensor(values, dtype=dtype, device=current.device)

        proximal = current.detach() if self.config.steps == 1 else here(objective.proximal[index])
        behaviour = here(rows.behaviour[index])
        if level == "token":
            return Logprobs(current, proximal, behaviour)
        log = np.where(rows.sampled, objective.latest - rows.behaviour, 0.0)
        outside = np.bincount(segment, weights=log)
        ids = segment[index]
        np.subtract.at(outside, ids, log[index])
        tokens = np.bincount(segment, weights=rows.sampled)
        segments = Segments(here(ids), here(outside, torch.float32), here(tokens, torch.float32))
        return Logprobs(current, proximal, behaviour, {level: segments})


def watched(
    table: TurnTable, objective: Objective, first: np.ndarray, passed: np.ndarray,
    record: np.ndarray, version: int,
) -> dict[str, float]:  # fmt: skip
    """Return the watch's metrics of the first epoch. record: [6, tokens] (``MEASURES``); its last
    row is 0 for tokens without a forward.

    first: bool [turns], whether the turn was forwarded before the first optimizer step, when
    learner and engine had the same weights (False if the version's number had other weights).
    passed: bool [turns], whether its step was made, or left out for advantages of 0.
    """
    rows, trained = objective.rows, objective.weights > 0
    forwarded = (record[5] > 0) & trained
    current, entropy, kl, coefficient, cut, _ = record[:, forwarded]
    stale = (version - rows.versions)[forwarded]
    oldest = np.array([rows.versions[span].min() for span in rows.spans])
    fresh = table.per_token(first & (oldest == version))[forwarded]
    behaviour, turn = rows.behaviour[forwarded], table.per_token(table.turn)[forwarded]
    results = watch.metrics(current, behaviour, entropy, kl, coefficient, cut, stale, turn, fresh)
    for name in ("learner/clip_share", "learner/mask_share") if results else ():
        # tokens with advantage 0, which may not be forwarded, lose nothing
        results[name] *= float(forwarded.sum() / (trained & table.per_token(passed)).sum())
    return results
