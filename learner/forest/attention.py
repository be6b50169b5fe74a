"""Attention of a forest: every token attends to its ancestors-or-self, with a sliding window only
to the near ones.

Three backends give equal results up to rounding. dense uses one additive mask and is the reference.
cascade (CPU) cuts the trie into causal blocks (queries: a subtree, keys: its trunk); each block is
one flash call, and log-sum-exp merges the blocks. flex (CUDA) is FlexAttention with a block mask
(flex.py); lengths are filled up to whole blocks. The model passes the layout to each layer, so that
recomputation under gradient checkpointing sees the tree of its own forward.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from coppice.learner.forest import flex
from coppice.learner.forest.trees import Forest, filled

Backend = Literal["auto", "dense", "cascade", "flex", "causal"]
"""How a forest is attended. "causal": the model's own attention, for a forest of one path."""
NAME = "coppice_tree"
"""The name under which models find this attention."""

FOREST = torch.zeros(1, 1, 1, 1)
"""A placeholder for the attention mask. Transformers accepts a mask of four dimensions as it is and
then builds no mask of its own."""

SMALL_SUBTREE = 128
"""A subtree of up to this many tokens is one masked flash call: separate calls for its branches
would cost more than the masked pairs."""
JOINED = 32
"""Subtrees that have up to this many tokens together share one call."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Block(msgspec.Struct, frozen=True):
    """Queries [start, end) and keys [start, keys_end). Attention is causal or, if ``masked``,
    follows the ancestors in small subtrees."""

    start: int
    keys_end: int
    end: int
    masked: bool


def blocks(forest: Forest, small: int) -> list[Block]:
    """Return the blocks of the cascade. Together they hold each (token, ancestor-or-self) pair
    exactly once."""
    end, cascade, k = forest.end, [], 0
    size = len(end)
    while k < size:
        if end[k] - k <= small:
            last = int(end[k])
            while last < size and end[last] - k <= min(small, JOINED):
                last = int(end[last])
            # causal attention is enough for one path without branches
            cascade.append(Block(k, last, last, bool((end[k:last] != last).any())))
        else:
            last = k + 1
            while last < end[k] and end[last] == end[k]:
                last += 1
            cascade.append(Block(k, last, int(end[k]), False))
        k = last
    return cascade


def on(device: torch.device | str, backend: Backend) -> Backend:
    """Return the backend that "auto" stands for on a device. Raises ValueError for one that does
    not train there."""
    kind = torch.device(device).type
    backend = backend if backend != "auto" else ("flex" if kind == "cuda" else "cascade")
    if kind != (only := {"cascade": "cpu", "flex": "cuda"}.get(backend, kind)):
        raise ValueError(
            f"learner.attention = {backend!r} trains on {only} alone: on {kind} use 'auto'"
        )
    return backend


class Layout:
    """A forest on a device, in the form that its backend reads. A mask is built at its first use
    and then serves all layers."""

    def __init__(self, forest: Forest, backend: Backend, device: torch.device | str):
        self.backend = on(device, backend)
        self.forest = filled(forest, flex.BLOCK) if self.backend == "flex" else forest
        self.device = device
        self.blocks = blocks(self.forest, SMALL_SUBTREE) if self.backend == "cascade" else []
        self.deepest = int(self.forest.depth.max()) + 1 if len(self.forest.depth) else 0
        self._masks: dict[Any, Any] = {}

    def dense_mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask [1, 1, nodes, nodes]. A sliding window compares depths, not
        indices."""
        key, size = ("dense", window, dtype), len(self.forest.end)
        return self._once(key, lambda: self._additive(0, size, window, dtype)[None, None])

    def block_masks(self, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """Return the additive mask [queries, keys] of each block of the cascade, None for causal
        blocks."""

        def mask(block: Block) -> torch.Tensor | None:
            return self._additive(block.start, block.end, None, dtype) if block.masked else None

        return self._once(("blocks", dtype), lambda: [mask(block) for block in self.blocks])

    def flex_mask(self, window: int | None) -> Any:
        """Return the BlockMask of FlexAttention."""
        key = ("flex", window)
        return self._once(key, lambda: flex.block_mask(self.forest, window, self.device))

    def _additive(
        self, start: int, end: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor:
        index = torch.arange(start, end, device=self.device)
        stop = torch.as_tensor(self.forest.end[start:end], device=self.device)
        allowed = (index[None, :] <= index[:, None]) & (index[:, None] < stop[None, :])
        if window is not None:
            depth = torch.as_tensor(self.forest.depth[start:end], device=self.device)
            allowed &= depth[:, None] - depth[None, :] < window
        zeros = torch.zeros(allowed.shape, dtype=dtype, device=self.device)
        return zeros.masked_fill_(~allowed, float("-inf"))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._masks:
            self._masks[key] = make()
        return self._masks[key]


class Cascade(torch.autograd.Function):
    """(query, key, value [1, heads, nodes, width], layout, scale) -> output of the same shape."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        layout: Layout, scale: float,
    ) -> torch.Tensor:  # fmt: skip
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        output = torch.zeros(query.shape, dtype=exact)
        total, reached = query.new_full(query.shape[:3], float("-inf"), dtype=output.dtype), 0
        for block, mask in zip(layout.blocks, layout.block_masks(query.dtype), strict=True):
            q, k = slice(block.start, block.end), slice(block.start, block.keys_end)
            part, weight = _flash(
                query[:, :, q], key[:, :, k], value[:, :, k], 0.0, mask is None,
                attn_mask=mask, scale=scale,
            )  # fmt: skip
            fresh, reached = block.start >= reached, max(reached, block.end)
            # none of these queries has met keys before, so there is nothing to merge with
            if fresh:
                output[:, :, q], total[:, :, q] = part, weight
                continue
            both = torch.logaddexp(total[:, :, q], weight)
            output[:, :, q].mul_((total[:, :, q] - both).exp_()[..., None])
            output[:, :, q].addcmul_(part.to(output.dtype), (weight - both).exp_()[..., None])
            total[:, :, q] = both
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total)
        ctx.layout, ctx.scale = layout, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, total = ctx.saved_tensors
        upstream = gradients[0].contiguous()
        sums = [torch.zeros(t.shape, dtype=total.dtype) for t in (query, key, value)]
        for block, mask in zip(ctx.layout.blocks, ctx.layout.block_masks(query.dtype), strict=True):
            q, k = slice(block.start, block.end), slice(block.start, block.keys_end)
            slopes = _flash_backward(
                upstream[:, :, q], query[:, :, q], key[:, :, k], value[:, :, k], output[:, :, q],
                total[:, :, q].contiguous(), 0.0, mask is None, attn_mask=mask, scale=ctx.scale,
            )  # fmt: skip
            for whole, part, place in zip(sums, slopes, (q, k, k), strict=True):
                whole[:, :, place] += part
        return *(whole.to(query.dtype) for whole in sums), None, None


def tree_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, layout: Layout | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Transformers calls this function in every layer: query [1, heads, nodes, width], key and
    value [1, key heads, nodes, width] -> output [1, nodes, heads, width]. Without a layout it
    computes transformers' own causal attention. Raises RuntimeError if a layer did not receive the
    layout of its forest, because such a model cannot train on trees."""
    if any(_.get(key) is not None for key in ("softcap", "s_aux")):
        raise RuntimeError(
            f"{type(module).__name__} changes its scores (softcap or sinks): it cannot train on"
            " trees"
        )
    if layout is None:
        if attention_mask is not None and attention_mask.shape == FOREST.shape:
            raise RuntimeError(
                f"{type(module).__name__} does not pass arguments on: it cannot train on trees"
            )
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling,
            sliding_window=sliding_window, **_,
        )  # fmt: skip
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    window = sliding_window
    if window is not None and window >= layout.deepest:  # every ancestor is inside it anyway
        window = None
    if layout.backend == "flex" and torch.is_autocast_enabled(query.device.type):
        query = query.to(torch.get_autocast_dtype(query.device.type))  # autocast passes it over
    key, value = key.to(query.dtype), value.to(query.dtype)
    if layout.backend == "flex" and min(query.shape[-1], value.shape[-1]) >= flex.NARROWEST:
        output = flex.compiled()(
            query, key, value, block_mask=layout.flex_mask(window), scale=scale, enable_gqa=True
        )
        return output.transpose(1, 2).contiguous(), None
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if layout.backend == "cascade" and window is None:
        # flash takes values of the keys' width alone (DeepSeek's are narrower)
        missing = key.shape[-1] - value.shape[-1]
        wide = torch.nn.functional.pad(value, (0, missing)) if missing else value
        output: Any = Cascade.apply(query, key, wide, layout, scale)[..., : value.shape[-1]]
    else:
        mask = layout.dense_mask(window, query.dtype)
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
