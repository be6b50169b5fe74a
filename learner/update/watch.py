"""The numerics watch: do engine and learner agree, how far off-policy is the data, and is the
update still sane? A value beyond its threshold gives a warning that says what to do.
"""

import msgspec
import numpy as np

from coppice.learner.config import WatchConfig

LIMITS = (
    ("engine_gap", "watch/engine_gap_p99",
     "log-probability difference of engine and learner on fresh turns (p99)",
     "equal weights should give equal values: compare dtype, temperature and attention of engine"
     " and learner; until then use correction = 'tis' or 'icepop'"),
    ("clip_share", "learner/clip_share", "share of clipped tokens",
     "lower learner.lr, scheduler.max_staleness or learner.minibatches"),
    ("mask_share", "learner/mask_share", "share of masked tokens",
     "the data is too far off-policy: lower scheduler.max_staleness or widen the correction's"
     " bounds"),
    ("kl", "learner/kl", "KL to the initial policy",
     "raise learner.kl_coef or lower learner.lr"),
    ("sample_share", "watch/sample_share", "effective sample size per token",
     "lower scheduler.max_staleness or learner.lr, or truncate harder"),
    ("entropy", "learner/entropy", "entropy in nats",
     "the policy has nearly stopped exploring; raise learner.entropy_coef or learner.kl_coef, or"
     " lower learner.lr"),
)  # fmt: skip
"""What is compared with a threshold of ``WatchConfig``: its name, the metric, what the metric is,
and the remedy."""
FLOORS = ("sample_share", "entropy")
"""The thresholds below which a value must not fall; it must not exceed the others."""
NORMS = 20
"""The number of gradients with which the newest is compared."""
FIRST, LAST = 2, 3
"""The number of updates over which the first length of trajectories and their present length are
averaged."""
_GROW = {
    True: "a turn earns its process reward even if the outcome is bad:"
    " scheme_options.normalisation = 'constant' ties it to the outcome",
    False: "the policy may be learning length itself: try scheme_options.normalisation = 'sample',"
    " or a smaller scheduler.budget",
}
"""Cause and remedy, by whether a turn of a wrong trajectory earns reward."""
_SHRINK = (
    "the cheapest policy acts less: make more initial trajectories succeed (lower temperature,"
    " longer warm start), or lower learner.lr relative to learner.critic.lr"
)


def effective_share(ratio: np.ndarray) -> float:
    """Return the effective sample size of n importance weights divided by n: (sum w)^2 / (n sum
    w^2), in (0, 1]."""
    return float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())) if len(ratio) else 1.0


def metrics(
    current: np.ndarray, behaviour: np.ndarray, entropy: np.ndarray, kl: np.ndarray,
    coefficient: np.ndarray, cut: np.ndarray, staleness: np.ndarray, turn: np.ndarray,
    fresh: np.ndarray,
) -> dict[str, float]:  # fmt: skip
    """Return the metrics of the policy pass by name. All are [tokens that carried weight].

    current, behaviour: log-probabilities. entropy: nats. kl: KL to the initial policy (0 if not
    measured). coefficient: the correction's; cut: 1 where it clipped, 2 where it masked. staleness:
    updates between sampling and training. fresh: bool, whether the version being trained sampled
    the whole turn. Engine and learner must agree only on fresh turns, since a turn that spans a
    weight update attends to keys and values of the older weights.
    """
    if not len(current):
        return {}
    gap, clipped = current - behaviour, cut == 1
    ratio = np.exp(np.clip(gap, -20, 20))
    results = {
        "learner/ratio_mean": ratio.mean(),
        "learner/ratio_max": ratio.max(),
        "learner/logprob_gap_mean": np.abs(gap).mean(),
        "learner/logprob_gap_max": np.abs(gap).max(),
        "learner/clip_share": clipped.mean(),
        "learner/mask_share": (cut == 2).mean(),
        "learner/entropy": entropy.mean(),
        "learner/kl": kl.mean(),
        "watch/sample_share": effective_share(ratio),
        "watch/coefficient_mean": coefficient.mean(),
    }
    for q in (1, 10, 50, 90, 99):
        results[f"watch/ratio_p{q:02d}"] = np.quantile(ratio, q / 100)
    if fresh.any():
        engine_gap = np.abs(gap[fresh])
        results["watch/engine_gap_mean"] = engine_gap.mean()
        results["watch/engine_gap_p99"] = np.quantile(engine_gap, 0.99)
        results["watch/engine_gap_max"] = engine_gap.max()
    for name, values in (("staleness", staleness), ("turn", turn)):
        groups = np.clip(values, 0, 8)
        for group in np.unique(groups):
            prefix, chosen = f"watch/{name}_{int(group)}", groups == group
            results[f"{prefix}/tokens"] = chosen.sum()
            results[f"{prefix}/gap_mean"] = np.abs(gap[chosen]).mean()
            results[f"{prefix}/sample_share"] = effective_share(ratio[chosen])
            results[f"{prefix}/clip_share"] = clipped[chosen].mean()
            results[f"{prefix}/entropy"] = entropy[chosen].mean()
    return {name: float(value) for name, value in results.items()}


