"""Keys and values of the running samples, one slot each, and the attention over them.

Slots 0..running-1 are in use (finished ones are filled from the end), so a decode step reads one contiguous view: nothing is
concatenated or gathered. Layout [layers, 2, slots, kv_heads, capacity, head_dim].
"""

from collections.abc import Sequence

import msgspec
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "coppice_slots"


class Slots:
    """Room for ``count`` samples; the length grows by doubling up to ``longest`` tokens."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, count: int, longest: int, dtype: torch.dtype, device: str
    ):
        self.count, self.longest = count, longest
        self._shape = (layers, 2, count, kv_heads)
        self.kv = torch.zeros(*self._shape, 0, head_dim, dtype=dtype, device=device)

    def reserve(self, tokens: int) -> None:
        """Make every slot at least ``tokens`` long."""
        capacity = self.kv.shape[4]
        if tokens <= capacity:
            return
        longer = min(self.longest, max(tokens, 2 * capacity, 128))
        grown = torch.zeros(*self._shape, longer, self.kv.shape[5], dtype=self.kv.dtype, device=self.kv.device)
        grown[:, :, :, :, :capacity] = self.kv
        self.kv = grown

    def write(self, slot: int, start: int, piece: torch.Tensor) -> int:
        """Copy a cached piece [layers, 2, kv_heads, tokens, head_dim] to ``slot`` from ``start``; returns its end."""
        end = start + piece.shape[3]
        self.kv[:, :, slot, :, start:end] = piece
        return end

    def read(self, slot: int, end: int) -> torch.Tensor:
        """The first ``end`` tokens of a slot (a view)."""
        return self.kv[:, :, slot, :, :end]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy-on-branch, and the filling of a freed slot."""
        self.kv[:, :, target, :, :tokens] = self.kv[:, :, source, :, :tokens]


class Prefill(msgspec.Struct):
    """``count`` prompt tokens that enter ``slot`` from position ``start``."""

    slot: int
    start: int
    count: int


class Plan:
    """One step: a token for each of the first ``len(decode)`` slots at the given positions, then whole prefills."""

    def __init__(self, slots: Slots, decode: Sequence[int], prefills: Sequence[Prefill]):
        self.slots, self.prefills = slots, prefills
        device = slots.kv.device
        self.rows = len(decode)
        self.positions = torch.tensor(decode, dtype=torch.long, device=device)
        self.index = torch.arange(self.rows, device=device)
        self.longest = max(decode, default=-1) + 1
        reach = torch.arange(self.longest, device=device)
        self.mask = (reach[None, :] <= self.positions[:, None])[:, None, None, :]
        self.causal = [_causal(p, device) for p in prefills]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim] -> [1, tokens, heads, head_dim]."""
        keys, values = self.slots.kv[layer, 0], self.slots.kv[layer, 1]
        heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[3]
        groups = heads // kv_heads
        out = query.new_empty(query.shape[2], heads, width)
        if self.rows:
            keys[self.index, :, self.positions] = key[0, :, : self.rows].transpose(0, 1)
            values[self.index, :, self.positions] = value[0, :, : self.rows].transpose(0, 1)
            # The query heads of one key head stand where the query positions would: one call serves all groups.
            q = query[0, :, : self.rows].transpose(0, 1).reshape(self.rows, kv_heads, groups, width)
            seen = (slice(self.rows), slice(None), slice(self.longest))
            mixed = scaled_dot_product_attention(q, keys[seen], values[seen], attn_mask=self.mask, scale=scale)
            out[: self.rows] = mixed.reshape(self.rows, heads, width)
        first = self.rows
        for prefill, causal in zip(self.prefills, self.causal, strict=True):
            new, end = slice(first, first + prefill.count), prefill.start + prefill.count
            keys[prefill.slot, :, prefill.start : end] = key[0, :, new]
            values[prefill.slot, :, prefill.start : end] = value[0, :, new]
            q = query[0, :, new].reshape(1, kv_heads, groups * prefill.count, width)
            past = (slice(prefill.slot, prefill.slot + 1), slice(None), slice(end))
            mixed = scaled_dot_product_attention(
                q, keys[past], values[past], attn_mask=causal.repeat(groups, 1), scale=scale
            )
            out[new] = mixed.reshape(heads, prefill.count, width).transpose(0, 1)
            first += prefill.count
        return out.unsqueeze(0)


def _causal(prefill: Prefill, device: torch.device) -> torch.Tensor:
    query = torch.arange(prefill.start, prefill.start + prefill.count, device=device)
    return torch.arange(prefill.start + prefill.count, device=device)[None, :] <= query[:, None]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    plan: Plan | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """The attention function registered with transformers; without a plan it is plain causal attention."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if plan is not None:
        return plan.attend(module.layer_idx, query, key, value, scale), None  # pyright: ignore[reportArgumentType]
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, attention)
