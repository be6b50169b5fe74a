"""From rewards and values per token to advantages and value targets: GAE, and V-trace and Retrace
for off-policy data.

All estimators run along one trajectory's sampled tokens, [tokens]. Tokens that the environment
inserts or that open an action are a transition, not a step (when gamma = lambda = 1, this equals
the papers' loop over all response tokens). The value after the last token is 0. log_ratio is log
proximal - log behaviour. V-trace and Retrace correct only the targets: rho_t belongs to the
correction in the loss.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec
import numpy as np

from coppice.common.declared import SchemeNeeds, reads
from coppice.common.statistics import whiten as whiten_tokens
from coppice.learner.update.table import TurnTable

Kind = Literal["gae", "vtrace", "retrace"]


class Advantages(msgspec.Struct, frozen=True):
    """The result of a scheme. advantages: float64 [tokens]. returns: float64 [tokens], the critic's
    targets, if the scheme has a critic. trained: bool [tokens], the sampled tokens that have weight
    in the objective; None for all of them."""

    advantages: np.ndarray
    returns: np.ndarray | None = None
    trained: np.ndarray | None = None


def gae(
    rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return A and A + V: A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} -
    V_t (Schulman et al. 2016)."""
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    advantages, running = np.zeros_like(deltas), 0.0
    for t in range(len(deltas) - 1, -1, -1):
        running = advantages[t] = deltas[t] + gamma * lam * running
    return advantages, advantages + values


def vtrace(
    rewards: np.ndarray, values: np.ndarray, log_ratio: np.ndarray, gamma: float, lam: float,
    rho_max: float = 1.0, c_max: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return the advantages r_t + gamma v_{t+1} - V_t and the targets v_t = V_t + rho_t delta_t +
    gamma lam c_t (v_{t+1} - V_{t+1}), where rho and c are the ratio cut at rho_max and c_max
    (Espeholt et al. 2018, eq. 1 and 4 without its rho_t)."""
    ratio = np.exp(np.minimum(log_ratio, 20.0))
    rho, c = np.minimum(ratio, rho_max), lam * np.minimum(ratio, c_max)
    after = np.append(values[1:], 0.0)
    targets, gap = np.zeros_like(values), 0.0
    for t in range(len(values) - 1, -1, -1):
        gap = rho[t] * (rewards[t] + gamma * after[t] - values[t]) + gamma * c[t] * gap
        targets[t] = values[t] + gap
    return rewards + gamma * np.append(targets[1:], 0.0) - values, targets


def retrace(
    rewards: np.ndarray, values: np.ndarray, log_ratio: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the advantages Q - V and the value targets V + min(1, ratio) (Q - V), where Q_t = r_t
    + gamma V_{t+1} + gamma c_{t+1} (Q_{t+1} - V_{t+1}) and c = lam min(1, ratio) (Munos et al.
    2016, with state values in place of the action values). Without a critic of actions these value
    targets equal V-trace's with rho_max = c_max = 1."""
    cut = np.exp(np.minimum(log_ratio, 0.0))
    advantages, ahead = np.zeros_like(values), 0.0
    for t in range(len(values) - 1, -1, -1):
        next_value = values[t + 1] if t + 1 < len(values) else 0.0
        advantages[t] = rewards[t] + gamma * (next_value + ahead) - values[t]
        ahead = lam * cut[t] * advantages[t]
    return advantages, values + cut * advantages


def estimated(*columns: str) -> Callable[..., SchemeNeeds]:
    """Return the ``needs`` of a scheme of ``estimate``, as ``reads`` does. These raise ValueError
    if V-trace's bounds are set without V-trace, or c_max > rho_max."""

    def needs(
        targets: Kind, kl_coef: float, rho_max: float, c_max: float, **options: Any
    ) -> SchemeNeeds:
        bounds = f"learner.scheme_options.rho_max = {rho_max}, c_max = {c_max}"
        if targets != "vtrace" and (rho_max, c_max) != (1.0, 1.0):
            raise ValueError(f"{bounds} have no effect with targets = {targets!r}: set 'vtrace'")
        if c_max > rho_max:
            wish = "expected c_max of at most rho_max (Espeholt et al. 2018, 4.1)"
            raise ValueError(f"{bounds}: {wish}")
        read = {"value": True, "kl": kl_coef > 0, "log_ratio": targets != "gae"}
        models = frozenset(column for column, is_read in read.items() if is_read)
        return reads(*columns, group="batch", models=models, aggregation="token")(**options)

    return needs


def steps(table: TurnTable, rewards: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the indices of each trajectory's sampled tokens and their rewards. A reward on a token
    that was not sampled belongs to the sampled token before it. rewards: float64 [tokens]."""
    mask = table.mask()
    for span in table.token_spans():
        place = np.cumsum(mask[span]) - 1
        begun = place >= 0
        if begun.any():
            yield span[mask[span]], np.bincount(place[begun], rewards[span][begun])


def estimate(
    table: TurnTable, rewards: np.ndarray, gamma: float, lam: float, whiten: bool, targets: Kind,
    kl_coef: float = 0.0, rho_max: float = 1.0, c_max: float = 1.0, whiten_ddof: int = 0,
) -> Advantages:  # fmt: skip
    """Return the advantages, whitened over the sampled tokens of the batch if ``whiten``, and value
    targets of every trajectory. rewards: float64 [tokens]. kl_coef: weight of the k1 KL to the
    reference policy, which is subtracted from each sampled token's reward."""
    if kl_coef:
        rewards = rewards - kl_coef * table.token_column("kl") * table.mask()
    values = table.token_column("value")
    advantages, returns = np.zeros_like(rewards), np.zeros_like(rewards)
    for span, earned in steps(table, rewards):
        own = earned, values[span]
        if targets == "gae":
            result = gae(*own, gamma, lam)
        else:
            log_ratio = table.token_column("log_ratio")[span]
            if targets == "vtrace":
                result = vtrace(*own, log_ratio, gamma, lam, rho_max, c_max)
            else:
                result = retrace(*own, log_ratio, gamma, lam)
        advantages[span], returns[span] = result
    if whiten:
        advantages = whiten_tokens(advantages, table.mask(), whiten_ddof)
    return Advantages(advantages, returns)
