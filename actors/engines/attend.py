"""The attention of one step. The prefix of a request is read once for all branches.

A sample attends to its tail and to the prefix of its request, whose softmaxes are merged exactly by
their log-sum-exp. All prefixes of one shelf are one batched call, padded by a mask. A chunk of a
prompt attends to its prefix and itself at once.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from transformers import AttentionInterface

from coppice.actors.engines import kernels
from coppice.actors.engines.memory import InlineTails, Shelf, Stretch

ATTENTION = "coppice_branches"
PIECE = 128
"""Queries in a call over a prefix: of more, more products would be of keys that they do not see."""


class Chunk(msgspec.Struct):
    """``count`` tokens of a prompt after the ``prefix.length`` computed ones."""

    prefix: Stretch
    count: int


class _Padded:
    """Rows of a step as groups of equal size [groups, widest], filled up with copies of a row."""

    def __init__(self, groups: Sequence[Sequence[int]], device: torch.device):
        self.widest = max(len(group) for group in groups)
        self.groups = len(groups)
        placed: dict[int, int] = {}
        for start, group in enumerate(groups):
            placed |= {row: start * self.widest + i for i, row in enumerate(group)}
        self.rows = sorted(placed)
        self.first = self.rows[0] if self.rows else 0
        count = self.groups * self.widest
        self.plain = list(placed.items()) == [(self.first + i, i) for i in range(count)]
        if not self.plain:
            padded = [self.first] * count
            for row, place in placed.items():
                padded[place] = row
            self._into = torch.tensor(padded, device=device)
            self._back = torch.tensor([placed[row] for row in self.rows], device=device)

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [rows, heads, head_dim] to [groups, widest, heads, head_dim]."""
        count = self.groups * self.widest
        taken = rows[self.first : self.first + count] if self.plain else rows[self._into]
        return taken.view(self.groups, self.widest, *rows.shape[1:])

    def collect(self, padded: torch.Tensor) -> torch.Tensor:
        """Map [groups * widest, ...] to [rows, ...] in the order of the step."""
        return padded if self.plain else padded[self._back]


_Attended = tuple[torch.Tensor, torch.Tensor]
"""The outputs [rows, heads, head_dim] and log-sum-exps [rows, heads] of some rows of a step."""


class _Writes:
    """Where a step writes the keys and values of some of its rows: row and place on a shelf."""

    def __init__(self, shelf: Shelf, rows: Sequence[int], places: Sequence[int]):
        _, _, held, heads, capacity, width = shelf.kv.shape
        both = np.arange(2)[None, :, None] * held + np.array(rows)[:, None, None]
        at = (both * heads + np.arange(heads)) * capacity + np.array(places)[:, None, None]
        self._at = torch.from_numpy(at.ravel()).to(shelf.kv.device)
        self._layers = shelf.kv.view(len(shelf.kv), -1, width).unbind()

    def write(self, layer: int, new: torch.Tensor) -> None:
        """new: [rows, 2, kv_heads, head_dim]."""
        self._layers[layer].index_copy_(0, self._at, new.reshape(-1, new.shape[-1]))


class _Past:
    """Queries over the first tokens of a shelf's rows. reads: ascending rows, tokens, queries.
    alone: nothing else is merged with it."""

    def __init__(
        self, shelf: Shelf, reads: Sequence[tuple[int, int, Sequence[int]]], alone: bool = False
    ):
        self.alone = alone
        rows, lengths = [row for row, _, _ in reads], [length for _, length, _ in reads]
        self.padded = _Padded([queries for _, _, queries in reads], shelf.kv.device)
        self.heads = shelf.kv.shape[3]
        self.mask = _mask(lengths, max(lengths), shelf.kv, self.heads)
        first, last, self.rows = rows[0], rows[-1], None
        # The batch is over key heads, so the output has the order of the query heads.
        kv = shelf.kv[:, :, first : last + 1, :, : max(lengths)].flatten(2, 3)[:, :, :, None]
        self.keys, self.values = kv[:, 0].unbind(), kv[:, 1].unbind()
        if rows != list(range(first, last + 1)):
            at = (np.array(rows)[:, None] - first) * self.heads + np.arange(self.heads)
            self.rows = torch.from_numpy(at.ravel()).to(shelf.kv.device)

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> _Attended:
        keys, values = self.keys[layer], self.values[layer]
        if self.rows is not None:
            keys, values = keys[self.rows], values[self.rows]
        heads, width = query.shape[1:]
        queries, widest = self.padded.pad(query), self.padded.widest
        if widest > 1:
            queries = queries.unflatten(2, (self.heads, -1)).transpose(1, 2)
        # The queries of all branches and of all query heads of one key head take the place of query
        # positions.
        folded = queries.reshape(len(keys), 1, -1, width)
        out, lse = _attention(folded, keys, values, self.mask, scale, self.alone)
        if widest > 1:
            shape = -1, self.heads, widest, heads // self.heads
            out, lse = out.view(*shape, width).transpose(1, 2), lse.view(shape).transpose(1, 2)
        out, lse = out.reshape(-1, heads, width), lse.reshape(-1, heads)
        return self.padded.collect(out), self.padded.collect(lse)


