"""Off-policy corrections: pure functions that turn log-probabilities and advantages into the
surrogate that is maximised.

Notation, per sampled token: current (with gradient), proximal (the policy when the update began)
and behaviour (the policy that sampled the token, as the engine recorded it); r = current /
behaviour. ``level`` names the segment whose tokens' ratios are multiplied: "token", "turn" (one
action) or "sequence" (all tokens of a trajectory that the policy sampled). The gradient of a term
is C A grad log current, where C is the correction's coefficient, so any split into micro-batches
gives the same gradient. On-policy, every C is 1.

A user's own correction is a function ``(logprobs, advantage, level=.., **options)``, named
"module:function" (docs/extend.md). Corrections use only the methods of tensors, so the launcher can
check their options without importing torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from coppice.common.numbers import NotNegative, Positive
from coppice.common.options import check_choice, checked, imported, with_defaults
from coppice.learner.update.objective import Aggregation

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Level = Literal["token", "turn", "sequence"]


class Segments(msgspec.Struct, frozen=True):
    """Segments of one level among the tokens of a micro-batch. ids: int64 [tokens], the segment of
    each token. outside: float32 [segments], log (current or proximal) - log behaviour, summed over
    the segment's tokens in other micro-batches. tokens: float32 [segments], those of all."""

    ids: Tensor
    outside: Tensor
    tokens: Tensor


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of sampled tokens, each [tokens]. segments: by level ("turn", "sequence"),
    if the correction takes its ratio there."""

    current: Tensor
    proximal: Tensor
    behaviour: Tensor
    segments: dict[str, Segments] = {}


class Surrogate(msgspec.Struct, frozen=True):
    """The result of a correction, each [tokens]. term: maximised, with gradient. coefficient: C, 0
    if the gradient is cut. clipped, masked: bool, cut because the step would go too far, or because
    the data is too far off-policy."""

    term: Tensor
    coefficient: Tensor
    clipped: Tensor
    masked: Tensor


Correction = Callable[..., Surrogate]
DualClip = Annotated[float, Meta(gt=1)] | None
"""Lower bound of the clipped term as a multiple of a negative advantage (Ye et al. 2020), "null" in
a config for none. The default 3 is that of verl and of the code that OPRL released."""


class Declared(msgspec.Struct, frozen=True):
    """What the learner must know about a correction. ratio: the policy in the numerator of a
    segment's ratio; "" for a correction without a ratio. bounds_step: it limits how far several
    optimizer steps of one update may move the policy. aggregation: the learner.aggregation with
    which the method is defined; "" for any. near: the options that bound current / proximal, which
    is 1 in the first step of an update."""

    ratio: Literal["current", "proximal", ""] = "current"
    bounds_step: bool = False
    aggregation: Aggregation | Literal[""] = ""
    near: tuple[str, ...] = ()


def declares(**declared: Any) -> Callable[[Correction], Correction]:
    """Decorate a correction with fields of ``Declared``. A correction without this decorator
    declares the defaults."""

    def decorate(function: Correction) -> Correction:
        function.declared = Declared(**declared)  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return decorate


def log_ratio(
    logprobs: Logprobs, level: Level, proximal: bool = False, geometric: bool = False
) -> Tensor:
    """Return the log of current (or ``proximal``) / behaviour over each token's segment [tokens],
    without gradient: of the product of its token ratios, or of their ``geometric`` mean."""
    newer = logprobs.proximal if proximal else logprobs.current.detach()
    log = newer - logprobs.behaviour
    if level != "token":
        segments = logprobs.segments[level]
        log = segments.outside.index_add(0, segments.ids, log)[segments.ids]
        log = log / segments.tokens[segments.ids] if geometric else log
    return log


def ratio(logprobs: Logprobs, level: Level, **how: bool) -> Tensor:
    """Return exp(``log_ratio``), clamped so that products stay finite; e^20 exceeds every bound."""
    return log_ratio(logprobs, level, **how).clamp(-20, 20).exp()


def _weighted(
    logprobs: Logprobs, advantage: Tensor, coefficient: Tensor, masked: Tensor | None = None
) -> Surrogate:
    """Return the weighted score function, coefficient x A x exp(current - detached current)."""
    through = (logprobs.current - logprobs.current.detach()).exp()
    nothing = advantage.new_zeros(advantage.shape).bool()
    term = coefficient * advantage * through
    return Surrogate(term, coefficient, nothing, nothing if masked is None else masked)


def _clipped(
    logprobs: Logprobs, advantage: Tensor, ratio: Tensor,
    clip_low: float, clip_high: float, dual_clip: DualClip, weight: Tensor | float = 1.0,
) -> Surrogate:  # fmt: skip
    """Return weight x min(ratio A, clip(ratio, 1 - low, 1 + high) A). If dual_clip is set, the
    minimum is at least dual_clip A where A < 0."""
    through = (logprobs.current - logprobs.current.detach()).exp()
    plain = ratio * advantage
    term = plain.minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    if dual_clip is not None:
        term = term.maximum(dual_clip * advantage).where(advantage < 0, term)
    cut = term != plain
    term = weight * term.where(cut, plain * through)
    return Surrogate(term, weight * ratio.masked_fill(cut, 0.0), cut, cut.new_zeros(cut.shape))


@declares(ratio="")
def none(logprobs: Logprobs, advantage: Tensor, level: Level = "token") -> Surrogate:
    """Use C = 1 at any level: the policy gradient as if the data were on-policy."""
    return _weighted(logprobs, advantage, advantage.new_ones(advantage.shape))


@declares(bounds_step=True)
def ppo_clip(
    logprobs: Logprobs, advantage: Tensor, level: Level = "token",
    clip_low: NotNegative = 0.2, clip_high: NotNegative = 0.2, dual_clip: DualClip = 3.0,
) -> Surrogate:  # fmt: skip
    """Maximise min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (Schulman et al. 2017). dual_clip c
    > 1 keeps it above c A where A < 0."""
    own = ratio(logprobs, level)
    return _clipped(logprobs, advantage, own, clip_low, clip_high, dual_clip)


_decouples = declares(
    ratio="proximal", bounds_step=True, near=("clip_low", "clip_high", "dual_clip")
)
"""Corrections of the form w min(u A, clip(u) A), where u = current / proximal of the token and w is
made of proximal / behaviour at ``level``."""


@_decouples
def decoupled(
    logprobs: Logprobs, advantage: Tensor, level: Level = "token", upper: Positive = 5.0,
    clip_low: NotNegative = 0.2, clip_high: NotNegative = 0.2, dual_clip: DualClip = 3.0,
) -> Surrogate:  # fmt: skip
    """Decoupled PPO (Hilton et al. 2022) as AReaL trains it: w = proximal / behaviour up to
    ``upper``, and 0 above it. For w = min(proximal / behaviour, upper) take ``tis``."""
    weight = ratio(logprobs, level, proximal=True)
    return _near(logprobs, advantage, weight, 0.0, upper, clip_low, clip_high, dual_clip)


@_decouples
def tis(
    logprobs: Logprobs, advantage: Tensor, level: Level = "token",
    lower: NotNegative = 0.0, upper: Positive = 2.0,
    clip_low: NotNegative = 0.2, clip_high: NotNegative = 0.2, dual_clip: DualClip = 3.0,
) -> Surrogate:  # fmt: skip
    """Truncated importance sampling (Yao et al. 2025): w = clip(proximal / behaviour, lower,
    upper), times PPO's clip of current / proximal."""
    weight = ratio(logprobs, level, proximal=True).clamp(lower, upper)
    return _near(logprobs, advantage, weight, lower, upper, clip_low, clip_high, dual_clip)


