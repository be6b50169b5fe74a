"""Log-probabilities of chosen targets, without ever holding the logits of the whole vocabulary for
all targets.

log p = logit[target] - logsumexp(logits) is computed over one block of the vocabulary after
another, which stays in the cache; a running peak and total (the online logsumexp) join the blocks.
The same pass computes the gradient of each log-probability with respect to its hidden state,
W[target] - softmax @ W, so a frozen head (LoRA) recomputes nothing in backward. A trained head
needs the probabilities once more, for softmax^T @ hidden, so some blocks are kept from the forward
(``KEPT_SHARE``, ``KEPT_BYTES``).

Scores are in units of log 2, because exp2 takes half the time of exp on the CPU. Everything but the
factors of products is float32. Where top-p or top-k cut the distribution that was sampled from, the
tokens that they did not leave get the score ``LOWEST``.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from coppice.common.hardware import wide_product
from coppice.common.support import Support

ROWS = 4096
"""The largest number of rows in one pass over the vocabulary."""
CPU_SCORES = 1 << 22
"""Logits held at a time: 16 MB in float32, which stay in a last-level cache."""
DEVICE_SCORES = 1 << 25
"""Logits held at a time on an accelerator: 128 MB, so that kernels are few and large."""
WIDEST = 1 << 14
"""The most tokens per block, which bounds the converted copy of the block's weights."""
KEPT_SHARE = 0.75
"""The largest share of a trained head's blocks that is kept for backward."""
KEPT_BYTES = 1 << 30
"""The largest number of bytes that is kept for backward."""
WIDE_ON = ("cpu",)
"""Devices on which factors are always float32, because a product is as wide as they are. Where the
CPU multiplies bfloat16 faster, products of the forward round them (``_Head.narrow``)."""
LOG2E = math.log2(math.e)
LOWEST = -1e30


