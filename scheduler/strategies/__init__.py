"""Rollout strategies: one file each, ``async def grow(tree, ctx)``, reading like the paper's pseudo-code.

A strategy starts from ``tree.tip()``, so a tree that was grown halfway before a crash goes on where it stood. EVALUATION, where a
module has it, is the strategy that held-out tasks are done with, one trajectory each; "chain" otherwise.
"""

import importlib
import pkgutil
from collections.abc import Awaitable, Callable
from typing import Any

from wire.options import known

Strategy = Callable[[Any, Any], Awaitable[None]]


def load(name: str) -> Strategy:
    """The strategy ``name``; raises ValueError naming the known ones."""
    return _module(name).grow


def evaluation(name: str) -> Strategy:
    """The strategy that does the held-out tasks of a run with strategy ``name``."""
    return load(getattr(_module(name), "EVALUATION", "chain"))


def _module(name: str) -> Any:
    known(f"scheduler.strategy = {name!r}", name, (module.name for module in pkgutil.iter_modules(__path__)))
    return importlib.import_module(f"{__name__}.{name}")
