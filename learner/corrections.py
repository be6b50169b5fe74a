"""Off-policy corrections: pure functions from log-probabilities and advantages to the surrogate that is maximised.

Notation, per sampled token: current (with gradient), proximal (the policy when the update began) and behaviour (the policy that
sampled it, as the engine recorded it); r = current / behaviour. ``level`` says over what a ratio is taken: "token", "turn" (one
action) or "sequence" (all the policy's tokens of a trajectory); a segment's ratio is the product over its tokens, and each of its
tokens carries it: the gradient of a term is C A grad log current with C the correction's coefficient, so any split into
micro-batches gives the same gradient. On-policy every coefficient is 1 and every correction has the gradient of ``none``.

A correction of a user's own is a function ``(logprobs, advantage, level=.., **options)`` in a file anywhere, named "module:function"
(docs/extend.md). ``declares`` says what the rest of the learner must know of it. Everything is written with the methods of tensors, so the
launcher checks the options of a correction without importing torch.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from wire.numbers import NotNegative, Positive
from wire.options import checked, imported, known

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Level = Literal["token", "turn", "sequence"]


class Segments(msgspec.Struct, frozen=True):
    """Segments of one level among the tokens of a micro-batch.

    ids: int64 [tokens], the segment of each token. outside: float32 [segments], log current (for ``decoupled`` log proximal)
    - log behaviour summed over the segment's tokens that are not here. tokens: float32 [segments], all its tokens.
    """

    ids: Tensor
    outside: Tensor
    tokens: Tensor


class Logprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of sampled tokens, each [tokens]; segments by level ("turn", "sequence") where a ratio is taken there."""

    current: Tensor
    proximal: Tensor
    behaviour: Tensor
    segments: dict[str, Segments] = {}


class Surrogate(msgspec.Struct, frozen=True):
    """term: [tokens], maximised, with gradient. coefficient: [tokens], the weight of a token's score function, 0 where the
    gradient is cut. clipped, masked: bool [tokens], cut because the step would go too far, or because the data is too far off."""

    term: Tensor
    coefficient: Tensor
    clipped: Tensor
    masked: Tensor


Correction = Callable[..., Surrogate]
DualClip = Annotated[float, Meta(gt=1)] | None
"""How far below a negative advantage the term may fall, as a multiple of it; None: no bound."""


class Declared(msgspec.Struct, frozen=True):
    """What the learner must know of a correction.

    ratio: which policy stands above behaviour in the ratio over a segment: "current" (it moves with every optimizer step), "proximal"
    (it is fixed while the update lasts), or "" for a correction without a ratio. bounds_step: whether something limits how far several
    optimizer steps of one update may move the policy. aggregation: the learner.aggregation that the method is defined with, "" for any. near:
    the options that bound current against proximal, which are equal in the first step of an update.
    """

    ratio: Literal["current", "proximal", ""] = "current"
    bounds_step: bool = False
    aggregation: str = ""
    near: tuple[str, ...] = ()


def declares(**declared: Any) -> Callable[[Correction], Correction]:
    """Decorate a correction with fields of ``Declared``; a correction without a decorator declares the defaults."""

    def decorate(function: Correction) -> Correction:
        function.declared = Declared(**declared)  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return decorate


def log_ratio(logprobs: Logprobs, level: Level, against: Literal["current", "proximal"] = "current") -> Tensor:
    """log of (current or proximal) / behaviour over each token's segment [tokens], without gradient."""
    newer = logprobs.current.detach() if against == "current" else logprobs.proximal
    return _over(newer - logprobs.behaviour, logprobs, level)


def mean_log_ratio(logprobs: Logprobs, level: Level) -> Tensor:
    """The same divided by the segment's tokens: the log of the geometric mean of its token ratios."""
    total = log_ratio(logprobs, level)
    if level == "token":
        return total
    segments = logprobs.segments[level]
    return total / segments.tokens[segments.ids]


def _over(token: Tensor, logprobs: Logprobs, level: Level) -> Tensor:
    if level == "token":
        return token
    segments = logprobs.segments[level]
    return segments.outside.index_add(0, segments.ids, token)[segments.ids]


def _ratio(log: Tensor) -> Tensor:
    return log.clamp(-20, 20).exp()  # e^20 is past every bound; only keeps products finite


