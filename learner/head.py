"""Log-probabilities of given targets without ever holding the logits of the vocabulary for all of them.

log p = logit[target] - logsumexp(logits), taken chunk by chunk. Where the head itself is frozen (LoRA), the gradient of each
log-probability with respect to its hidden state, W[target] - softmax @ W, is formed in the same pass, so backward recomputes nothing.
"""

from typing import Any

import torch

CHUNK = 256
"""Rows a chunk: 256 x 152k vocabulary in float32 is 156 MB."""


class TokenLogprobs(torch.autograd.Function):
    """(hidden [rows, width], weight [vocabulary, width], targets [rows], temperature) -> logprobs, entropy, each float32 [rows].

    The entropy carries no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.temperature = temperature
        ctx.frozen = not weight.requires_grad
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        slope = torch.empty_like(hidden) if ctx.frozen else None
        for first in range(0, len(targets), CHUNK):
            part = slice(first, first + CHUNK)
            scores = (hidden[part] @ weight.T).float() / temperature
            total = scores.logsumexp(-1)
            logprobs[part] = scores.gather(1, targets[part, None])[:, 0] - total
            odds = (scores - total[:, None]).exp_()
            entropy[part] = total - (odds * scores).sum(-1)
            if slope is not None:
                slope[part] = (weight[targets[part]] - odds.to(weight.dtype) @ weight) / temperature
        if slope is not None:
            ctx.save_for_backward(slope)
        else:
            ctx.save_for_backward(hidden, weight, targets)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        upstream = gradients[0]
        if ctx.frozen:
            (slope,) = ctx.saved_tensors
            return upstream[:, None].to(slope.dtype) * slope, None, None, None
        hidden, weight, targets = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight, dtype=torch.float32)
        for first in range(0, len(targets), CHUNK):
            part = slice(first, first + CHUNK)
            scores = (hidden[part] @ weight.T).float() / ctx.temperature
            pull = scores.softmax(-1).neg_()
            pull[torch.arange(len(pull)), targets[part]] += 1
            pull = (pull * (upstream[part] / ctx.temperature)[:, None]).to(hidden.dtype)
            to_hidden[part] = pull @ weight
            to_weight += (pull.T @ hidden[part]).float()
        return to_hidden, to_weight.to(weight.dtype), None, None


def token_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of ``targets`` and entropies; see ``TokenLogprobs``."""
    return TokenLogprobs.apply(hidden, weight.to(hidden.dtype), targets, temperature)  # pyright: ignore[reportReturnType]
