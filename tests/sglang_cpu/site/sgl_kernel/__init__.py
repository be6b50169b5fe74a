"""Placeholder of sglang's compiled kernels: its names resolve, and raise when they are called."""

from __future__ import annotations

from placeholders import Finder, Missing, install

install(Finder("sgl_kernel", below=True))


def __getattr__(name: str) -> Missing:
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    return Missing(f"sgl_kernel.{name}")
