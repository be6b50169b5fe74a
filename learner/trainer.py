"""One update: table -> advantages -> weights -> micro-batches of packed forests -> one summed gradient -> one AdamW step.

Every rank sees the whole batch, computes the same table and weights, and works through its share of the micro-batches; so any
number of ranks gives the same update to rounding.
"""

import time

import msgspec
import numpy as np
import torch

from learner import schemes
from learner.config import LearnerProcess
from learner.corrections import CORRECTIONS, k3
from learner.model import Policy
from learner.objective import token_weights
from learner.ranks import Ranks
from learner.table import TurnTable, TurnTokens, build
from learner.trees import Path, micro_batches, pack, packed_sizes, share
from wire.messages import TrainGroup, TreeNode

SELF_CHECK = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest log-probability difference between forest and plain path in a run's first batch: rounding is far below, a bug far above."""


class Batch(msgspec.Struct, frozen=True):
    """What one update trains on. questions counts the closed trees, those without groups included."""

    version: int
    questions: int
    groups: list[TrainGroup]
    nodes: list[tuple[int, TreeNode]]


class _Share(msgspec.Struct, frozen=True):
    """Per-token arrays of the turns that carry gradient, turns in order."""

    paths: list[Path]
    advantages: list[torch.Tensor]
    weights: list[torch.Tensor]
    behaviour: list[torch.Tensor]


class PackingError(RuntimeError):
    """The packed forward disagrees with the plain one: training would be wrong."""


