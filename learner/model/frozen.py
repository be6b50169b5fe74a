"""The frozen weights of a model with adapters, in the number type of their products and in memory
that a machine's ranks share."""

import os
from typing import Any

import torch

from coppice.learner.model.ranks import Ranks

_ALIGNMENT = 64
"""Each tensor begins at a multiple of this many bytes, as an allocator would place it."""


def hold(model: Any, compute: torch.dtype, ranks: Ranks) -> None:
    """Convert the frozen weights of linear layers to ``compute``, then move all frozen weights into
    memory that the ranks share.

    Autocast rounds a linear layer's weight at every forward and keeps the rounded copy for
    backward. Rounding the weight once gives the same products. Embeddings and norms stay in
    float32, as under autocast. Nothing may write to these weights afterwards. This is a collective
    of replicated ranks on a CPU.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for linear in (m for m in model.modules() if isinstance(m, torch.nn.Linear)):
        if not linear.weight.requires_grad and id(linear.weight) not in embeddings:
            linear.weight.data = linear.weight.data.to(compute)
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(ranks.count)
    if ranks.count > 1 and one_machine and hasattr(os, "memfd_create"):
        _share([weight for weight in model.parameters() if not weight.requires_grad], ranks)


def _share(weights: list[torch.nn.Parameter], ranks: Ranks) -> None:
    """Give rank 0's weights to all ranks, in a file in memory that exists until the last rank ends."""
    ends = [0]
    for weight in weights:
        ends.append(ends[-1] + -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT)
    first, file = ranks.rank == 0, -1
    if first:
        file = os.memfd_create("frozen-weights")
        os.ftruncate(file, ends[-1])
    where = ranks.broadcast(f"/proc/{os.getpid()}/fd/{file}".encode() if first else None)
    memory = torch.from_file(where.decode(), shared=True, size=ends[-1], dtype=torch.uint8)
    for weight, start in zip(weights, ends, strict=False):
        place = memory[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)
        if first:
            place.copy_(weight.data)
        weight.data = place
    ranks.barrier()  # the file is complete, and every rank has mapped it
    if first:
        os.close(file)
