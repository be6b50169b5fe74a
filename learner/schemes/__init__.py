"""Advantage schemes: one file each, knowing no model and no staleness.

A scheme's file has ``advantages(table, **options)``, which returns float64 [tokens] (or an ``Estimate`` when it also has targets for a
critic), and ``needs(**options)``, which declares what the scheme reads as a ``SchemeNeeds``; it gets every option with its value. The
optional ``metrics(table, **options)`` measures each batch. ``learner.scheme`` names a file here, or a user's own "module:advantages".
"""

from collections.abc import Callable
from typing import Any

import msgspec

from learner.table import TurnTable
from learner.targets import Estimate
from wire.declared import SchemeNeeds
from wire.options import checked, declared, modules, plugin


class Scheme(msgspec.Struct, frozen=True):
    """A scheme with its options. measure: what it measures of each batch."""

    name: str
    function: Callable[..., Any]
    options: dict[str, Any]
    needs: SchemeNeeds
    measure: Callable[..., dict[str, float]] | None = None

    def __call__(self, table: TurnTable) -> Estimate:
        made = self.function(table, **self.options)
        return made if isinstance(made, Estimate) else Estimate(made)

    def metrics(self, table: TurnTable) -> dict[str, float]:
        """Its own metrics of a batch, by name."""
        return {} if self.measure is None else self.measure(table, **self.options)


def names() -> list[str]:
    """The built-in schemes."""
    return modules(__name__)


def load(name: str, options: dict[str, Any]) -> Scheme:
    """The scheme ``name``. Raises ValueError naming the known schemes, or the options it takes and what each expects."""
    what = f"learner.scheme = {name!r}"
    module, function = plugin(what, name, __name__, "advantages")
    options = checked("learner.scheme_options", f"scheme {name!r}", function, options, ("table",))
    needs = declared(what, module, "needs", SchemeNeeds, function, options)
    return Scheme(name, function, options, needs, getattr(module, "metrics", None))