class Trainer:
    """Holds the policy and its optimizer; ``update`` is called on every rank with the same batch."""

    def __init__(self, process: LearnerProcess, ranks: Ranks):
        self.process, self.config, self.ranks = process, process.learner, ranks
        torch.set_num_threads(self.config.threads)
        self.policy = Policy(process.model, self.config, process.temperature, ranks.device, process.seed)
        self.parameters = list(self.policy.trained().values())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=self.config.lr, betas=self.config.betas, weight_decay=self.config.weight_decay
        )
        self.scheme = schemes.load(self.config.scheme, self.config.scheme_options)
        self.correct = CORRECTIONS[self.config.correction]
        self.version = 0
        self.checked = False
        self._busy_s = 0.0
        self._since: float | None = None

    @property
    def busy_s(self) -> float:
        """Seconds spent in updates, the running one included."""
        since = self._since
        return self._busy_s + (time.monotonic() - since if since is not None else 0.0)

    def update(self, batch: Batch) -> dict[str, float]:
        """Train on one batch, version v -> v + 1; returns its metrics (equal on all ranks)."""
        start = self._since = time.monotonic()
        nodes = {(tree, node.id): node for tree, node in batch.nodes}
        metrics: dict[str, float] = {"learner/groups": len(batch.groups), "learner/questions": batch.questions}
        if batch.groups:
            table, turns = build(batch.groups, nodes)
            metrics |= self._train(table, turns, batch.questions)
        self.version = batch.version + 1
        self._busy_s, self._since = self.busy_s, None
        metrics["learner/seconds"] = time.monotonic() - start
        return metrics

    def _train(self, table: TurnTable, turns: list[TurnTokens], questions: int) -> dict[str, float]:
        advantages = self.scheme(table, **self.config.scheme_options)
        weights = token_weights(table, turns, questions, self.config.aggregation, self.config.mean_over_steps)
        part = self._with_gradient(table, turns, advantages, weights)
        metrics = _table_metrics(table, turns, advantages, self.version)
        if not part.paths:
            return metrics | {"learner/skipped": 1.0}
        whole = len(pack(part.paths).tokens)
        budget = min(self.config.micro_tokens, -(-whole // self.ranks.count))  # no rank without work
        batches = micro_batches(part.paths, budget)
        sizes = packed_sizes(part.paths, batches)
        mine = share(sizes, self.ranks.count)[self.ranks.rank]
        if not self.checked:
            self._self_check(part, batches[mine[0]] if mine else [])
            self.checked = True
        for group in self.optimizer.param_groups:
            warm = self.config.warmup_updates
            group["lr"] = self.config.lr * (min(1.0, (self.version + 1) / warm) if warm else 1.0)
        sums, peaks = torch.zeros(7, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        for index in mine:
            self._micro_batch(part, batches[index], sums, peaks)
        self.ranks.add_gradients(self.parameters)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.grad_clip)
        if not torch.isfinite(norm):
            raise RuntimeError(
                f"update {self.version + 1}: gradient norm {norm}; stopping before the weights are spoilt"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        metrics |= _loss_metrics(self.ranks.add(sums), self.ranks.greatest(peaks))
        return metrics | {
            "learner/grad_norm": float(norm),
            "learner/lr": self.optimizer.param_groups[0]["lr"],
            "learner/forwarded_tokens": float(sum(sizes)),
            "learner/path_tokens": float(sum(len(path.tokens) for path in part.paths)),
        }

    def _with_gradient(
        self, table: TurnTable, turns: list[TurnTokens], advantages: np.ndarray, weights: np.ndarray
    ) -> _Share:
        """The turns whose term can move the policy: without a KL term a turn of zero advantage is left out, exactly."""
        cuts = np.cumsum(table.tokens)[:-1]
        part = _Share([], [], [], [])
        for turn, a, w in zip(turns, np.split(advantages, cuts), np.split(weights, cuts), strict=True):
            if not w.any() or (self.config.kl_coef == 0 and not a.any()):
                continue
            part.paths.append(Path(turn.prefix + turn.action, len(turn.prefix)))
            part.advantages.append(torch.tensor(a, dtype=torch.float32))
            part.weights.append(torch.tensor(w, dtype=torch.float32))
            part.behaviour.append(torch.tensor(turn.logprobs, dtype=torch.float32))
        return part

    def _micro_batch(self, part: _Share, rows: list[int], sums: torch.Tensor, peaks: torch.Tensor) -> None:
        device = self.policy.device
        paths = [part.paths[i] for i in rows]
        advantage, weight, behaviour = (
            torch.cat([column[i] for i in rows]).to(device)
            for column in (part.advantages, part.weights, part.behaviour)
        )
        current, entropy, _ = self.policy.logprobs(paths)
        surrogate, clipped = self.correct(current, behaviour, advantage, self.config.clip_low, self.config.clip_high)
        term = surrogate
        kl = torch.zeros_like(current)
        if self.config.kl_coef > 0:
            kl = k3(current, self.policy.reference_logprobs(paths))
            term = term - self.config.kl_coef * kl
        (-(weight * term).sum()).backward()
        with torch.no_grad():
            gap = (current - behaviour)[weight > 0]
            live = weight > 0
            ratio = gap.exp()
            columns = [
                torch.ones_like(gap),
                ratio,
                gap.abs(),
                clipped[live].float(),
                entropy[live],
                kl[live],
                surrogate[live],
            ]
            sums += torch.stack([column.double().sum() for column in columns]).cpu()
            torch.maximum(peaks, torch.stack([ratio.max(), gap.abs().max()]).double().cpu(), out=peaks)

    @torch.no_grad()
    def _self_check(self, part: _Share, rows: list[int]) -> None:
        """Packed against plain log-probabilities on the run's first batch; raises PackingError when they disagree."""
        if not rows:
            return
        sample = rows[:: max(1, len(rows) // 4)][:4]
        packed, _, _ = self.policy.logprobs([part.paths[i] for i in rows])
        pieces = dict(zip(rows, packed.split([len(part.behaviour[i]) for i in rows]), strict=True))
        worst = max(float((pieces[i] - self.policy.plain_logprobs(part.paths[i])).abs().max()) for i in sample)
        if not worst < SELF_CHECK[self.policy.compute]:
            raise PackingError(
                f"the packed forward differs from the plain one by {worst:.2e} (allowed {SELF_CHECK[self.policy.compute]:.0e}):"
                " this model's attention does not follow the tree mask; train it with another model class, and report this"
            )


def _table_metrics(table: TurnTable, turns: list[TurnTokens], advantages: np.ndarray, version: int) -> dict[str, float]:
    stale = version - np.concatenate([turn.versions for turn in turns])
    made = {
        "learner/turns": float(len(table)),
        "learner/trained_tokens": float(sum(turn.sampled.sum() for turn in turns)),
        "learner/zero_advantage_share": float(np.mean(advantages == 0)),
        "learner/staleness_mean": float(stale.mean()),
        "learner/staleness_max": float(stale.max()),
    }
    return made | {f"score/{name}": float(np.nanmean(v)) for name, v in table.scores.items() if not np.isnan(v).all()}


def _loss_metrics(sums: torch.Tensor, peaks: torch.Tensor) -> dict[str, float]:
    tokens = max(1.0, float(sums[0]))
    names = ["ratio_mean", "logprob_gap_mean", "clip_share", "entropy", "kl", "surrogate"]
    made = {f"learner/{name}": float(value) / tokens for name, value in zip(names, sums[1:], strict=True)}
    return made | {"learner/ratio_max": float(peaks[0]), "learner/logprob_gap_max": float(peaks[1])}
