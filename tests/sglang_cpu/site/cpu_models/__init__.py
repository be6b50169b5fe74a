"""The only model classes a test server knows: sglang otherwise imports all of its some two hundred
models at start."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return make(*args, **options)

    return made


# The adapters' code asks for pinned memory, which only a GPU can give.
for name in ("tensor", "empty", "zeros"):
    setattr(torch, name, _unpinned(getattr(torch, name)))
torch.Tensor.pin_memory = lambda self, *args: self  # pyright: ignore
