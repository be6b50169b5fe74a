"""Log-probabilities of given targets without ever holding the logits of the vocabulary for all of them.

log p = logit[target] - logsumexp(logits), taken over one block of the vocabulary after another: the logits of a block
stay in the cache, and a running peak and total (the online logsumexp) join the blocks. The gradient of each
log-probability with respect to its hidden state, W[target] - softmax @ W, is formed in the same pass, so a frozen head
(LoRA) recomputes nothing in backward. A trained head needs the probabilities once more, for softmax^T @ hidden;
recomputing them is a fourth matrix product where the full logits take three, so some blocks are kept from the forward
(``KEPT_SHARE``, ``KEPT_BYTES``).

Scores are in units of log 2, because exp2 takes half the time of exp on the CPU; everything but the products is
float32.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

ROWS = 4096
"""Rows taken together, at most."""
CPU_SCORES = 1 << 22
"""Logits held at a time, 16 MB in float32: they stay in a last-level cache. Smaller blocks gain nothing where the cores
are free and lose where they are shared, for at every operation each core waits for the other."""
DEVICE_SCORES = 1 << 25
"""The same on an accelerator: 128 MB, for few and large kernels."""
WIDEST = 1 << 14
"""Tokens a block, at most: bounds the converted copy of its weights."""
KEPT_SHARE = 0.75
"""The share of the blocks of a trained head that is kept for backward, at most."""
KEPT_BYTES = 1 << 30
"""And how many bytes, whatever the rows."""
WIDE_ON = ("cpu",)
"""Devices whose products are float32 whatever the inputs are: narrower ones are slower there."""
LOG2E = math.log2(math.e)
LOWEST = -1e30


class _Head:
    """One call's hidden states and weight in the dtype of the products, block by block.

    The products are in the dtype of ``hidden``, or float32 (``WIDE_ON``); sums over the vocabulary are float32.
    """

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, temperature: float):
        self.weight, self.given = weight, hidden.dtype
        self.dtype = torch.float32 if hidden.device.type in WIDE_ON else hidden.dtype
        self.wide = self.dtype == torch.float32
        self.scale = LOG2E / temperature
        self.hidden = hidden.to(self.dtype)
        self.scaled = self.hidden * self.scale if self.wide else self.hidden
        scores = CPU_SCORES if hidden.device.type == "cpu" else DEVICE_SCORES
        rows = max(1, min(len(hidden), ROWS))
        self.width = max(1, min(scores // rows // 64 * 64 or 64, WIDEST, len(weight)))
        self.buffer = hidden.new_empty(rows * self.width, dtype=torch.float32)

    def parts(self) -> Iterator[slice]:
        """Slices of the rows."""
        return (slice(first, first + ROWS) for first in range(0, len(self.hidden), ROWS))

    def blocks(self) -> list[slice]:
        """Slices of the vocabulary."""
        return [slice(a, min(a + self.width, len(self.weight))) for a in range(0, len(self.weight), self.width)]

    def read(self, tokens: slice | torch.Tensor) -> torch.Tensor:
        """Weights of some tokens, [tokens, width]."""
        return self.weight[tokens].to(self.given).to(self.dtype)

    def scores(self, part: slice, block: torch.Tensor) -> torch.Tensor:
        """Logits in units of log 2 over the temperature, float32 [rows, tokens], valid until the next call."""
        hidden = self.scaled[part]
        made = self.buffer[: len(hidden) * len(block)].view(len(hidden), len(block))
        if self.wide:
            return torch.mm(hidden, block.T, out=made)
        return made.copy_(hidden @ block.T).mul_(self.scale)

    def add(self, to: torch.Tensor, left: torch.Tensor, right: torch.Tensor, sign: int = 1, keep: int = 1) -> None:
        """to = keep to + sign left @ right, in place; ``to`` is float32, and unread where ``keep`` is 0."""
        if self.wide:
            to.addmm_(left, right, beta=keep, alpha=sign)
        elif keep:
            to.add_(left @ right, alpha=sign)
        else:
            torch.mul(left @ right, sign, out=to)


class _Running:
    """What one pass over the blocks has found of some rows: each field float32 [rows], ``pull`` [rows, width].

    ``total`` is the sum of the odds 2^(score - peak), ``mean`` that of odds (score - peak), ``pull`` of odds weight.
    """

    def __init__(self, hidden: torch.Tensor, pulled: bool):
        self.peak = hidden.new_full((len(hidden),), LOWEST, dtype=torch.float32)
        self.total = torch.zeros_like(self.peak)
        self.mean = torch.zeros_like(self.peak)
        self.pull = torch.zeros_like(hidden, dtype=torch.float32) if pulled else None

    def meet(self, scores: torch.Tensor, odds: torch.Tensor) -> None:
        """Take in the scores of a block, which are lost, and write their odds."""
        peak = torch.maximum(self.peak, scores.amax(-1))
        gap = self.peak - peak
        decay = gap.exp2()
        torch.exp2(scores.sub_(peak[:, None]), out=odds)
        self.mean.addcmul_(self.total, gap).mul_(decay).add_(scores.mul_(odds).sum(-1))
        self.total.mul_(decay).add_(odds.sum(-1))
        if self.pull is not None:
            self.pull.mul_(decay[:, None])
        self.peak = peak


class TokenLogprobs(torch.autograd.Function):
    """(hidden [rows, width], weight [vocabulary, width], targets [rows], temperature, tracked) -> logprobs, entropy.

    Both are float32 [rows]; the entropy carries no gradient. Without ``tracked`` nothing is prepared for a backward.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, tracked: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        to_hidden, to_weight = (tracked and needed for needed in ctx.needs_input_grad[:2])
        head = _Head(hidden, weight, temperature)
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        total, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        slope = torch.empty_like(hidden) if to_hidden else None
        kept: list[torch.Tensor] = []
        room = _room(head) if to_weight else 0
        for part in head.parts():
            found, chosen = _pass(head, part, targets[part], to_hidden, kept, room)
            total[part] = found.peak + found.total.log2()
            logprobs[part] = (chosen - total[part]) / LOG2E
            entropy[part] = (found.total.log2() - found.mean / found.total) / LOG2E
            if slope is not None and found.pull is not None:
                slope[part] = (head.read(targets[part]) - found.pull.div_(found.total[:, None])) / temperature
        ctx.temperature, ctx.to_weight, ctx.given = temperature, to_weight, hidden.dtype
        ctx.save_for_backward(slope, *((hidden, weight, targets, total, *kept) if to_weight else ()))
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        slope, *rest = ctx.saved_tensors
        upstream = gradients[0]
        to_hidden = None if slope is None else (upstream[:, None] * slope).to(slope.dtype)
        to_weight = _weight_gradient(upstream, ctx.temperature, *rest) if ctx.to_weight else None
        return to_hidden, to_weight, None, None, None


