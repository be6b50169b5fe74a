"""Off-policy corrections: pure functions from log-probabilities and advantages to the surrogate that is maximised.

Notation, per sampled token: current (with gradient), proximal (the policy when the update began) and behaviour (the policy that
sampled it, as the engine recorded it); r = current / behaviour. ``level`` says over what a ratio is taken: "token", "turn" (one
action) or "sequence" (all the policy's tokens of a trajectory); a segment's ratio is the product over its tokens, and each of its
tokens carries it: the gradient of a term is C A grad log current with C the correction's coefficient, so any split into
micro-batches gives the same gradient. On-policy every coefficient is 1 and every correction has the gradient of ``none``.

All is said with the methods of tensors: the launcher checks a correction's options without importing torch.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from wire.options import checked, known

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
    dual_clip: float,
    weight: Tensor | float = 1.0,
) -> Surrogate:
    """weight x min(ratio A, clip(ratio, 1 - low, 1 + high) A), and for A < 0 not below dual_clip A when dual_clip is set."""
    through = (logprobs.current - logprobs.current.detach()).exp()
    plain = ratio * advantage
    term = plain.minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    if dual_clip > 0:
        term = term.maximum(dual_clip * advantage).where(advantage < 0, term)
    cut = term != plain
    term = weight * term.where(cut, plain * through)
    return Surrogate(term, weight * ratio.masked_fill(cut, 0.0), cut, cut.new_zeros(cut.shape))


def none(logprobs: Logprobs, advantage: Tensor, level: Level = "token") -> Surrogate:
    """C = 1: the policy gradient as if the data were on-policy, at any level."""
    return _weighted(logprobs, advantage, advantage.new_ones(advantage.shape))


def ppo_clip(
    logprobs: Logprobs,
    advantage: Tensor,
    level: Level = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
) -> Surrogate:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (Schulman et al. 2017); dual_clip c > 1 bounds it by c A where A < 0."""
    return _clipped(logprobs, advantage, _ratio(log_ratio(logprobs, level)), clip_low, clip_high, dual_clip)


def decoupled(
    logprobs: Logprobs,
    advantage: Tensor,
    level: Level = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
    upper: float = 5.0,
) -> Surrogate:
    """w min(u A, clip(u) A), u = current / proximal per token, w = min(proximal / behaviour, upper) at ``level``
    (decoupled PPO, Hilton et al. 2022; AReaL's objective)."""
    weight = _ratio(log_ratio(logprobs, level, "proximal")).clamp(max=upper)
    near = _ratio(logprobs.current.detach() - logprobs.proximal)
    return _clipped(logprobs, advantage, near, clip_low, clip_high, dual_clip, weight)


def tis(
    logprobs: Logprobs, advantage: Tensor, level: Level = "token", lower: float = 0.0, upper: float = 2.0
) -> Surrogate:
    """Truncated importance sampling: C = clip(r, lower, upper)."""
    return _weighted(logprobs, advantage, _ratio(log_ratio(logprobs, level)).clamp(lower, upper))


def aipo(logprobs: Logprobs, advantage: Tensor, level: Level = "token", upper: float = 4.0) -> Surrogate:
    """C = min(r, upper): one-sided truncation (AIPO, LlamaRL 2025)."""
    return tis(logprobs, advantage, level, 0.0, upper)


def cispo(
    logprobs: Logprobs, advantage: Tensor, level: Level = "token", clip_low: float = 1.0, clip_high: float = 0.28
) -> Surrogate:
    """C = clip(r, 1 - clip_low, 1 + clip_high): the weight is clipped, no token loses its gradient (MiniMax-M1 2025)."""
    return tis(logprobs, advantage, level, 1 - clip_low, 1 + clip_high)


def icepop(
    logprobs: Logprobs, advantage: Tensor, level: Level = "token", lower: float = 0.5, upper: float = 5.0
) -> Surrogate:
    """C = r where lower <= r <= upper, else 0: what lies outside is masked on both sides (IcePop 2025)."""
    ratio = _ratio(log_ratio(logprobs, level))
    outside = (ratio < lower) | (ratio > upper)
    return _weighted(logprobs, advantage, ratio.masked_fill(outside, 0.0), outside)


def sequence_mask(
    logprobs: Logprobs, advantage: Tensor, level: Level = "sequence", lower: float = 0.0, upper: float = 2.0
) -> Surrogate:
    """C = R where the segment's ratio lower <= R <= upper, else 0: masked importance sampling of whole segments."""
    return icepop(logprobs, advantage, level, lower, upper)


def geometric_mask(
    logprobs: Logprobs, advantage: Tensor, level: Level = "sequence", lower: float = 0.9, upper: float = 1.1
) -> Surrogate:
    """C = r per token where the geometric mean of the segment's token ratios is within [lower, upper], else 0: rejection that
    does not grow with length."""
    mean = _ratio(mean_log_ratio(logprobs, level))
    outside = (mean < lower) | (mean > upper)
    ratio = _ratio(log_ratio(logprobs, "token"))
    return _weighted(logprobs, advantage, ratio.masked_fill(outside, 0.0), outside)


def gspo(
    logprobs: Logprobs,
    advantage: Tensor,
    level: Level = "sequence",
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Surrogate:
    """min(s A, clip(s) A) with s the geometric mean of the segment's token ratios (GSPO, in its token form; Zheng et al. 2025)."""
    return _clipped(logprobs, advantage, _ratio(mean_log_ratio(logprobs, level)), clip_low, clip_high, 0.0)


CORRECTIONS: dict[str, Correction] = {
    function.__name__: function
    for function in (none, ppo_clip, decoupled, tis, aipo, cispo, icepop, sequence_mask, geometric_mask, gspo)
}
LEVELS: tuple[Level, ...] = ("token", "turn", "sequence")


class Corrected(msgspec.Struct, frozen=True):
    """A correction with its options.

    level: where its ratio is taken. needs_proximal: whether the log-probabilities at the start of the update are wanted. follows:
    whether they must be taken anew before every optimizer step, for the tokens of a sequence that lie in other micro-batches.
    """

    function: Correction
    options: dict[str, Any]
    level: Level
    needs_proximal: bool
    follows: bool

    def __call__(self, logprobs: Logprobs, advantage: Tensor) -> Surrogate:
        return self.function(logprobs, advantage, **self.options)


def load(name: str, options: dict[str, Any]) -> Corrected:
    """The correction ``name``; raises ValueError naming the known corrections, options or levels."""
    known(f"learner.correction = {name!r}", name, CORRECTIONS)
    function = CORRECTIONS[name]
    options = checked(
        "learner.correction_options", f"correction {name!r}", function, options, ("logprobs", "advantage")
    )
    level = options.get("level", inspect.signature(function).parameters["level"].default)
    if name == "none":
        level = "token"  # no ratio is taken
    whole = level == "sequence"
    return Corrected(function, options, level, name == "decoupled" or whole, whole and name != "decoupled")


def k3(current: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of KL(current || reference) per token: exp(d) - d - 1, d = reference - current; clamped to [-10, 10]."""
    d = (reference - current).clamp(-20, 20)  # beyond the clamp of the result: only keeps exp, and its gradient, finite
    return (d.exp() - d - 1).clamp(-10, 10)
