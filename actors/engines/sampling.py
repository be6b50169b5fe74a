"""Sample one token for each row of logits, with its log-probability under the distribution that was
really sampled from.

Each token is drawn by inversion from one uniform number, which depends only on the sample's key and
the token's place. The tokens of a sample therefore depend only on its own seed.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch

from coppice.wire.messages import Sampling

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_BLOCK = 64
"""The number of tokens in a block; a draw chooses a block first, then a token in it."""


def key(seed: int, index: int) -> int:
    """Return the 64-bit key of sample ``index`` of a request with ``seed``."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(keys: Sequence[int], places: Sequence[int]) -> np.ndarray:
    """Return float64 [rows] in [0, 1): number ``places[i]`` of the stream ``keys[i]`` (SplitMix64,
    Steele et al. 2014)."""
    state = np.array(keys, np.uint64) + (np.array(places, np.uint64) + np.uint64(1)) * _STEP
    state = (state ^ (state >> np.uint64(30))) * _MIX[0]
    state = (state ^ (state >> np.uint64(27))) * _MIX[1]
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


def pick(
    logits: torch.Tensor, sampling: Sequence[Sampling], draws: Sequence[float] | np.ndarray
) -> tuple[list[int], list[float], dict[int, dict[int, float]], dict[int, np.ndarray]]:
    """Return the next tokens, their log-probabilities (float32), and by row, where asked for, the
    most probable tokens and the ids that top-p and top-k left. logits: [rows, vocabulary],
    overwritten."""
    scores = logits.float()
    heat = [s.temperature or 1.0 for s in sampling]
    if any(t != 1.0 for t in heat):
        scores /= torch.tensor(heat, device=scores.device)[:, None]
    restricted: dict[tuple[float, int], list[int]] = {}
    for row, s in enumerate(sampling):
        if s.cuts:
            restricted.setdefault((s.top_p, s.top_k), []).append(row)
    support: dict[int, np.ndarray] = {}
    for (top_p, top_k), rows in restricted.items():
        scores[rows] = left = restrict(torch.log_softmax(scores[rows], -1), top_p, top_k)
        pairs = zip(rows, left, strict=True)
        support |= {row: _support(one) for row, one in pairs if sampling[row].support}
    cold = [s.temperature == 0 for s in sampling]
    greedy = scores.argmax(-1, keepdim=True) if any(cold) else None
    # In place, because with a large vocabulary new memory costs more than the computation.
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    uniform = torch.as_tensor(draws, dtype=torch.float64, device=scores.device)[:, None]
    tokens, total = _drawn(weights, uniform)
    if greedy is not None:
        tokens = torch.where(torch.tensor(cold, device=scores.device)[:, None], greedy, tokens)
    top = {row: s.top_logprobs for row, s in enumerate(sampling) if s.top_logprobs}
    logprobs = _logprobs(weights.gather(1, tokens), total)
    return tokens[:, 0].tolist(), logprobs[:, 0].tolist(), _top(weights, total, top), support


def _support(logprobs: torch.Tensor) -> np.ndarray:
    """Return the ids of one row that have any probability, int32 ascending; none if all have."""
    ids = (logprobs > -torch.inf).nonzero()[:, 0].to(torch.int32).cpu().numpy()
    return ids if len(ids) < len(logprobs) else ids[:0]


def _logprobs(weights: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return the float32 log-probabilities of ``weights`` [rows, any] given ``total`` [rows, 1].
    Sampled and top tokens both use this."""
    return (weights.double() / total).log().float()


def _top(
    weights: torch.Tensor, total: torch.Tensor, counts: dict[int, int]
) -> dict[int, dict[int, float]]:
    """Return, by row, the ``counts[row]`` most probable tokens and their log-probabilities,
    descending, without tokens of zero weight."""
    if not counts:
        return {}
    rows = list(counts)
    most, ids = weights[rows].topk(min(max(counts.values()), weights.shape[1]))
    logprobs = _logprobs(most, total[rows])
    top: dict[int, dict[int, float]] = {}
    for row, tokens, values in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
        pairs = zip(tokens[: counts[row]], values, strict=False)
        top[row] = {token: value for token, value in pairs if value > -math.inf}
    return top


def _drawn(weights: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token [rows, 1] from each row of ``weights`` [rows, vocabulary] by inversion (block,
    then token). Also return the sums."""
    rows, vocabulary = weights.shape
    whole = vocabulary - vocabulary % _BLOCK
    parts = [weights[:, :whole].view(rows, -1, _BLOCK).sum(-1)]
    if whole < vocabulary:
        parts.append(weights[:, whole:].sum(-1, keepdim=True))
    ends = torch.cat(parts, 1).cumsum(-1, dtype=torch.float64)
    total = ends[:, -1:]
    drawn = draws * total
    block = torch.searchsorted(ends, drawn, right=True).clamp_max_(ends.shape[1] - 1)
    drawn -= torch.nn.functional.pad(ends, (1, 0)).gather(1, block)
    places = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, places.clamp_max(vocabulary - 1)).double()
    within = inside.masked_fill_(places >= vocabulary, 0.0).cumsum(-1)
    # Rounding must not move a draw beyond the last token of its block that has any weight.
    drawn = torch.minimum(drawn, within[:, -1:] * (1 - 2.0**-50))
    token = torch.searchsorted(within, drawn, right=True).clamp_max_(_BLOCK - 1)
    return places.gather(1, token).clamp_max_(vocabulary - 1), total


def restrict(logprobs: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Return renormalised log-probabilities [..., vocabulary] after top-k, then top-p (the smallest
    set whose mass reaches top_p)."""
    values, order = logprobs.sort(descending=True)
    keep = torch.ones_like(values, dtype=torch.bool)
    if top_k > 0:
        keep[..., top_k:] = False
    if top_p < 1.0:
        kept = torch.where(keep, values, -torch.inf).softmax(-1)
        keep &= (kept.cumsum(-1) - kept) < top_p
    values = torch.where(keep, values, -torch.inf)
    values = values - values.logsumexp(-1, keepdim=True)
    return torch.empty_like(values).scatter_(-1, order, values)