class _Tails:
    """One new token of each tail, which attends to the tail and to a prefix in the same row."""

    def __init__(self, tails: Shelf, first: int):
        shelf, rows = tails, list(range(len(tails.held)))
        at = [tail.length for tail in tails.held]
        if isinstance(tails, InlineTails):
            prefixes: list[Stretch] = [tail.owner.owner.prefix for tail in tails.held]
            shelf, rows = prefixes[0].shelf, [prefix.row for prefix in prefixes]
            at = [prefix.length + length for prefix, length in zip(prefixes, at, strict=True)]
        self.own = slice(first, first + len(at))
        reads = sorted((row, at[i] + 1, [first + i]) for i, row in enumerate(rows))
        self.past = _Past(shelf, reads, alone=isinstance(tails, InlineTails))
        self.writes = _Writes(shelf, rows, at)

    def attend(
        self, layer: int, query: torch.Tensor, new: torch.Tensor, scale: float, final: bool
    ) -> _Attended:
        self.writes.write(layer, new[self.own])
        return self.past.attend(layer, query, scale)


class _Prompt:
    """A chunk of a prompt, which attends to its prefix and itself, ``PIECE`` tokens a call."""

    def __init__(self, chunk: Chunk, first: int):
        shelf, row, past = chunk.prefix.shelf, chunk.prefix.row, chunk.prefix.length
        self.own, end = slice(first, first + chunk.count), past + chunk.count
        self.writes = _Writes(shelf, [row] * chunk.count, range(past, end))
        self.keys, self.values = shelf.kv[:, :, row : row + 1].unbind(1)
        # Row i of a piece that begins at token p sees the keys 0 to p + i.
        later = torch.ones(PIECE, end + PIECE, dtype=torch.bool, device=shelf.kv.device)
        mask = shelf.kv.new_zeros(later.shape).masked_fill_(later.triu(end + 1), -torch.inf)
        self.counts = [min(PIECE, end - start) for start in range(past, end, PIECE)]
        starts = zip(self.counts, range(past, end, PIECE), strict=True)
        self.masks = [mask[None, None, :n, end - start : end + n] for n, start in starts]

    def attend(
        self, layer: int, query: torch.Tensor, new: torch.Tensor, scale: float, final: bool
    ) -> _Attended:
        self.writes.write(layer, new[self.own])
        queries = query[self.own].transpose(0, 1)[None]
        if final:
            pieces, masks = [queries[:, :, -1:]], [self.masks[-1][:, :, -1:]]
        else:
            pieces, masks = queries.split(self.counts, 2), self.masks
        outs = []
        for piece, mask in zip(pieces, masks, strict=True):
            end = mask.shape[-1]
            seen = self.keys[layer, :, :, :end], self.values[layer, :, :, :end]
            outs.append(_attention(piece, *seen, mask, scale, alone=True)[0].transpose(1, 2)[0])
        out = torch.cat(outs) if len(outs) > 1 else outs[0]
        return out, out[..., 0]  # nothing is merged with it