@_decouples
def icepop(
    logprobs: Logprobs, advantage: Tensor, level: Level = "token",
    lower: NotNegative = 0.5, upper: Positive = 5.0,
    clip_low: NotNegative = 0.2, clip_high: NotNegative = 0.2, dual_clip: DualClip = 3.0,
) -> Surrogate:  # fmt: skip
    """w = proximal / behaviour within [lower, upper], else 0, times PPO's clip of current /
    proximal (IcePop 2025)."""
    weight = ratio(logprobs, level, proximal=True)
    return _near(logprobs, advantage, weight, lower, upper, clip_low, clip_high, dual_clip)


def _near(
    logprobs: Logprobs, advantage: Tensor, weight: Tensor, lower: float, upper: float,
    clip_low: float, clip_high: float, dual_clip: DualClip,
) -> Surrogate:  # fmt: skip
    """Return weight x PPO's clipped term of current / proximal, and 0 for the tokens whose weight
    is outside [lower, upper]."""
    outside = (weight < lower) | (weight > upper)
    near = (logprobs.current.detach() - logprobs.proximal).clamp(-20, 20).exp()
    weight = weight.masked_fill(outside, 0.0)
    surrogate = _clipped(logprobs, advantage, near, clip_low, clip_high, dual_clip, weight)
    return msgspec.structs.replace(surrogate, clipped=surrogate.clipped & ~outside, masked=outside)


