"""The numerics watch: do engine and learner agree, how far off-policy is the data, and is the
update still sane? A value beyond its threshold gives a warning that says what to do.
"""

from collections import deque

import msgspec
import numpy as np

from coppice.learner.config import WatchConfig
from coppice.learner.update.lengths import Lengths
from coppice.learner.update.table import TurnTable


class Measured(msgspec.Struct, frozen=True):
    """Measurements of the policy pass, each [tokens that carried weight].

    current, behaviour: log-probabilities. entropy: nats. kl: KL to the initial policy (0 if not
    measured). coefficient, clipped, masked: the correction's. staleness: updates between sampling
    and training. fresh: bool, whether the version being trained sampled the whole turn. Engine and
    learner must agree only on fresh turns, since a turn that spans a weight update attends to keys
    and values of the older weights.
    """

    current: np.ndarray
    behaviour: np.ndarray
    entropy: np.ndarray
    kl: np.ndarray
    coefficient: np.ndarray
    clipped: np.ndarray
    masked: np.ndarray
    staleness: np.ndarray
    turn: np.ndarray
    fresh: np.ndarray


def effective_share(ratio: np.ndarray) -> float:
    """Return the effective sample size of n importance weights divided by n: (sum w)^2 / (n sum
    w^2), in (0, 1]."""
    return float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())) if len(ratio) else 1.0


def metrics(m: Measured) -> dict[str, float]:
    """Return the metrics of an update by name."""
    if not len(m.current):
        return {}
    gap = m.current - m.behaviour
    ratio = np.exp(np.clip(gap, -20, 20))
    results = {
        "learner/ratio_mean": ratio.mean(),
        "learner/ratio_max": ratio.max(),
        "learner/logprob_gap_mean": np.abs(gap).mean(),
        "learner/logprob_gap_max": np.abs(gap).max(),
        "learner/clip_share": m.clipped.mean(),
        "learner/mask_share": m.masked.mean(),
        "learner/entropy": m.entropy.mean(),
        "learner/kl": m.kl.mean(),
        "watch/sample_share": effective_share(ratio),
        "watch/coefficient_mean": m.coefficient.mean(),
    }
    for q in (1, 10, 50, 90, 99):
        results[f"watch/ratio_p{q:02d}"] = np.quantile(ratio, q / 100)
    fresh = np.abs(gap[m.fresh])
    if len(fresh):
        results["watch/engine_gap_mean"] = fresh.mean()
        results["watch/engine_gap_p99"] = np.quantile(fresh, 0.99)
        results["watch/engine_gap_max"] = fresh.max()
    for name, values in (("staleness", m.staleness), ("turn", m.turn)):
        groups = np.minimum(values, 8)
        for group in np.unique(groups):
            prefix, chosen = f"watch/{name}_{int(group)}", groups == group
            results[f"{prefix}/tokens"] = chosen.sum()
            results[f"{prefix}/gap_mean"] = np.abs(gap[chosen]).mean()
            results[f"{prefix}/sample_share"] = effective_share(ratio[chosen])
            results[f"{prefix}/clip_share"] = m.clipped[chosen].mean()
            results[f"{prefix}/entropy"] = m.entropy[chosen].mean()
    return {name: float(value) for name, value in results.items()}


def gradient_noise(
    whole: float, parts: float, share: float, squared_shares: float
) -> dict[str, float]:
    """Return unbiased estimates of |mean gradient|^2 and of the noise in |gradient|^2 (McCandlish
    et al. 2018, appendix A.1, for unequal parts); empty where one part is the whole.

    whole: squared norm of an optimizer step's gradient. parts: the sum of the squared norms of
    disjoint parts of it, which carry the shares s of the loss weights. share, squared_shares: sum
    of s and of s^2. E whole = signal + noise and E parts = signal sum s^2 + noise sum s.
    """
    if share - squared_shares < 1e-6:
        return {}
    signal = (share * whole - parts) / (share - squared_shares)
    return {"watch/gradient_signal": signal, "watch/gradient_noise": whole - signal}


def explained_variance(table: TurnTable, outcome: str = "outcome") -> dict[str, float]:
    """Return the share of the outcome's variance that each score column explains: r^2 of a
    trajectory's mean score and its outcome, if neither is constant and 3 trajectories have both."""
    if outcome not in table.scores:
        return {}
    of = table.trajectories().of

    def mean(column: np.ndarray) -> np.ndarray:
        scored = np.bincount(of, weights=~np.isnan(column))
        total = np.bincount(of, weights=np.nan_to_num(column))
        return np.where(scored > 0, total / np.maximum(1, scored), np.nan)

    results, outcomes = {}, mean(table.column(outcome))
    for name in sorted(set(table.scores) - {outcome}):
        scores = mean(table.column(name))
        both = ~np.isnan(scores) & ~np.isnan(outcomes)
        x, y = scores[both], outcomes[both]
        if len(x) >= 3 and np.ptp(x) > 0 and np.ptp(y) > 0:
            results[f"watch/explained_{name}"] = float(np.corrcoef(x, y)[0, 1] ** 2)
    return results


