"""One update: table -> what the learner's models say of it -> advantages -> weights -> packed forests -> optimizer steps.

Every rank sees the whole batch and computes the same table, advantages and weights; the ranks share the forwards (learner/passes.py).
So any number of ranks gives the same update to rounding.
"""

import time

import msgspec
import numpy as np
import torch

from learner import corrections, schemes, watch
from learner.config import CriticConfig, LearnerProcess, PrmConfig
from learner.corrections import Logprobs, Segments, Surrogate, k3
from learner.critic import Critic
from learner.model import Policy, TreeModel
from learner.objective import token_weights
from learner.optimizer import Stepper
from learner.passes import Plan, Rows, plan, rows_of, sweep
from learner.prm import ImplicitPrm
from learner.ranks import Ranks
from learner.selfcheck import check
from learner.table import TurnTable, build
from learner.targets import Estimate
from wire.messages import TrainGroup, TreeNode


class Batch(msgspec.Struct, frozen=True):
    """What one update trains on. questions counts the closed trees, those without groups included."""

    version: int
    questions: int
    groups: list[TrainGroup]
    nodes: list[tuple[int, TreeNode]]


class Known(msgspec.Struct, frozen=True):
    """What is known of the tokens of a batch before the policy steps, each [tokens], float32 unless said otherwise.

    segment: int64, the turn or trajectory a correction takes its ratio over. proximal and reference are the behaviour's
    log-probabilities where nothing reads them. standing: the policy's before this optimizer step, for the tokens of a segment that
    lie in another micro-batch.
    """

    rows: Rows
    advantages: np.ndarray
    weights: np.ndarray
    proximal: np.ndarray
    reference: np.ndarray
    segment: np.ndarray
    standing: np.ndarray