def _weighted(logprobs: Logprobs, advantage: Tensor, coefficient: Tensor, masked: Tensor | None = None) -> Surrogate:
    """coefficient x A x exp(current - stop_gradient(current)): the weighted score function."""
    through = (logprobs.current - logprobs.current.detach()).exp()
    nothing = advantage.new_zeros(advantage.shape).bool()
    return Surrogate(coefficient * advantage * through, coefficient, nothing, nothing if masked is None else masked)


def _clipped(
    logprobs: Logprobs,
    advantage: Tensor,
    ratio: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: DualClip,
    weight: Tensor | float = 1.0,
) -> Surrogate:
    """weight x min(ratio A, clip(ratio, 1 - low, 1 + high) A), and for A < 0 not below dual_clip A when dual_clip is set."""
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
    """C = 1: the policy gradient as if the data were on-policy, at any level."""
    return _weighted(logprobs, advantage, advantage.new_ones(advantage.shape))


@declares(bounds_step=True)
def ppo_clip(
    logprobs: Logprobs,
    advantage: Tensor,
    level: Level = "token",
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    dual_clip: DualClip = None,
) -> Surrogate:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (Schulman et al. 2017); dual_clip c > 1 bounds it by c A where A < 0."""
    return _clipped(logprobs, advantage, _ratio(log_ratio(logprobs, level)), clip_low, clip_high, dual_clip)


@declares(ratio="proximal", bounds_step=True, near=("clip_low", "clip_high", "dual_clip"))
def decoupled(
    logprobs: Logprobs,
    advantage: Tensor,
    level: Level = "token",
    clip_low: NotNegative = 0.2,
    clip_high: NotNegative = 0.2,
    dual_clip: DualClip = None,
    upper: Positive = 5.0,
) -> Surrogate:
    """w min(u A, clip(u) A), u = current / proximal per token, w = min(proximal / behaviour, upper) at ``level``
    (decoupled PPO, Hilton et al. 2022; AReaL's objective)."""
    weight = _ratio(log_ratio(logprobs, level, "proximal")).clamp(max=upper)
    near = _ratio(logprobs.current.detach() - logprobs.proximal)
    return _clipped(logprobs, advantage, near, clip_low, clip_high, dual_clip, weight)


def tis(
    logprobs: Logprobs, advantage: Tensor, level: Level = "token", lower: NotNegative = 0.0, upper: Positive = 2.0
) -> Surrogate:
    """Truncated importance sampling: C = clip(r, lower, upper)."""
    return _weighted(logprobs, advantage, _ratio(log_ratio(logprobs, level)).clamp(lower, upper))


def aipo(logprobs: Logprobs, advantage: Tensor, level: Level = "token", upper: Positive = 4.0) -> Surrogate:
    """C = min(r, upper): one-sided truncation (AIPO, LlamaRL 2025)."""
    return tis(logprobs, advantage, level, 0.0, upper)


def cispo(
    logprobs: Logprobs,
    advantage: Tensor,
    level: Level = "token",
    clip_low: NotNegative = 1.0,
    clip_high: NotNegative = 0.28,
) -> Surrogate:
    """C = clip(r, 1 - clip_low, 1 + clip_high): the weight is clipped, no token loses its gradient (MiniMax-M1 2025)."""
    return tis(logprobs, advantage, level, 1 - clip_low, 1 + clip_high)


def icepop(
    logprobs: Logprobs, advantage: Tensor, level: Level = "token", lower: NotNegative = 0.5, upper: Positive = 5.0
) -> Surrogate:
    """C = r where lower <= r <= upper, else 0: what lies outside is masked on both sides (IcePop 2025)."""
    ratio = _ratio(log_ratio(logprobs, level))
    outside = (ratio < lower) | (ratio > upper)
    return _weighted(logprobs, advantage, ratio.masked_fill(outside, 0.0), outside)


def sequence_mask(
    logprobs: Logprobs, advantage: Tensor, level: Level = "sequence", lower: NotNegative = 0.0, upper: Positive = 2.0
) -> Surrogate:
    """C = R where the segment's ratio lower <= R <= upper, else 0: masked importance sampling of whole segments."""
    return icepop(logprobs, advantage, level, lower, upper)


def geometric_mask(
    logprobs: Logprobs, advantage: Tensor, level: Level = "sequence", lower: NotNegative = 0.9, upper: Positive = 1.1
) -> Surrogate:
    """C = r per token where the geometric mean of the segment's token ratios is within [lower, upper], else 0: rejection that
    does not grow with length."""
    mean = _ratio(mean_log_ratio(logprobs, level))
    outside = (mean < lower) | (mean > upper)
    ratio = _ratio(log_ratio(logprobs, "token"))
    return _weighted(logprobs, advantage, ratio.masked_fill(outside, 0.0), outside)


@declares(bounds_step=True, aggregation="trajectory")
def gspo(
    logprobs: Logprobs,
    advantage: Tensor,
    level: Level = "sequence",
    clip_low: NotNegative = 3e-4,
    clip_high: NotNegative = 4e-4,
) -> Surrogate:
    """min(s A, clip(s) A) with s the geometric mean of the segment's token ratios (GSPO, in its token form; Zheng et al. 2025)."""
    return _clipped(logprobs, advantage, _ratio(mean_log_ratio(logprobs, level)), clip_low, clip_high, None)


CORRECTIONS: dict[str, Correction] = {
    function.__name__: function
    for function in (none, ppo_clip, decoupled, tis, aipo, cispo, icepop, sequence_mask, geometric_mask, gspo)
}
LEVELS: tuple[Level, ...] = ("token", "turn", "sequence")


class Corrected(msgspec.Struct, frozen=True):
    """A correction with its options. level: where its ratio is taken."""

    name: str
    function: Correction
    options: dict[str, Any]
    level: Level
    declared: Declared

    def __call__(self, logprobs: Logprobs, advantage: Tensor) -> Surrogate:
        return self.function(logprobs, advantage, **self.options)

    @property
    def needs_proximal(self) -> bool:
        """Whether it reads the log-probabilities that the policy had when the update began."""
        return self.declared.ratio == "proximal" or self.level == "sequence"

    @property
    def follows(self) -> bool:
        """Whether they must be taken anew before every optimizer step, for tokens of a sequence that lie in other micro-batches."""
        return self.declared.ratio == "current" and self.level == "sequence"

    def idle(self, steps: int) -> list[str]:
        """Options that are set and have no effect with ``steps`` optimizer steps an update."""
        return sorted(set(self.declared.near) & set(self.options)) if steps == 1 else []

    def doubts(self, steps: int, aggregation: str) -> list[str]:
        """Legal settings that do not do what the correction's name promises. steps: optimizer steps of one update."""
        doubts = []
        if steps > 1 and not self.declared.bounds_step:
            doubts.append(
                f"learner.correction = {self.name!r} with {steps} optimizer steps an update (learner.epochs x learner.minibatches): nothing"
                " limits how far the policy moves from the one at the start of the update; take 'ppo_clip' or 'decoupled', or one step"
            )
        if self.declared.aggregation not in ("", aggregation):
            doubts.append(
                f"learner.correction = {self.name!r} with learner.aggregation = {aggregation!r}: the method is defined with"
                f" {self.declared.aggregation!r}"
            )
        return doubts


def load(name: str, options: dict[str, Any]) -> Corrected:
    """The correction ``name``: one of this file, or a user's "module:function". Raises ValueError naming known ones, options or levels."""
    what = f"learner.correction = {name!r}"
    if ":" not in name:
        known(what, name, CORRECTIONS, ", or module:function")
    function = CORRECTIONS.get(name) or imported(what, name)
    options = checked(
        "learner.correction_options", f"correction {name!r}", function, options, ("logprobs", "advantage")
    )
    values = {p.name: p.default for p in inspect.signature(function).parameters.values()} | options
    if "level" not in values:
        raise ValueError(f"{what}: expected a function with an option level: Level (docs/extend.md)")
    if (lower := values.get("lower", 0.0)) > (upper := values.get("upper", lower)):
        raise ValueError(f"learner.correction_options.lower = {lower}: expected at most upper = {upper}")
    declared = getattr(function, "declared", Declared())
    return Corrected(name, function, options, values["level"] if declared.ratio else "token", declared)


def k3(current: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of KL(current || reference) per token: exp(d) - d - 1, d = reference - current; clamped to [-10, 10]."""
    d = (reference - current).clamp(-20, 20)  # beyond the clamp of the result: only keeps exp, and its gradient, finite
    return (d.exp() - d - 1).clamp(-10, 10)
