"""The virtual environment of the CPU server: sglang without its dependencies, and the few packages
its imports need."""

from pathlib import Path

from coppice.research import venvs as environments


def python() -> Path:
    """The interpreter of the environment, made first if need be. COPPICE_SGLANG_VENV places it
    elsewhere."""
    return environments.python("sglang", "sglang_cpu")
