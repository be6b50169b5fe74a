"""zentorch's kernels (AMD's library, MIT licence) for a CPU that computes in bfloat16 by AVX-512
and has no AMX, which torch's own use: attention takes half of the time, a norm a third."""

import functools
from importlib import metadata
from typing import Any

import torch


@functools.cache
def _zen() -> Any:
    """Return the operations of zentorch, None where they are not installed or not for this CPU or
    this torch. The library is loaded in 15 ms; the Python around it, for torch.compile, is not."""
    try:
        package = metadata.distribution("zentorch")
        same = package.version.split(".")[:2] == torch.__version__.split(".")[:2]
        amx = torch.cpu._is_amx_tile_supported()
        if not same or amx or not torch.cpu._is_avx512_bf16_supported():
            return None
        torch.ops.load_library(str(package.locate_file("zentorch/libzentorch.so")))
    except (metadata.PackageNotFoundError, OSError):  # or what the library needs is missing
        return None
    return torch.ops.zentorch


def suit(like: torch.Tensor) -> bool:
    """Say whether the kernels are there for a tensor's number type and device."""
    there = like.device.type == "cpu" and _zen() is not None
    return there and like.dtype in (torch.float32, torch.bfloat16)


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return outputs [batch, heads, queries, head_dim], and unwritten memory of the shape of their
    log-sum-exps. Heads of the query share those of key and value."""
    return _zen().zentorch_sdpa.default(query, key, value, 0.0, attn_mask=mask, scale=scale)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return the norm of rows [rows, width], which must be contiguous: it reads others wrongly."""
    return _zen().zentorch_rms_norm.default(rows, weight, epsilon)