class WatchState(msgspec.Struct):
    """What the watch compares with, for a checkpoint. norms: the last gradient norms. first, last:
    the first and the last trajectory lengths, by group. valid: the share of valid actions in the
    first update."""

    norms: list[float] = []
    first: dict[str, list[float]] = {}
    last: dict[str, list[float]] = {}
    valid: float | None = None


class Watch:
    """Holds the thresholds and compares with ``state``. Call ``warnings`` once after each update,
    in order. bonus: ``learner.entropy_coef``."""

    def __init__(self, config: WatchConfig, bfloat16: bool = False, bonus: float = 0.0):
        self.config, self.bonus, self.state = config, bonus, WatchState()
        self.gap = "engine_gap_bfloat16" if bfloat16 else "engine_gap"

    def warnings(self, values: dict[str, float], grad_norm: float | None) -> list[str]:
        """Return one sentence for each value beyond its threshold. The sentence names value,
        threshold and remedy."""
        told = []
        for threshold, metric, quantity, remedy in LIMITS:
            threshold = self.gap if threshold == "engine_gap" else threshold
            limit, value = getattr(self.config, threshold), values.get(metric)
            sign = -1 if threshold in FLOORS else 1
            if limit and value is not None and sign * value > sign * limit:
                told.append(f"{quantity} is {value:.3g} (watch.{threshold} = {limit:g}): {remedy}")
        norms, limit = self.state.norms, self.config.grad_norm
        if grad_norm is not None:
            usual = float(np.median(norms)) if len(norms) >= 5 else 0.0
            if usual and limit and grad_norm > limit * usual:
                told.append(
                    f"gradient norm {grad_norm:.3g} is {grad_norm / usual:.0f} times its median"
                    f" (watch.grad_norm = {limit:g}): look at this update's trees with coppice"
                    " trees; lower learner.grad_clip or learner.lr if it goes on"
                )
            self.state.norms = [*norms, grad_norm][-NORMS:]
        others = [self._length(group, values) for group in ("correct", "wrong")]
        others.append(self._validity(values.get("score/valid")))
        return told + [sentence for sentence in others if sentence]

    def _validity(self, valid: float | None) -> str:
        """Return a warning of an entropy bonus while fewer than half as many actions are valid as
        in the first update: where rewards do not differ, it alone moves the policy."""
        first = self.state.valid = valid if self.state.valid is None else self.state.valid
        if valid is None or first is None or not self.bonus or valid >= first / 2:
            return ""
        return (
            f"{valid:.3f} of the actions are valid, {first:.3f} were at first, and"
            f" learner.entropy_coef = {self.bonus:g} rewards random text: set it to 0, or raise"
            " learner.kl_coef"
        )

    def _length(self, group: str, values: dict[str, float]) -> str:
        """Return a warning of PPR's length side effect (methods.md 5): trajectories grow while a
        turn earns reward, and shrink while a turn costs reward. values: the scheme's "ppr/turns_*"
        and "ppr/turn_pay_*", which other schemes and a batch without this group lack."""
        turns, pay = values.get(f"ppr/turns_{group}"), values.get(f"ppr/turn_pay_{group}", 0.0)
        if turns is None:
            return ""
        first = self.state.first.setdefault(group, [])
        if len(first) < FIRST:
            first.append(turns)
            return ""
        last = self.state.last[group] = [*self.state.last.get(group, []), turns][-LAST:]
        usual, now, limit = sum(first) / FIRST, sum(last) / len(last), self.config.turns
        if limit and len(last) == LAST and now > limit * usual and pay > 0:
            remedy = _GROW[values.get("ppr/turn_pay_wrong", 0.0) > 0]
        elif limit and len(last) == LAST and now * limit < usual and pay < 0:
            remedy = _SHRINK
        else:
            return ""
        return (
            f"{group} trajectories have {now:.1f} turns, {now / usual:.2f} times as many as at"
            f" first (watch.turns = {limit:g}), and a judged turn pays {pay:+.2f} in them: {remedy}"
        )