class AttentionPlan:
    """The attention of one step, built once and used by every layer. Its rows: one token per tail,
    shelf by shelf, then the chunks' tokens. final: the rows that are used behind the last layer,
    of a chunk the last one."""

    def __init__(self, tails: Sequence[Shelf], chunks: Sequence[Chunk]):
        self._own: list[_Tails | _Prompt] = []
        self._past: list[_Past] = []
        rows = 0
        branches: dict[Shelf, dict[int, list[int]]] = {}
        for shelf in tails:
            self._own.append(_Tails(shelf, rows))
            if isinstance(shelf, InlineTails):
                rows += len(shelf.held)
                continue
            for tail in shelf.held:
                prefix: Stretch = tail.owner.owner.prefix
                branches.setdefault(prefix.shelf, {}).setdefault(prefix.row, []).append(rows)
                rows += 1
        for shelf, queries in branches.items():
            reads = [(row, shelf.held[row].length, queries[row]) for row in sorted(queries)]
            self._past.append(_Past(shelf, reads))
        finals = list(range(rows))
        for chunk in chunks:
            self._own.append(_Prompt(chunk, rows))
            rows += chunk.count
            finals.append(rows - 1)
        self.final = finals if chunks else slice(None)
        covered = [row for past in self._past for row in past.padded.rows]
        self._covered = None
        if covered and covered != list(range(rows)):
            self._covered = torch.tensor(covered, device=self._past[0].keys[0].device)

    def attend(
        self, layer: int, query: torch.Tensor, new: torch.Tensor, scale: float, final: bool = False
    ) -> torch.Tensor:
        """Map query [rows, heads, head_dim] and ``new`` [rows, 2, kv_heads, head_dim] to outputs,
        or to those of the rows ``final`` alone."""
        out, lse = _joined([part.attend(layer, query, new, scale, final) for part in self._own])
        if not self._past:
            return out
        past, past_lse = _joined([part.attend(layer, query, scale) for part in self._past])
        if self._covered is None:
            return torch.lerp(out, past, torch.sigmoid(past_lse - lse).to(out.dtype)[..., None])
        share = torch.sigmoid(past_lse - lse[self._covered]).to(out.dtype)[..., None]
        return out.index_copy(0, self._covered, torch.lerp(out[self._covered], past, share))


def _joined(parts: list[_Attended]) -> _Attended:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _mask(
    lengths: Sequence[int], longest: int, like: torch.Tensor, heads: int
) -> torch.Tensor | None:
    """Return a mask [rows * heads, 1, 1, longest], -inf beyond each row's length; None if all are
    equal."""
    if min(lengths) == longest:
        return None
    ends = torch.tensor(np.repeat(lengths, heads), device=like.device)[:, None]
    beyond = torch.arange(longest, device=like.device)[None] >= ends
    return like.new_zeros(beyond.shape).masked_fill_(beyond, -torch.inf)[:, None, None]


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    scale: float, alone: bool = False,
) -> _Attended:  # fmt: skip
    """Return outputs [batch, heads, queries, head_dim] and float32 log-sum-exps, which need not be
    right if ``alone``."""
    if alone and kernels.suit(query):
        return kernels.attention(query, key, value, mask, scale)
    if (shared := query.shape[1] // key.shape[1]) > 1:
        # The query heads of one key head take the place of query positions.
        folded = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        mask = mask.repeat(1, 1, shared, 1) if mask is not None else None
        out, lse = _attention(folded, key, value, mask, scale)
        return out.reshape(query.shape), lse.reshape(query.shape[:-1])
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, attn_mask=mask, scale=scale
        )
    return by_products(query, key, value, mask, scale)


def by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    scale: float,
) -> _Attended:  # fmt: skip
    """Compute the same as ``_attention`` by plain matrix products, on any device."""
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores += mask
    lse = scores.logsumexp(-1)
    return torch.matmul((scores - lse[..., None]).exp().to(value.dtype), value), lse


_OTHERS = ("attention_mask", "s_aux", "softcap")


def attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, *, plan: AttentionPlan,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' attention function. Raises ValueError for what a plan does not compute."""
    more = {"attention_mask": attention_mask, **kwargs}
    if others := [name for name in _OTHERS if more.get(name) is not None]:
        raise ValueError(f"{', '.join(others)}: expected none")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    new = torch.stack((key[0], value[0])).permute(2, 0, 1, 3)
    return plan.attend(layer, query[0].transpose(0, 1), new, scale)[None], None


AttentionInterface.register(ATTENTION, attention)