def aipo(
    logprobs: Logprobs, advantage: Tensor, level: Level = "token", upper: Positive = 4.0
) -> Surrogate:
    """C = min(r, upper): one-sided truncation (AIPO, LlamaRL 2025)."""
    return _weighted(logprobs, advantage, ratio(logprobs, level).clamp(max=upper))


def cispo(
    logprobs: Logprobs, advantage: Tensor, level: Level = "token",
    clip_low: NotNegative = 1.0, clip_high: NotNegative = 0.28,
) -> Surrogate:  # fmt: skip
    """C = clip(r, 1 - clip_low, 1 + clip_high). Only the weight is clipped, so no token loses its
    gradient (MiniMax-M1 2025)."""
    coefficient = ratio(logprobs, level).clamp(1 - clip_low, 1 + clip_high)
    return _weighted(logprobs, advantage, coefficient)


def sequence_mask(
    logprobs: Logprobs, advantage: Tensor, level: Level = "sequence",
    lower: NotNegative = 0.0, upper: Positive = 2.0,
) -> Surrogate:  # fmt: skip
    """C = R where the segment's ratio R is within [lower, upper], else 0: masked importance
    sampling of whole segments."""
    own = ratio(logprobs, level)
    outside = (own < lower) | (own > upper)
    return _weighted(logprobs, advantage, own.masked_fill(outside, 0.0), outside)


def geometric_mask(
    logprobs: Logprobs, advantage: Tensor, level: Level = "sequence",
    lower: NotNegative = 0.9, upper: Positive = 1.1,
) -> Surrogate:  # fmt: skip
    """C = r per token where the geometric mean of the segment's token ratios is within [lower,
    upper], else 0. Long segments are not rejected more often than short ones."""
    mean = ratio(logprobs, level, geometric=True)
    outside = (mean < lower) | (mean > upper)
    coefficient = ratio(logprobs, "token").masked_fill(outside, 0.0)
    return _weighted(logprobs, advantage, coefficient, outside)


@declares(bounds_step=True, aggregation="trajectory")
def gspo(
    logprobs: Logprobs, advantage: Tensor, level: Level = "sequence",
    clip_low: NotNegative = 3e-4, clip_high: NotNegative = 4e-4, dual_clip: DualClip = 3.0,
) -> Surrogate:  # fmt: skip
    """Maximise min(s A, clip(s) A), where s is the geometric mean of the segment's token ratios
    (GSPO in its token form; Zheng et al. 2025, whose objective has no dual clip)."""
    mean = ratio(logprobs, level, geometric=True)
    return _clipped(logprobs, advantage, mean, clip_low, clip_high, dual_clip)


_ALL = (none, ppo_clip, decoupled, tis, aipo, cispo, icepop, sequence_mask, geometric_mask, gspo)
CORRECTIONS: dict[str, Correction] = {function.__name__: function for function in _ALL}
LEVELS: tuple[Level, ...] = get_args(Level)


