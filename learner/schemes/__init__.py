"""Advantage schemes, one per file. A scheme knows nothing of models and staleness.

A scheme's file has ``advantages(table, **options)``, which returns float64 [tokens], or
``Advantages`` if the scheme also computes targets for a critic. Its other functions get the value
of every option: ``needs(**options)`` declares what the scheme reads; the optional ``trains(table,
**options)`` says which turns train (as ``scored`` of learner/update/table.py; ``advantages`` sees
only these), and the optional ``metrics(table, **options)`` measures each batch.
``learner.scheme`` names a file in this folder or a user's own "module:advantages".
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from coppice.common.declared import SchemeNeeds
from coppice.common.options import check_takes, checked, declared, plugin, with_defaults
from coppice.learner.update.table import TurnTable
from coppice.learner.update.targets import Advantages


class Scheme(msgspec.Struct, frozen=True):
    """A scheme with the value of every option. rule, measure: the module's ``trains`` and
    ``metrics``, if it has them."""

    name: str
    function: Callable[..., Any]
    options: dict[str, Any]
    needs: SchemeNeeds
    rule: Callable[..., np.ndarray] | None = None
    measure: Callable[..., dict[str, float]] | None = None

    def __call__(self, table: TurnTable) -> Advantages:
        """Return the estimate of a table that holds only turns which train."""
        estimate = self.function(table, **self.options)
        return estimate if isinstance(estimate, Advantages) else Advantages(estimate)

    def trains(self, table: TurnTable) -> np.ndarray:
        """Return, as bool [turns], which turns the scheme trains on. The update leaves the others
        out."""
        return np.ones(len(table), bool) if self.rule is None else self.rule(table, **self.options)

    def metrics(self, table: TurnTable) -> dict[str, float]:
        """Return the scheme's own metrics of a batch, by name. Of a scheme that leaves no
        trajectory out, also how many lack a score."""
        own = {} if self.measure is None else self.measure(table, **self.options)
        if self.rule is not None:
            return own
        columns = [table.scores[name] for name in self.needs.columns & table.scores.keys()]
        lacking = [np.isnan(table.trajectories().total(column)) for column in columns]
        return own | {"learner/incomplete_trajectories": float(np.any(lacking, axis=0).sum())}


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as floats, without those that are not finite, such as the mean of nothing.
    Raises ValueError for what is no number."""
    kept = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"the metric {name!r} is {value!r}: expected a number") from None
        if math.isfinite(number):
            kept[name] = number
    return kept


def load(name: str, options: dict[str, Any]) -> Scheme:
    """Return the scheme ``name``. Raises ValueError that names the known schemes, or the options of
    this scheme and setting each expects."""
    setting = f"learner.scheme = {name!r}"
    module, function = plugin(setting, name, __name__, "advantages")
    options = checked("learner.scheme_options", f"scheme {name!r}", function, options, ("table",))
    options = with_defaults(function, options)
    needs = declared(setting, module, "needs", SchemeNeeds, options)
    for part in ("trains", "metrics"):
        check_takes(setting, module, part, None, **options)
    rule, measure = getattr(module, "trains", None), getattr(module, "metrics", None)
    return Scheme(name, function, options, needs, rule, measure)
