"""PPR (arXiv 2509.25598) appendix A.8: ReNorm, r = X + Y - 1, for a turn's score X in [0, 1] and
the outcome Y, 0 or 1.

The outcome is right with probability 0.35. The score is Beta(5, 2) after a right outcome and
Beta(3, 3) after a wrong one. Source: PPR A.8; methods.md 5.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy import stats

from coppice.research.theories import (
    BATCHES,
    BatchEstimate,
    ClaimRow,
    drawn,
    estimate,
    magnitude,
    show,
)

Array = NDArray[np.float64]
SUCCESS = 0.35
# parameters of the Beta score after a wrong and after a right outcome
SHAPES = ((3.0, 3.0), (5.0, 2.0))


class Moments(msgspec.Struct, frozen=True):
    """Exact moments of the score X, and of X with the outcome Y. class_gap: E[X|Y=1] - E[X|Y=0].
    renorm_variance: that of X + Y - 1 by the identity of A.8."""

    score_mean: float
    class_gap: float
    covariance: float
    renorm_variance: float


def exact_moments() -> Moments:
    """Return the exact moments of the distribution above."""
    (mean_0, mean_1), within = stats.beta.stats(*np.transpose(SHAPES))
    odds, gap = SUCCESS * (1 - SUCCESS), mean_1 - mean_0
    variance = (1 - SUCCESS) * within[0] + SUCCESS * within[1] + odds * gap**2
    covariance = odds * gap
    return Moments(mean_0 + SUCCESS * gap, gap, covariance, variance + odds + 2 * covariance)


def sample(turns: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Draw scores X and outcomes Y, [turns] each."""
    outcomes = (rng.random(turns) < SUCCESS).astype(np.float64)
    (a0, b0), (a1, b1) = SHAPES
    return np.where(outcomes == 1, rng.beta(a1, b1, turns), rng.beta(a0, b0, turns)), outcomes


def sign_violations(rewards: Array, outcomes: Array) -> int:
    """Count the turns outside [-1, 1], rewarded after a wrong outcome, or punished after a right
    outcome."""
    wrong_sign = ((outcomes == 0) & (rewards > 0)) | ((outcomes == 1) & (rewards < 0))
    return int((wrong_sign | (np.abs(rewards) > 1)).sum())


def estimates(rng: np.random.Generator, turns: int = 1_000_000) -> BatchEstimate:
    """Estimate the class gap of ReNorm rewards, their variance, E[(X-mu)(Y-pi)] with the true mu
    and pi, and the rewards' mean, [4]."""
    exact = exact_moments()

    def statistics(rng: np.random.Generator) -> list[float]:
        scores, outcomes = sample(turns // BATCHES, rng)
        rewards = scores + outcomes - 1
        gap = rewards[outcomes == 1].mean() - rewards[outcomes == 0].mean()
        product = ((scores - exact.score_mean) * (outcomes - SUCCESS)).mean()
        return [float(gap), float(rewards.var()), float(product), float(rewards.mean())]

    return estimate(statistics, rng)


def rows(seed: int = 0) -> list[ClaimRow]:
    """Return PPR's rows of methods.md 5."""
    rng = np.random.default_rng(seed)
    scores, outcomes = sample(200_000, rng)
    return [*_signs(scores, outcomes), *_moments(rng), _alignment(scores, outcomes), *_length()]


def _signs(scores: Array, outcomes: Array) -> list[ClaimRow]:
    broken = sign_violations(scores + outcomes - 1, outcomes)
    sample_centred = scores - scores.mean() + outcomes - outcomes.mean()
    share = sign_violations(sample_centred, outcomes) / len(scores)
    claim = "PPR A.8: turns outside [-1, 1] or of the wrong sign, of 200,000"
    centred = "PPR: the same as a share, with sample centring: sign rule broken"
    return [
        ClaimRow(claim, str(broken), "0", broken == 0),
        ClaimRow(centred, show(share), "> 0", share > 0),
    ]


def _moments(rng: np.random.Generator) -> list[ClaimRow]:
    exact, measured = exact_moments(), estimates(rng)
    mean = exact.score_mean + SUCCESS - 1
    return [
        drawn("PPR A.8: class gap E[r|Y=1] - E[r|Y=0]", measured.at(0), exact.class_gap + 1),
        drawn("PPR A.8: variance of X + Y - 1", measured.at(1), exact.renorm_variance),
        drawn("PPR A.8: E[(X-mu)(Y-pi)] = Cov(X, Y)", measured.at(2), exact.covariance),
        drawn("PPR A.8: mean of X + Y - 1", measured.at(3), mean),
    ]


def _alignment(scores: Array, outcomes: Array) -> ClaimRow:
    size = abs(float(((scores - scores.mean()) + (outcomes - outcomes.mean())).mean()))
    covariance = float(np.cov(scores, outcomes)[0, 1])
    claim = "PPR objective alignment: |E[(X-mu)+(Y-pi)]| / Cov(X, Y): not equal"
    measured, expected = f"{magnitude(size)} / {show(covariance)}", exact_moments().covariance
    return ClaimRow(claim, measured, f"0 / {show(expected)}", size < 1e-12 and covariance > 0.04)


def _length() -> list[ClaimRow]:
    results = []
    for outcome, score, expected in ((1.0, 1.0, (3.0, 5.0)), (0.0, 0.8, (-0.4, -0.8))):
        # at the first token (gamma = 1): ReNorm at each judged turn, the outcome at the end
        returns = [turns * (score + outcome - 1) + outcome for turns in (2, 4)]
        claim = f"PPR length: return of 2 / 4 judged turns, r_o={outcome:.0f}, r_hat={score}"
        agrees = bool(np.allclose(returns, expected))
        results.append(ClaimRow(claim, show(returns, 1), show(expected, 1), agrees))
    return results