class Corrected(msgspec.Struct, frozen=True):
    """A correction with its options. level: the segment over which its ratio is taken."""

    name: str
    function: Correction
    options: dict[str, Any]
    level: Level
    declared: Declared

    def __call__(self, logprobs: Logprobs, advantage: Tensor) -> Surrogate:
        return self.function(logprobs, advantage, **self.options)

    def needs_proximal(self, steps: int) -> bool:
        """True if all tokens must be forwarded before the first of ``steps`` optimizer steps: with
        one step, only for a sequence's tokens in other micro-batches. A plug-in may read them."""
        reads = self.declared.ratio == "proximal" or ":" in self.name
        return self.level == "sequence" or (reads and steps > 1)

    @property
    def follows(self) -> bool:
        """True if log-probabilities are recomputed before every optimizer step, for a sequence's
        tokens in other micro-batches."""
        return self.declared.ratio == "current" and self.level == "sequence"

    def idle(self, steps: int) -> list[str]:
        """Return the options that are set and have no effect with ``steps`` steps per update."""
        chosen = {name for name, value in self.options.items() if value is not None}
        return sorted(set(self.declared.near) & chosen) if steps == 1 else []

    def doubts(self, steps: int, aggregation: str) -> list[str]:
        """Return warnings about legal settings that do not do what the correction promises."""
        doubts = []
        if steps > 1 and not self.declared.bounds_step:
            doubts.append(
                f"learner.correction = {self.name!r} with {steps} optimizer steps per update"
                " (learner.epochs x learner.minibatches): nothing limits how far the policy moves"
                " away from its state at the start of the update; take 'ppo_clip', 'decoupled',"
                " 'tis' or 'icepop', or one step"
            )
        if self.declared.aggregation and aggregation not in ("auto", self.declared.aggregation):
            doubts.append(
                f"learner.correction = {self.name!r} with learner.aggregation = {aggregation!r}:"
                f" the method is defined with {self.declared.aggregation!r}, which 'auto' takes"
            )
        return doubts


def load(name: str, options: dict[str, Any]) -> Corrected:
    """Return the correction ``name``, from this file or a user's "module:function". Raises
    ValueError that names the valid choices."""
    setting = f"learner.correction = {name!r}"
    if ":" not in name:
        check_choice(setting, name, CORRECTIONS, ", or module:function")
    function = CORRECTIONS.get(name) or imported(setting, name)
    named, others = f"correction {name!r}", ("logprobs", "advantage")
    options = checked("learner.correction_options", named, function, options, others)
    values = with_defaults(function, options)
    if "level" not in values:
        raise ValueError(
            f"{setting}: expected a function with an option level: Level (docs/extend.md)"
        )
    if (lower := values.get("lower", 0.0)) > (upper := values.get("upper", lower)):
        raise ValueError(
            f"learner.correction_options.lower = {lower}: expected at most upper = {upper}"
        )
    declared = getattr(function, "declared", Declared())
    level = values["level"] if declared.ratio else "token"
    return Corrected(name, function, options, level, declared)


Estimator = Literal["k1", "k2", "k3"]


def kl(estimator: Estimator, current: Tensor, reference: Tensor) -> Tensor:
    """Return an estimate of KL(current || reference) per token [tokens], with gradient.

    With d = current - reference on sampled tokens: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d
    within [-10, 10] (Schulman 2020, "Approximating KL divergence"). On-policy, k1 and k3 are
    unbiased values. As loss terms, k2 has the gradient of this KL, k3 that of KL(reference ||
    current), and k1 one that is 0 in expectation; k1 belongs in the reward (objective.shaped).
    """
    d = (current - reference).clamp(-20, 20)  # keeps exp and its gradient finite
    if estimator == "k3":
        return ((-d).exp() + d - 1).clamp(-10, 10)
    return d if estimator == "k1" else d**2 / 2
