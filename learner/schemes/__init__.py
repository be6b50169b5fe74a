"""Advantage schemes: one file each, ``advantages(table, **options) -> float64 [tokens]``, knowing no model and no staleness.

``REQUIRES`` names the score columns a scheme reads. A new scheme is a new file here and ``learner.scheme = "its name"``.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np

Scheme = Callable[..., np.ndarray]


def load(name: str, options: dict[str, Any]) -> Scheme:
    """The scheme ``name``; raises ValueError naming the known schemes, or the options it takes."""
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if name not in known:
        raise ValueError(f"learner.scheme = {name!r}: expected one of {known}")
    scheme = importlib.import_module(f"{__name__}.{name}").advantages
    takes = [p for p in inspect.signature(scheme).parameters if p != "table"]
    unknown = set(options) - set(takes)
    if unknown:
        raise ValueError(f"learner.scheme_options: {sorted(unknown)} unknown to scheme {name!r}, which takes {takes}")
    return scheme