def _room(head: _Head) -> int:
    """Blocks, over all parts, whose odds may be kept for backward."""
    blocks = len(head.blocks()) * len(list(head.parts()))
    size = max(1, len(head.buffer) * head.dtype.itemsize)
    return min(int(blocks * KEPT_SHARE), KEPT_BYTES // size)


def _pass(
    head: _Head, part: slice, targets: torch.Tensor, pulled: bool, kept: list[torch.Tensor], room: int
) -> tuple[_Running, torch.Tensor]:
    """Go over the vocabulary: what was found, and the scores of ``targets``. Fills ``kept`` with odds and peaks."""
    found = _Running(head.hidden[part], pulled)
    chosen = torch.empty_like(found.peak)
    spare = torch.empty_like(head.buffer)
    blocks = head.blocks()
    ordered, order = targets.sort()
    starts = torch.tensor([b.start for b in blocks] + [len(head.weight)], device=targets.device)
    bounds = torch.searchsorted(ordered, starts).tolist()
    for index, block in enumerate(blocks):
        weight = head.read(block)
        keep = len(kept) < 2 * room
        scores = head.scores(part, weight)
        here = order[bounds[index] : bounds[index + 1]]
        chosen[here] = scores[here, targets[here] - block.start]
        odds = torch.empty_like(scores) if keep and head.wide else spare[: scores.numel()].view_as(scores)
        found.meet(scores, odds)
        odds = odds.to(head.dtype)
        if found.pull is not None:
            head.add(found.pull, odds, weight)
        if keep:
            kept += [odds, found.peak]
    return found, chosen


def _weight_gradient(
    upstream: torch.Tensor,
    temperature: float,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    total: torch.Tensor,
    *kept: torch.Tensor,
) -> torch.Tensor:
    """Sum over the rows of upstream (one_hot(target) - softmax) hidden, [vocabulary, width]."""
    head = _Head(hidden, weight, temperature)
    if not len(hidden):
        return torch.zeros_like(weight)
    made = torch.empty_like(weight, dtype=torch.float32)
    factor = upstream / temperature
    remembered = iter(kept)
    for part in head.parts():
        for block in head.blocks():
            odds, peak = next(remembered, None), next(remembered, total[part])
            if odds is None:
                odds = head.scores(part, head.read(block)).sub_(peak[:, None]).exp2_().to(head.dtype)
            pull = (factor[part] * (peak - total[part]).exp2())[:, None] * head.hidden[part]
            head.add(made[block], odds.T, pull.to(head.dtype), sign=-1, keep=int(part.start > 0))
    made.index_add_(0, targets, factor[:, None] * head.hidden)
    return made.to(weight.dtype)


def token_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [rows] of ``targets`` and entropies [rows]; see ``TokenLogprobs``."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    tracked = torch.is_grad_enabled()
    return TokenLogprobs.apply(hidden, weight, targets, temperature, tracked)  # pyright: ignore[reportReturnType]