def _multiplies_narrow() -> bool:
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class _Head:
    """The hidden states and the weight of one call, block by block. Factors have the dtype of
    ``hidden``, or float32 on ``WIDE_ON``. Products and sums over the vocabulary are float32."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor,
        temperature: float, support: Support | None,
    ):  # fmt: skip
        self.weight, self.input_dtype = weight, hidden.dtype
        self.dtype = torch.float32 if hidden.device.type in WIDE_ON else hidden.dtype
        self.wide = self.dtype == torch.float32
        self.rounds = self.wide and hidden.dtype == torch.bfloat16 and _multiplies_narrow()
        self.scale = LOG2E / temperature
        self.hidden = hidden.to(self.dtype)
        self.exact = self.wide and not self.rounds
        self.scaled = self.hidden * self.scale if self.exact else self.hidden
        scores = CPU_SCORES if hidden.device.type == "cpu" else DEVICE_SCORES
        rows = max(1, min(len(hidden), ROWS))
        self.width = max(1, min(scores // rows // 64 * 64 or 64, WIDEST, len(weight)))
        self.buffer = hidden.new_empty(rows * self.width, dtype=torch.float32)
        self.left = [] if support is None else [self._left(support, part) for part in self.parts()]

    def parts(self) -> Iterator[slice]:
        """Return slices of the rows."""
        return (slice(first, first + ROWS) for first in range(0, len(self.hidden), ROWS))

    def blocks(self) -> list[slice]:
        """Return slices of the vocabulary."""
        size = len(self.weight)
        return [slice(a, min(a + self.width, size)) for a in range(0, size, self.width)]

    def read(self, tokens: slice | torch.Tensor) -> torch.Tensor:
        """Return the weights of some tokens [tokens, width]."""
        return self.weight[tokens].to(self.input_dtype).to(self.dtype)

    def scores(self, part: slice, block: slice, weight: torch.Tensor) -> torch.Tensor:
        """Return logits / temperature in units of log 2, float32 [rows, tokens]. The next call
        overwrites them. weight: that of the block."""
        hidden = self.scaled[part]
        scores = self.buffer[: len(hidden) * len(weight)].view(len(hidden), len(weight))
        wide_product(hidden, weight.T, out=scores)
        if not self.exact:
            scores.mul_(self.scale)
        if self.left:
            cut, rows, tokens, bounds = self.left[part.start // ROWS]
            here = slice(*bounds[block.start // self.width :][:2])
            left = rows[here], tokens[here] - block.start
            remaining = scores[left]
            scores.index_fill_(0, cut, LOWEST)
            scores[left] = remaining
        return scores

    @contextlib.contextmanager
    def narrow(self) -> Iterator[None]:
        """Let products round their factors to bfloat16, if the CPU is faster then. The scores lose
        nothing, because hidden states and weights are of that type."""
        if not self.rounds:
            yield
            return
        settings: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
        before, settings.fp32_precision = settings.fp32_precision, "bf16"
        try:
            yield
        finally:
            settings.fp32_precision = before

    def _left(
        self, support: Support, part: slice
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
        """Return the cut rows of a part, then the rows and ids of the tokens that are left there,
        by id, and where those of each block begin."""
        counts = support.counts[part]
        first = int(support.counts[: part.start].sum())
        ids = support.ids[first : first + int(counts.sum())]
        rows = np.repeat(np.arange(len(counts)), counts)
        order = np.argsort(ids, kind="stable")
        starts = [*(block.start for block in self.blocks()), len(self.weight)]
        bounds = np.searchsorted(ids[order], starts).tolist()
        arrays = np.flatnonzero(counts), rows[order], ids[order]
        cut, rows, ids = (torch.as_tensor(array, device=self.hidden.device) for array in arrays)
        return cut, rows, ids, bounds

    def add(
        self, to: torch.Tensor, left: torch.Tensor, right: torch.Tensor,
        sign: int = 1, keep: int = 1,
    ) -> None:  # fmt: skip
        """Set to = keep * to + sign * left @ right in place. ``to`` is float32, and its old values
        are not read if ``keep`` is 0."""
        if self.wide:
            to.addmm_(left, right, beta=keep, alpha=sign)
        elif keep:
            to.add_(wide_product(left, right), alpha=sign)
        else:
            wide_product(left, right, out=to).mul_(sign)


class _Running:
    """Running sums of some rows during one pass over the blocks, each float32 [rows], ``pull``
    [rows, width]. With odds = 2^(score - peak), ``total`` sums the odds, ``mean`` odds * (score -
    peak), ``pull`` odds * weight. The last two are None if nothing reads them."""

    def __init__(self, hidden: torch.Tensor, pulled: bool, averaged: bool):
        self.peak = hidden.new_full((len(hidden),), LOWEST, dtype=torch.float32)
        self.total = torch.zeros_like(self.peak)
        self.mean = torch.zeros_like(self.peak) if averaged else None
        self.pull = torch.zeros_like(hidden, dtype=torch.float32) if pulled else None

    def meet(self, scores: torch.Tensor, odds: torch.Tensor) -> None:
        """Add the scores of a block, overwrite them, and write their odds to ``odds``."""
        peak = torch.maximum(self.peak, scores.amax(-1))
        gap = self.peak - peak
        decay = gap.exp2()
        torch.exp2(scores.sub_(peak[:, None]), out=odds)
        if self.mean is not None:
            self.mean.addcmul_(self.total, gap).mul_(decay).add_(scores.mul_(odds).sum(-1))
        self.total.mul_(decay).add_(odds.sum(-1))
        if self.pull is not None:
            self.pull.mul_(decay[:, None])
        self.peak = peak


class TokenLogprobs(torch.autograd.Function):
    """(hidden [rows, width], weight [vocabulary, width], targets [rows], temperature, tracked,
    support of the rows) -> logprobs and entropies without gradient, float32 [rows]. Without
    ``tracked`` the forward prepares no backward, and the entropies are nan."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor,
        temperature: float, tracked: bool, support: Support | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        to_hidden, to_weight = (tracked and needed for needed in ctx.needs_input_grad[:2])
        head = _Head(hidden, weight, temperature, support)
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        total, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        slope = torch.empty_like(hidden) if to_hidden else None
        kept: list[torch.Tensor] = []
        room = 0  # the number of blocks whose odds may be kept for backward
        if to_weight:
            blocks = len(head.blocks()) * len(list(head.parts()))
            size = max(1, len(head.buffer) * head.dtype.itemsize)
            room = min(int(blocks * KEPT_SHARE), KEPT_BYTES // size)
        for part in head.parts():
            running = _Running(head.hidden[part], to_hidden, tracked)
            with head.narrow():
                chosen = _pass(head, part, targets[part], running, kept, room)
            log_total = running.total.log2()
            total[part] = running.peak + log_total
            logprobs[part] = (chosen - total[part]) / LOG2E
            entropy[part] = math.nan
            if running.mean is not None:
                entropy[part] = (log_total - running.mean / running.total) / LOG2E
            if slope is not None and running.pull is not None:
                mean = running.pull.div_(running.total[:, None])
                slope[part] = (head.read(targets[part]) - mean) / temperature
        ctx.temperature, ctx.to_weight, ctx.support = temperature, to_weight, support
        again = (hidden, weight, targets, total, *kept) if to_weight else ()
        ctx.save_for_backward(slope, *again)
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
        to_weight = None
        if ctx.to_weight:
            to_weight = _weight_gradient(upstream, ctx.temperature, ctx.support, *rest)
        return to_hidden, to_weight, None, None, None, None


def _pass(
    head: _Head, part: slice, targets: torch.Tensor, running: _Running,
    kept: list[torch.Tensor], room: int,
) -> torch.Tensor:  # fmt: skip
    """Go over the vocabulary. Returns the scores of ``targets``, adds to ``running``, and appends
    odds and peaks to ``kept``."""
    chosen = torch.empty_like(running.peak)
    spare = torch.empty_like(head.buffer)
    blocks = head.blocks()
    ordered, order = targets.sort()
    starts = torch.tensor([b.start for b in blocks] + [len(head.weight)], device=targets.device)
    bounds = torch.searchsorted(ordered, starts).tolist()
    for index, block in enumerate(blocks):
        weight = head.read(block)
        keep = len(kept) < 2 * room
        scores = head.scores(part, block, weight)
        here = order[bounds[index] : bounds[index + 1]]
        chosen[here] = scores[here, targets[here] - block.start]
        odds = spare[: scores.numel()].view_as(scores)
        if keep and head.wide:
            odds = torch.empty_like(scores)
        running.meet(scores, odds)
        odds = odds.to(head.dtype)
        if running.pull is not None:
            head.add(running.pull, odds, weight)
        if keep:
            kept += [odds, running.peak]
    return chosen


def _weight_gradient(
    upstream: torch.Tensor, temperature: float, support: Support | None, hidden: torch.Tensor,
    weight: torch.Tensor, targets: torch.Tensor, total: torch.Tensor, *kept: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the sum over the rows of upstream * (one_hot(target) - softmax) * hidden [vocabulary,
    width]."""
    head = _Head(hidden, weight, temperature, support)
    if not len(hidden):
        return torch.zeros_like(weight)
    gradient = torch.empty_like(weight, dtype=torch.float32)
    factor = upstream / temperature
    remembered = iter(kept)
    for part in head.parts():
        for block in head.blocks():
            odds, peak = next(remembered, None), next(remembered, total[part])
            if odds is None:
                scores = head.scores(part, block, head.read(block))
                odds = scores.sub_(peak[:, None]).exp2_().to(head.dtype)
            pull = (factor[part] * (peak - total[part]).exp2())[:, None] * head.hidden[part]
            keep = int(part.start > 0)
            head.add(gradient[block], odds.T, pull.to(head.dtype), sign=-1, keep=keep)
    gradient.index_add_(0, targets, factor[:, None] * head.hidden)
    return gradient.to(weight.dtype)


def token_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor,
    temperature: float = 1.0, support: Support | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the log-probabilities [rows] of ``targets`` and the entropies [rows], which are nan
    under ``torch.no_grad``; see ``TokenLogprobs``.

    support: the tokens over which each row's distribution is taken (each row's target must be one
    of them), None for the whole vocabulary.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    tracked = torch.is_grad_enabled()
    result: Any = TokenLogprobs.apply(hidden, weight, targets, temperature, tracked, support)
    return result
