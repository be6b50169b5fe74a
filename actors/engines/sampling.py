"""Sampling one token for each row of logits, with the log-probability of the distribution really sampled from.

Draws are by inversion from one uniform number a token, so a sample's tokens depend on its own seed only.
"""

from collections.abc import Sequence

import torch

from wire.messages import Sampling


def pick(
    logits: torch.Tensor, sampling: Sequence[Sampling], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Next tokens and their log-probabilities. logits: float [rows, vocabulary]; one Sampling and one uniform a row."""
    scores = logits.float()
    hot = torch.tensor([s.temperature if s.temperature > 0 else 1.0 for s in sampling], device=scores.device)
    logprobs = torch.log_softmax(scores / hot[:, None], dim=-1)
    for row, s in enumerate(sampling):
        if s.temperature > 0 and (s.top_p < 1.0 or s.top_k > 0):
            logprobs[row] = restrict(logprobs[row], s.top_p, s.top_k)
    draws = torch.tensor(uniforms, dtype=torch.float64, device=scores.device)
    cumulative = logprobs.double().exp().cumsum(-1)
    # The total differs from 1 by rounding; scaling the draw keeps it inside.
    tokens = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True)[:, 0]
    greedy = torch.tensor([s.temperature == 0 for s in sampling], device=scores.device)
    tokens = torch.where(greedy, logprobs.argmax(-1), tokens.clamp_max(logprobs.shape[-1] - 1))
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), chosen.tolist()


def restrict(logprobs: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Renormalised log-probabilities [vocabulary] after top-k, then top-p (the smallest set whose mass reaches top_p)."""
    values, order = logprobs.sort(descending=True)
    keep = torch.ones_like(values, dtype=torch.bool)
    if top_k > 0:
        keep[top_k:] = False
    if top_p < 1.0:
        kept = torch.where(keep, values, -torch.inf).softmax(-1)
        keep &= (kept.cumsum(-1) - kept) < top_p
    values = torch.where(keep, values, -torch.inf)
    values = values - values.logsumexp(-1)
    return torch.empty_like(values).scatter_(0, order, values)
