"""One update: table -> token values from the learner's models -> advantages -> weights -> packed
forests -> optimizer steps.

Every rank sees the whole batch and computes the same table, advantages and weights. The ranks
divide the forwards (learner/update/passes.py), so any number of ranks gives the same update up to
rounding.
"""

import time
from statistics import fmean

import msgspec
import numpy as np
import torch
from accelerate.utils import set_seed

from coppice.common.phases import Phases
from coppice.learner.config import AdaptiveKl, LearnerProcess
from coppice.learner.forest.selfcheck import check
from coppice.learner.model.model import TreeModel, check_fits
from coppice.learner.model.optimizer import Stepper
from coppice.learner.model.ranks import Ranks
from coppice.learner.schemes import finite
from coppice.learner.update import watch
from coppice.learner.update.critic import Critic
from coppice.learner.update.objective import shaped, token_weights, truncated
from coppice.learner.update.passes import Plan, Rows, plan, sweep
from coppice.learner.update.plan import plan_of
from coppice.learner.update.policy_step import MEASURES, Objective, PolicyStep, watched
from coppice.learner.update.prm import ImplicitPrm
from coppice.learner.update.table import TurnTable, build
from coppice.learner.update.targets import Advantages
from coppice.wire.messages import TrainGroup, TreeNode


class Batch(msgspec.Struct, frozen=True):
    """The input of one update. questions: the number of closed trees, including those without
    groups. replaced: ids of the groups of replaced trees, which enter the frontier with this update
    and carry no loss."""

    version: int
    questions: int
    groups: list[TrainGroup]
    nodes: list[tuple[int, TreeNode]]
    replaced: list[int] = []