class Trainer:
    """Holds the policy, the models its scheme needs, and their optimizers; ``update`` is called on every rank with the same batch."""

    def __init__(self, process: LearnerProcess, ranks: Ranks):
        self.process, self.config, self.ranks = process, process.learner, ranks
        torch.set_num_threads(self.config.threads)
        c, folder, seed = self.config, process.model, process.seed
        self.scheme = schemes.load(c.scheme, c.scheme_options)
        self.correct = corrections.load(c.correction, c.correction_options)
        prm = c.prm or PrmConfig()
        self.prm: ImplicitPrm | None = None
        self.needs_reference = "kl" in self.scheme.needs or ("prm" in self.scheme.needs and prm.reference == "initial")
        reference = c.kl_coef > 0 or self.needs_reference
        self.policy = Policy(folder, c, process.temperature, ranks, seed, reference=reference)
        self.stepper = Stepper("policy", self.policy.trained(), c.optimizer, ranks)
        self.critic = (
            Critic(folder, c, c.critic or CriticConfig(), ranks, seed) if "value" in self.scheme.needs else None
        )
        if "prm" in self.scheme.needs:
            self.prm = ImplicitPrm(folder, c, prm, ranks, seed, process.temperature)
        self.watch = watch.Watch(c.watch)
        self.warnings: list[str] = []
        self.version = 0
        self.checked = False
        self._busy_s = 0.0
        self._since: float | None = None

    @property
    def busy_s(self) -> float:
        """Seconds spent in updates, the running one included."""
        since = self._since
        return self._busy_s + (time.monotonic() - since if since is not None else 0.0)

    def parts(self) -> dict[str, tuple[TreeModel, Stepper]]:
        """Everything that trains, by the name it has in a checkpoint."""
        made: dict[str, tuple[TreeModel, Stepper]] = {"policy": (self.policy, self.stepper)}
        for name, part in (("critic", self.critic), ("prm", self.prm)):
            if part is not None:
                made[name] = (part.model, part.stepper)
        return made

    def whole(self) -> dict[str, torch.Tensor] | None:
        """The policy's trained parameters, gathered by all ranks together; None where rank 0 holds them anyway."""
        return self.policy.gathered() if self.ranks.sharded else None

    def update(self, batch: Batch) -> dict[str, float]:
        """Train on one batch, version v -> v + 1; returns its metrics (equal on all ranks). ``warnings`` holds the watch's."""
        start = self._since = time.monotonic()
        nodes = {(tree, node.id): node for tree, node in batch.nodes}
        metrics: dict[str, float] = {"learner/groups": len(batch.groups), "learner/questions": batch.questions}
        self.warnings = []
        if batch.groups:
            table, turns = build(batch.groups, nodes)
            metrics |= self._train(table, rows_of(turns), batch.questions)
            self.warnings = self.watch.warnings(metrics, metrics.get("learner/grad_norm"))
        self.version = batch.version + 1
        self._busy_s, self._since = self.busy_s, None
        metrics["learner/seconds"] = time.monotonic() - start
        return metrics

    def _train(self, table: TurnTable, rows: Rows, questions: int) -> dict[str, float]:
        c = self.config
        everything = plan(rows.paths, range(len(rows.paths)), c.micro_tokens, self.ranks)
        if not self.checked:
            check(self.policy, [rows.paths[i] for i in everything.first])
            self.checked = True
        columns, prm_metrics = self._token_columns(table, rows, everything)
        table = msgspec.structs.replace(table, token_scores=columns)
        estimate = self.scheme(table)
        weights = token_weights(table, rows.sampled, questions, c.aggregation, c.mean_over_steps, c.constant_tokens)
        known = self._known(table, rows, estimate, weights, columns)
        metrics = _table_metrics(table, rows, known.advantages, self.version) | prm_metrics
        return metrics | self._steps(table, known, estimate, everything)

    def _token_columns(
        self, table: TurnTable, rows: Rows, steps: Plan
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """What the models of the learner say of each token, as far as scheme, correction or KL term read it."""
        needs, made, metrics = self.scheme.needs, {}, {}
        if "log_ratio" in needs or self.correct.needs_proximal:
            made["proximal"] = self._proximal(rows, steps)
            made["log_ratio"] = np.where(rows.sampled, made["proximal"] - rows.behaviour, 0.0)
        if self.needs_reference or self.config.kl_coef > 0:
            with self.policy.inference():
                made["reference"] = sweep(rows, steps, self.ranks, self.policy.reference_logprobs)
            made["kl"] = np.where(rows.sampled, rows.behaviour - made["reference"], 0.0)
        if self.critic is not None:
            made["value"] = self.critic.values(rows, steps)
        if self.prm is not None:
            initial = self.prm.config.reference == "initial"
            against = made["reference"] if initial else rows.behaviour
            made["prm"], metrics = self.prm.score_and_learn(table, rows, steps, against, self.version)
        return {name: values.astype(np.float64) for name, values in made.items()}, metrics

    def _proximal(self, rows: Rows, steps: Plan) -> np.ndarray:
        """Log-probabilities of all tokens under the policy as it stands, float32 [tokens]."""
        with self.policy.inference():
            return sweep(rows, steps, self.ranks, lambda paths: self.policy.logprobs(paths)[0])

    def _known(
        self, table: TurnTable, rows: Rows, estimate: Estimate, weights: np.ndarray, columns: dict[str, np.ndarray]
    ) -> Known:
        turn = table.row()
        by_level = {"token": turn, "turn": turn, "sequence": table.trajectories().of[turn]}
        proximal = columns.get("proximal", rows.behaviour).astype(np.float32)
        return Known(
            rows,
            estimate.advantages.astype(np.float32),
            weights.astype(np.float32),
            proximal,
            columns.get("reference", rows.behaviour).astype(np.float32),
            by_level[self.correct.level],
            proximal,
        )

    def _steps(self, table: TurnTable, known: Known, estimate: Estimate, everything: Plan) -> dict[str, float]:
        """epochs x minibatches optimizer steps of the policy, and of the critic if there is one."""
        c, rows = self.config, known.rows
        measured = torch.zeros(6, rows.tokens)
        metrics: dict[str, float] = {"learner/skipped": 1.0}
        stepped, untouched = False, np.zeros(len(table), bool)
        for epoch in range(c.epochs):
            for turns, scale in self._minibatches(table, epoch):
                steps = self._plan_policy(known, turns)
                untouched[turns] |= not stepped
                if steps is not None:
                    if stepped and self.correct.follows:
                        known = msgspec.structs.replace(known, standing=self._proximal(rows, everything))
                    stepped = True
                    metrics = self._policy_step(known, steps, scale, measured if epoch == 0 else None)
                if self.critic is not None:
                    assert estimate.returns is not None, "a scheme that needs a critic has targets for it"
                    chosen = np.isin(table.row(), turns) & rows.sampled
                    steps = plan(rows.paths, turns, c.micro_tokens, self.ranks)
                    old = table.token_column("value")
                    metrics |= self.critic.learn(rows, steps, chosen, old, estimate.returns, self.version)
        return metrics | watch.metrics(self._measured(table, known, untouched, self.ranks.add(measured).numpy()))

    def _minibatches(self, table: TurnTable, epoch: int) -> list[tuple[list[int], float]]:
        """The turns of each optimizer step, whole questions together, and what their weights are scaled by."""
        trees = np.unique(table.tree)
        if self.config.minibatches > 1:
            trees = np.random.default_rng([self.process.seed, self.version, epoch]).permutation(trees)
        made = []
        for part in np.array_split(trees, min(self.config.minibatches, len(trees))):
            chosen = np.isin(table.tree, part)
            if self.config.aggregation == "token":
                scale = table.mask().sum() / max(1, (table.mask() & table.per_token(chosen)).sum())
            else:
                scale = len(trees) / len(part)
            made.append((np.flatnonzero(chosen).tolist(), float(scale)))
        return made

    def _plan_policy(self, known: Known, turns: list[int]) -> Plan | None:
        """The forwards of a policy step: without a KL or entropy term a turn of zero advantage cannot move it and is left out."""
        c = self.config
        always = c.kl_coef > 0 or c.entropy_coef > 0
        live = [
            i for i in turns
            if known.weights[known.rows.spans[i]].any() and (always or known.advantages[known.rows.spans[i]].any())
        ]  # fmt: skip
        return plan(known.rows.paths, live, c.micro_tokens, self.ranks) if live else None

    def _policy_step(self, known: Known, steps: Plan, scale: float, measured: torch.Tensor | None) -> dict[str, float]:
        total = torch.zeros(1, dtype=torch.float64)
        for chosen, filler in steps.mine:
            total += self._micro_batch(known, chosen, 0.0 if filler else scale, None if filler else measured)
        norm = self.stepper.step(self.version)
        return {
            "learner/grad_norm": norm,
            "learner/surrogate": float(self.ranks.add(total)),
            "learner/lr": self.stepper.rate(self.version),
            "learner/forwarded_tokens": float(steps.forwarded),
            "learner/path_tokens": float(sum(len(p.tokens) for p in known.rows.paths)),
            "learner/trunk_repeat": steps.forwarded / max(1, steps.whole),
        }

    def _micro_batch(self, known: Known, chosen: list[int], scale: float, measured: torch.Tensor | None) -> float:
        """Backward of one forest's share of the objective; returns that share."""
        c, device = self.config, self.policy.device
        index = known.rows.index(chosen)
        live = torch.as_tensor(known.rows.sampled[index])
        index = index[live]
        current, entropy, _ = self.policy.logprobs([known.rows.paths[i] for i in chosen])
        current, entropy = current[live.to(device)], entropy[live.to(device)]

        def here(column: np.ndarray) -> torch.Tensor:
            return torch.as_tensor(column[index], device=device)

        made = self.correct(self._compared(known, index, current), here(known.advantages))
        term, kl = made.term, torch.zeros_like(current)
        if c.kl_coef > 0:
            kl = k3(current, here(known.reference))
            term = term - c.kl_coef * kl
        if c.entropy_coef > 0:
            # d entropy = -E[(log pi + entropy) d log pi]: estimated on the sampled tokens, unbiased on-policy
            term = term - c.entropy_coef * (current.detach() + entropy) * (current - current.detach())
        objective = (scale * here(known.weights) * term).sum()
        (-objective).backward()
        if measured is not None:
            _note(measured, index, current, entropy, kl, made)
        return float(objective.detach())

    def _compared(self, known: Known, index: torch.Tensor, current: torch.Tensor) -> Logprobs:
        """The log-probabilities a correction compares, with its segments as they are outside this micro-batch."""
        rows, device, level = known.rows, current.device, self.correct.level
        proximal, behaviour = (torch.as_tensor(a[index], device=device) for a in (known.proximal, rows.behaviour))
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

    def _measured(self, table: TurnTable, known: Known, untouched: np.ndarray, seen: np.ndarray) -> watch.Measured:
        """The watch's view of the first epoch; seen: [6, tokens] as ``_note`` wrote it, the last row 0 where nothing was forwarded.

        untouched: bool [turns], forwarded before the first optimizer step, when the learner's weights were still the engine's.
        """
        there = seen[5] > 0
        current, entropy, kl, coefficient, cut, _ = seen[:, there]
        stale = (self.version - known.rows.versions)[there]
        oldest = np.array([known.rows.versions[span].min() for span in known.rows.spans])
        fresh = table.per_token(untouched & (oldest == self.version))[there]
        behaviour, turn = known.rows.behaviour[there], table.per_token(table.turn)[there]
        return watch.Measured(current, behaviour, entropy, kl, coefficient, cut == 1, cut == 2, stale, turn, fresh)


def _note(
    measured: torch.Tensor, index: torch.Tensor, current: torch.Tensor, entropy: torch.Tensor, kl: torch.Tensor, made: Surrogate
) -> None:  # fmt: skip
    """Keep what the watch reads; a token is written by the one rank that forwarded it."""
    cut = made.clipped.float() + 2 * made.masked.float()
    columns = [current.detach(), entropy.detach(), kl.detach(), made.coefficient.detach(), cut, torch.ones_like(cut)]
    measured[:, index] = torch.stack([column.float().cpu() for column in columns])


def _table_metrics(table: TurnTable, rows: Rows, advantages: np.ndarray, version: int) -> dict[str, float]:
    stale = version - rows.versions
    made = {
        "learner/turns": float(len(table)),
        "learner/trained_tokens": float(rows.sampled.sum()),
        "learner/zero_advantage_share": float(np.mean(advantages == 0)),
        "learner/staleness_mean": float(stale.mean()),
        "learner/staleness_max": float(stale.max()),
    }
    return made | {f"score/{name}": float(np.nanmean(v)) for name, v in table.scores.items() if not np.isnan(v).all()}