class WatchState(msgspec.Struct, frozen=True):
    """What the watch compares with, for a checkpoint. norms: the last gradient norms. noise: signal
    and noise of the last gradients. first, last: the first and the last trajectory lengths, by
    group."""

    norms: list[float] = []
    noise: list[tuple[float, float]] = []
    first: dict[str, list[float]] = {}
    last: dict[str, list[float]] = {}


class Watch:
    """Keeps the thresholds, the last gradient norms and the first lengths. Call ``warnings`` once
    after each update, in order."""

    def __init__(self, config: WatchConfig, bfloat16: bool = False):
        self.config, self.bfloat16 = config, bfloat16
        self._norms: deque[float] = deque(maxlen=20)
        self._noise: deque[tuple[float, float]] = deque(maxlen=20)
        self.lengths = Lengths()

    def state(self) -> WatchState:
        """Return what it remembers now."""
        last = {group: list(lengths) for group, lengths in self.lengths.last.items()}
        return WatchState(list(self._norms), list(self._noise), self.lengths.first, last)

    def restore(self, state: WatchState) -> None:
        """Go on from what another watch remembered."""
        for kept, saved in ((self._norms, state.norms), (self._noise, state.noise)):
            kept.clear()
            kept.extend(saved)  # pyright: ignore[reportArgumentType]
        self.lengths.first |= state.first
        for group, lengths in state.last.items():
            self.lengths.last[group].extend(lengths)

    def noise_scale(self, values: dict[str, float], questions: int) -> dict[str, float]:
        """Return the simple noise scale B = tr(Sigma) / |G|^2 in questions: at this batch size,
        noise and signal of the gradient are equal (McCandlish et al. 2018, eq. 2.9). It is the
        ratio of the means over the last 20 updates, because a ratio of two noisy numbers is biased;
        empty without an estimate, or where the mean signal is not positive.

        values: metrics of an optimizer step on this many questions.
        """
        if "watch/gradient_noise" not in values:
            return {}
        noise = values["watch/gradient_noise"] * questions
        self._noise.append((values["watch/gradient_signal"], noise))
        signal, noise = np.mean(self._noise, axis=0)
        return {"watch/noise_scale": float(noise / signal)} if signal > 0 else {}

    def warnings(self, values: dict[str, float], grad_norm: float | None) -> list[str]:
        """Return one sentence for each value beyond its threshold. The sentence names value,
        threshold and remedy."""
        c, sentences = self.config, []

        def above(key: str, threshold: str, quantity: str, remedy: str) -> None:
            limit = getattr(c, threshold)
            if limit and values.get(key, 0.0) > limit:
                sentences.append(
                    f"{quantity} is {values[key]:.3g} (watch.{threshold} = {limit:g}): {remedy}"
                )

        above(
            "watch/engine_gap_p99", "engine_gap_bfloat16" if self.bfloat16 else "engine_gap", "log-probability difference of engine and learner on fresh turns (p99)",
            "equal weights should give equal values: compare dtype, temperature and attention of engine and learner; until then use correction = 'tis' or 'icepop'",
        )  # fmt: skip
        above(
            "learner/clip_share", "clip_share", "share of clipped tokens",
            "lower learner.lr, scheduler.max_staleness or learner.epochs",
        )  # fmt: skip
        above(
            "learner/mask_share", "mask_share", "share of masked tokens",
            "the data is too far off-policy: lower scheduler.max_staleness or widen the bounds of the correction",
        )  # fmt: skip
        above(
            "learner/kl",
            "kl",
            "KL to the initial policy",
            "raise learner.kl_coef or lower learner.lr",
        )
        share = values.get("watch/sample_share", 1.0)
        if c.sample_share and share < c.sample_share:
            sentences.append(
                f"effective sample size is {share:.2f} of the tokens (watch.sample_share = {c.sample_share:g}): lower"
                " scheduler.max_staleness or learner.lr, or truncate harder"
            )
        if c.entropy and values.get("learner/entropy", np.inf) < c.entropy:
            sentences.append(
                f"entropy is {values['learner/entropy']:.3g} nats (watch.entropy = {c.entropy:g}): the policy has nearly stopped"
                " exploring; raise learner.entropy_coef or learner.kl_coef, or lower learner.lr"
            )
        return sentences + self._norm(grad_norm) + self.lengths.warnings(values, c.turns)

    def _norm(self, norm: float | None) -> list[str]:
        if norm is None:
            return []
        usual = float(np.median(self._norms)) if len(self._norms) >= 5 else None
        self._norms.append(norm)
        if usual and self.config.grad_norm and norm > self.config.grad_norm * usual:
            return [
                f"gradient norm {norm:.3g} is {norm / usual:.0f} times its median (watch.grad_norm = {self.config.grad_norm:g}):"
                " look at this update's trees with coppice trees; lower learner.grad_clip or learner.lr if it goes on"
            ]
        return []