class Trainer:
    """Holds the policy, the models that its scheme needs, and their optimizers. Call ``update`` on
    every rank with the same batch."""

    def __init__(self, process: LearnerProcess, ranks: Ranks):
        self.process, self.config, self.ranks = process, process.learner, ranks
        torch.set_num_threads(self.config.threads)
        c, self.timed = self.config, Phases()
        self.plan = plan_of(c)
        self.scheme, self.correct, models = self.plan.scheme, self.plan.correct, self.plan.models
        check_fits(process.model, c, ranks)
        self.policy = TreeModel(
            process.model, c, process.temperature, ranks, process.seed,
            reference=models["policy"].copy, routed=c.routing_replay,
        )  # fmt: skip
        self.stepper = Stepper("policy", self.policy.trained(), c.optimizer, ranks)
        self.policy_step = PolicyStep(self.policy, self.stepper, self.correct, c, ranks, self.timed)
        c_critic, c_prm = self.plan.critic, self.plan.prm
        self.critic = c_critic and Critic(process, c_critic, models["critic"].lora, ranks)
        self.prm = c_prm and ImplicitPrm(process, c_prm, models["prm"].lora, ranks)
        self.watch = watch.Watch(c.watch, self.policy.compute == torch.bfloat16, c.entropy_coef)
        self.warnings: list[str] = []
        self.version = 0
        self.undone = range(0)
        """Versions whose numbers a resume gives to other weights."""
        self.kl_factor = 1.0
        self.checked: bool | None = None
        self._busy_s = 0.0
        self._since: float | None = None

    @property
    def busy_s(self) -> float:
        """Seconds spent in updates, including the running update."""
        return self._busy_s + (time.monotonic() - self._since if self._since else 0.0)

    def parts(self) -> dict[str, tuple[TreeModel, Stepper]]:
        """Return every model that trains with its optimizer, by its name in a checkpoint."""
        others = {"critic": self.critic, "prm": self.prm}
        parts = {name: (part.model, part.stepper) for name, part in others.items() if part}
        return {"policy": (self.policy, self.stepper), **parts}

    def update(self, batch: Batch) -> dict[str, float]:
        """Train on one batch, from version v to v + 1. Returns the metrics, equal on all ranks, and
        sets ``warnings`` to those of the watch."""
        start = self._since = time.monotonic()
        # what plug-ins draw depends on seed and version alone, also after a resume
        set_seed((self.process.seed + batch.version) % 2**32)
        nodes = {(tree, node.id): node for tree, node in batch.nodes}
        metrics: dict[str, float] = {"learner/groups": len(batch.groups)}
        metrics["learner/questions"], self.warnings = batch.questions, []
        if any(group.turns for group in batch.groups):
            with self.timed.over("pack"):
                outcome = {self.prm.config.outcome} if self.prm else set[str]()
                table = build(batch.groups, nodes, self.scheme.needs.columns | outcome)
                kept = self.scheme.trains(table)
                left_out = table.trajectories().of[~kept]
                table = table.only(kept)
            metrics["learner/left_out_trajectories"] = float(len(np.unique(left_out)))
            metrics |= self._train(table) if len(table) else {"learner/skipped": 1.0}
            metrics["watch/engine_gap_limit"] = getattr(self.watch.config, self.watch.gap)
            self.warnings = self.watch.warnings(metrics, metrics.get("learner/grad_norm"))
        self.version = batch.version + 1
        self._busy_s, self._since = self.busy_s, None
        metrics |= self.timed.take() | {"learner/seconds": time.monotonic() - start}
        return metrics

    def _train(self, table: TurnTable) -> dict[str, float]:
        c = self.config
        with self.timed.over("pack"):
            rows = Rows(table.paths)
            everything = plan(rows.trie, range(len(table)), c.micro_tokens, self.ranks)
        if not self.checked:
            with self.timed.over("check"):
                densest = [rows.paths[i] for i in everything.densest]
                self.checked = check(self.policy, densest, self.checked is not None)
        with self.timed.over("score"):
            columns, prm_metrics = self._token_columns(table, rows, everything)
        table = msgspec.structs.replace(table, token_scores=columns)
        estimate = self.scheme(shaped(table, self.scheme.needs.reward_column, c))
        for name, values in (("advantages", estimate.advantages), ("returns", estimate.returns)):
            bad = 0 if values is None else int((~np.isfinite(values)).sum())
            if bad:
                raise ValueError(
                    f"scheme {self.scheme.name!r}: {bad} of {rows.tokens} {name} are not finite: a"
                    " score is missing or infinite; coppice trees shows the trees of this update"
                )
        trained = rows.sampled if estimate.trained is None else rows.sampled & estimate.trained
        if c.overlong_filter:
            trained = trained & ~table.per_token(truncated(table))
        steps = self.scheme.needs.group != "task"
        weights = token_weights(table, trained, self.plan.aggregation, c.constant_tokens, steps)
        objective = self._objective(table, rows, estimate, weights)
        metrics = self._table_metrics(table, objective) | prm_metrics
        metrics |= self.scheme.metrics(table)
        metrics |= self._steps(table, objective, estimate, everything)
        if c.adaptive_kl is not None and "learner/kl" in metrics:
            metrics["learner/kl_factor"] = self.kl_factor
            trajectories = len(table.trajectories().tree)
            kl, factor = metrics["learner/kl"], self.kl_factor
            self.kl_factor = adapted_kl(factor, kl, c.adaptive_kl, trajectories)
        return finite(metrics)

    def _token_columns(
        self, table: TurnTable, rows: Rows, steps: Plan
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Return the token columns that scheme, correction or KL term read from the learner's
        models, and the reward model's metrics."""
        columns, metrics = {}, {}
        if self.plan.proximal:
            columns["proximal"] = sweep(rows, steps, self.policy)
            columns["log_ratio"] = np.where(rows.sampled, columns["proximal"] - rows.behaviour, 0.0)
        if self.plan.reference:
            # the adapters off, or the frozen copy
            columns["reference"] = sweep(rows, steps, self.policy.initial, self.policy.lora)
            # The k1 estimate is the log-ratio itself. Here the adaptive factor reaches every weight
            # of the KL in a reward.
            gap = np.where(rows.sampled, rows.behaviour - columns["reference"], 0.0)
            columns["kl"] = self.kl_factor * gap
        if self.critic is not None:
            columns["value"] = sweep(rows, steps, self.critic.model)
        if self.prm is not None:
            column = {"behaviour": "", "recomputed": "proximal", "initial": "reference"}
            reference = columns.get(column[self.prm.config.reference], rows.behaviour)
            learnt = self.prm.score_and_learn(table, rows, steps, reference, self.version)
            columns["prm"], metrics = learnt
        return {name: values.astype(np.float64) for name, values in columns.items()}, metrics

    def _objective(
        self, table: TurnTable, rows: Rows, estimate: Advantages, weights: np.ndarray
    ) -> Objective:
        columns, turn = table.token_scores, table.row()
        sequence = self.correct.level == "sequence"
        proximal = columns.get("proximal", rows.behaviour).astype(np.float32)
        advantages = estimate.advantages * self.config.advantage_scale
        if clip := self.config.advantage_clip:
            advantages = np.clip(advantages, -clip, clip)
        return Objective(
            rows,
            advantages.astype(np.float32),
            weights.astype(np.float32),
            proximal,
            columns["reference"].astype(np.float32) if "reference" in columns else None,
            table.trajectories().of[turn] if sequence else turn,
            proximal,
            self.config.kl_coef * self.kl_factor,
        )

    def _steps(
        self, table: TurnTable, objective: Objective, estimate: Advantages, everything: Plan
    ) -> dict[str, float]:
        """Make epochs x minibatches optimizer steps of the policy, and of the critic if there is
        one. Returns their metrics: of tokens the sum, of norms the largest, of the critic the mean.

        The policy makes none while the critic warms up, and none after a step that would begin
        further than target_kl from the proximal policy.
        """
        c, critic, rows = self.config, self.critic, objective.rows
        record = torch.zeros(MEASURES, rows.tokens)
        metrics: dict[str, float] = {"learner/skipped": 1.0}
        stepped, stopped, first, passed = False, 0, *np.zeros((2, len(table)), bool)
        forwarded, paths, norm, learnt = 0.0, 0.0, 0.0, list[dict[str, float]]()
        frozen = critic is not None and self.version < critic.config.policy_frozen_updates
        for epoch in range(c.epochs):
            for turns, scale in self._minibatches(table, objective.weights, epoch):
                with self.timed.over("pack"):
                    steps = None if frozen else self.policy_step.plan(objective, turns)
                first[turns] |= not stepped
                passed[turns] |= not stopped
                if steps is not None and stopped:
                    stopped += 1
                elif steps is not None:
                    if stepped and self.correct.follows:
                        with self.timed.over("score"):
                            latest = sweep(rows, everything, self.policy)
                        objective = msgspec.structs.replace(objective, latest=latest)
                    stepped = True
                    kept = record if epoch == 0 else None
                    result = self.policy_step.step(objective, steps, scale, self.version, kept)
                    if "learner/grad_norm" in result:
                        forwarded += result["learner/forwarded_tokens"]
                        paths += steps.path_tokens
                        norm = max(norm, result["learner/grad_norm"])
                        metrics = result
                    else:
                        metrics, stopped = metrics | result, 1
                if critic is not None:
                    assert estimate.returns is not None, "a scheme with a critic has its targets"
                    chosen = np.isin(table.row(), turns) & (objective.weights > 0)
                    steps = plan(rows.trie, turns, c.micro_tokens, self.ranks)
                    own = rows, steps, chosen, table.token_column("value"), estimate.returns
                    with self.timed.over("critic"):
                        for _ in range(critic.config.steps):
                            learnt.append(critic.learn(*own, self.version))
        if paths:
            metrics |= {"learner/forwarded_tokens": forwarded, "learner/path_tokens": paths}
            metrics["learner/grad_norm"] = norm
        for name in {name for of in learnt for name in of}:
            metrics[name] = fmean(of[name] for of in learnt if name in of)
        if c.target_kl:
            metrics["learner/stopped_steps"] = float(stopped)
        whole = self.ranks.add(record).numpy()
        first &= self.version not in self.undone
        metrics |= watched(table, objective, first, passed, whole, self.version)
        return metrics | self._routing(rows)

    def _routing(self, rows: Rows) -> dict[str, float]:
        """Return how often the routers would have chosen other experts than the engine's."""
        if (routers := self.policy.routers) is None:
            return {}
        sums = torch.tensor(list(routers.differing().values()), dtype=torch.float64)
        differing, compared = self.ranks.add(sums).tolist()
        return {
            "watch/routing_differs": differing / max(1.0, compared),
            "watch/routing_conflicts": float(rows.trie.conflicts),
        }

    def _minibatches(
        self, table: TurnTable, weights: np.ndarray, epoch: int
    ) -> list[tuple[list[int], float]]:
        """Return the turns of each optimizer step and the factor of their weights. The turns of a
        question stay together."""
        seed, minibatches = [self.process.seed, self.version, epoch], []
        parts = table.questions(self.config.minibatches, seed)
        for part in parts:
            chosen, trained = np.isin(table.tree, part), weights > 0
            scale = sum(map(len, parts)) / len(part)
            if self.plan.aggregation == "token":
                scale = trained.sum() / max(1, (trained & table.per_token(chosen)).sum())
            minibatches.append((np.flatnonzero(chosen).tolist(), float(scale)))
        return minibatches

    def _table_metrics(self, table: TurnTable, objective: Objective) -> dict[str, float]:
        stale = np.maximum(0, self.version - objective.rows.versions)  # below 0 after a resume
        trained = objective.weights > 0
        zeros = objective.advantages[trained] == 0
        over = table.per_token(table.tree)[stale > self.process.max_staleness]
        metrics = {
            "learner/turns": float(len(table)),
            "learner/trained_tokens": float(trained.sum()),
            "learner/zero_advantage_share": float(np.mean(zeros)) if trained.any() else 1.0,
            "learner/staleness_mean": float(stale.mean()),
            "learner/staleness_max": float(stale.max()),
            "learner/over_stale": float(len(np.unique(over))),
        }
        if table.anchor is not None:
            _, state, count = np.unique(table.anchor, return_inverse=True, return_counts=True)
            lowered = np.bincount(state, table.per_turn(objective.advantages) < 0) == count
            metrics["learner/lowered_states_share"] = float((lowered & (count > 3))[state].mean())
        for name, scores in table.scores.items():
            if not np.isnan(scores).all():
                metrics[f"score/{name}"] = float(np.nanmean(scores))
        return metrics


def adapted_kl(factor: float, kl: float, config: AdaptiveKl, trajectories: int) -> float:
    """Return the next factor of the KL's coefficients, factor x (1 + clip(kl / target - 1, -0.2,
    0.2) x trajectories / horizon) (Ziegler et al. 2019, in the form of their released code). kl:
    nats per token in the update just made, which had this many trajectories; more trajectories than
    the horizon count as the horizon."""
    error = min(0.2, max(-0.2, kl / config.target - 1))
    return factor * (1 + error * min(1.0, trajectories / config.horizon))
