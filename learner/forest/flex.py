"""FlexAttention of a forest (CUDA): the rule of ancestors and its block mask, from the intervals
of the subtrees instead of all pairs of tokens."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from coppice.learner.forest.trees import Forest

BLOCK = 128
"""The queries and the keys of one block; lengths are multiples of it."""
NARROWEST = 16
"""The narrowest head that it takes on a GPU."""


@functools.cache
def compiled() -> Any:
    """Return flex_attention, compiled once for all lengths."""
    from torch.nn.attention.flex_attention import flex_attention

    # Beyond its limit of compilations, torch would silently run the unfused version, whose backward
    # is unreliable. With fullgraph, torch raises an error if the limit is exceeded nevertheless.
    # The limit is given here, because settings of torch._dynamo hold in one thread alone.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, recompile_limit=256)


def ancestor_rule(
    forest: Forest, window: int | None, device: torch.device | str
) -> Callable[..., torch.Tensor]:
    """Return FlexAttention's mask_mod, which says whether a query may see a key."""
    end, depth = (
        torch.as_tensor(np.asarray(a, np.int32), device=device) for a in (forest.end, forest.depth)
    )

    def ancestor(_batch: Any, _head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        allowed = (key <= query) & (query < end[key])
        return allowed if window is None else allowed & (depth[query] - depth[key] < window)

    return ancestor


def block_mask(forest: Forest, window: int | None, device: torch.device | str) -> Any:
    """Return the BlockMask of a forest whose size is a multiple of BLOCK, equal to torch's
    create_block_mask, which compares all pairs of tokens.

    Queries of a block see keys of an earlier block if one of their subtrees reaches the queries
    (and one of these is inside the window); a block is full if all subtrees cover all queries.
    """
    from torch.nn.attention.flex_attention import BlockMask

    end, depth = np.asarray(forest.end), np.asarray(forest.depth)
    count = len(end) // BLOCK
    some, full = np.eye(count, dtype=bool), np.zeros((count, count), bool)
    limit = len(end) if window is None else window
    shortest, lowest = end.reshape(count, BLOCK).min(1), depth.reshape(count, BLOCK).min(1)
    still = np.zeros(0, np.int64)
    for block in range(count):
        first, after = block * BLOCK, (block + 1) * BLOCK
        still = still[end[still] > first]  # the earlier keys whose subtrees reach this block
        near = np.minimum.accumulate(depth[first:after])
        reached = near[np.minimum(end[still], after) - first - 1] - depth[still] < limit
        some[block, still[reached] // BLOCK] = True
        deepest = depth[first:after].max()
        full[block, :block] = (shortest[:block] >= after) & (deepest - lowest[:block] < limit)
        still = np.concatenate([still, np.arange(first, after)])

    def listed(held: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        order = np.argsort(~held, axis=1, kind="stable")
        pair = (held.sum(1, dtype=np.int32), order.astype(np.int32))
        number, order = (torch.as_tensor(a, device=device)[None, None] for a in pair)
        return number, order

    rule, length = ancestor_rule(forest, window, device), (len(end), len(end))
    return BlockMask.from_kv_blocks(
        *listed(some & ~full), *listed(full), BLOCK, mask_mod=rule, seq_lengths=length
    )
