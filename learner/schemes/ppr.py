"""PPR: PPO with a critic on principle process rewards, which ReNorm makes comparable with the
outcome (methods.md 2.3, 2.4).

No column alone is the reward: a changed outcome would move the ReNorm of every turn out of [-1, 1].

r_hat in [0, 1] is the judge's score of a turn (all turns but the last are judged), and r_o is the
outcome at the last token. normalisation: "constant" (ReNorm) is r_hat + r_o - 1; "sample" (ReNorm)
is (r_hat - mu) + (r_o - pi) with means over the judged turns of the batch; "none" is r_hat;
"rescale" is r_hat / judged turns of the trajectory; "reduced" gives no step rewards, but r_o + sum
r_hat at the end. rho_max, c_max: V-trace's bounds.
"""

from typing import Literal

import numpy as np

from coppice.common.numbers import Ddof, NotNegative, Positive, Share
from coppice.learner.update.table import Trajectories, TurnTable, scored
from coppice.learner.update.targets import Advantages, Kind, estimate, estimated

Normalisation = Literal["constant", "sample", "none", "rescale", "reduced"]
Invalid = Literal["zero", "skip"]

trains = scored("outcome")
needs = estimated("process", "outcome")


def advantages(
    table: TurnTable, normalisation: Normalisation = "constant", invalid: Invalid = "zero",
    process: str = "process", outcome: str = "outcome", gamma: Share = 1.0, lam: Share = 1.0,
    whiten: bool = True, whiten_ddof: Ddof = 0, targets: Kind = "gae", kl_coef: NotNegative = 0.0,
    rho_max: Positive = 1.0, c_max: Positive = 1.0,
) -> Advantages:  # fmt: skip
    """Return advantages and value targets. Whitening and critic use only the policy's own tokens
    (in methods.md 2.4: all response tokens)."""
    rewards = table.at_last_token(turn_rewards(table, normalisation, invalid, process, outcome))
    return estimate(
        table, rewards, gamma, lam, whiten, targets, kl_coef, rho_max, c_max, whiten_ddof
    )


def turn_rewards(
    table: TurnTable, normalisation: Normalisation, invalid: Invalid, process: str, outcome: str
) -> np.ndarray:
    """Return the reward of each turn's last token [turns].

    invalid: how to treat a judged turn without a valid score. "zero" normalises r_hat = 0 (as the
    released code does); "skip" gives no reward and leaves the turn out of mu and pi. The rewards of
    a trajectory without an outcome are NaN.
    """
    r_hat, r_o, judged, trajectories = _judged(table, invalid, process, outcome)
    last = trajectories.last()
    if normalisation == "reduced":
        return np.where(last, r_o + trajectories.total(r_hat * judged)[trajectories.of], 0.0)
    normalised = _normalised(r_hat, r_o, judged, trajectories.of, normalisation)
    return np.where(judged, normalised, np.where(last, r_o, 0.0))


def _judged(
    table: TurnTable, invalid: Invalid, process: str, outcome: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Trajectories]:
    """Return r_hat, r_o and whether the turn gets a process reward, each [turns], and the
    trajectories."""
    trajectories = table.trajectories()
    last = trajectories.last()
    r_o = trajectories.total(np.where(last, table.column(outcome), 0.0))[trajectories.of]
    # the batch may lack judged turns
    r_hat = table.scores.get(process, np.full(len(table), np.nan))
    judged = ~last & (~np.isnan(r_hat) if invalid == "skip" else True)
    return np.nan_to_num(r_hat, posinf=np.inf, neginf=-np.inf), r_o, judged, trajectories


def metrics(
    table: TurnTable, normalisation: Normalisation, invalid: Invalid, process: str, outcome: str,
    **_: object,
) -> dict[str, float]:  # fmt: skip
    """Measure the length side effect (methods.md 5): the turns of correct and of wrong
    trajectories, and what a judged turn earns.

    With "constant" a turn earns r_hat if the answer is right and r_hat - 1 if it is wrong, which
    favours long successes and short failures. With "reduced" a turn earns the r_hat that it adds to
    the final reward.
    """
    r_hat, r_o, judged, trajectories = _judged(table, invalid, process, outcome)
    pay = _normalised(r_hat, r_o, judged, trajectories.of, normalisation)
    turns = np.bincount(trajectories.of).astype(float)[trajectories.of]
    results = {"ppr/process_reward": float(pay[judged].mean())} if judged.any() else {}
    for name, chosen in (("correct", r_o > 0), ("wrong", r_o <= 0)):
        last = chosen & trajectories.last()
        results |= {f"ppr/turns_{name}": float(turns[last].mean())} if last.any() else {}
        paid = chosen & judged
        results |= {f"ppr/turn_pay_{name}": float(pay[paid].mean())} if paid.any() else {}
    return results


def _normalised(
    r_hat: np.ndarray, r_o: np.ndarray, judged: np.ndarray, of: np.ndarray, kind: Normalisation
) -> np.ndarray:
    if kind == "constant":
        return r_hat + r_o - 1.0
    if kind == "sample" and judged.any():
        return r_hat + r_o - (r_hat[judged].mean() + r_o[judged].mean())
    if kind == "rescale":
        return r_hat / np.maximum(1, np.bincount(of, weights=judged))[of]
    return r_hat
