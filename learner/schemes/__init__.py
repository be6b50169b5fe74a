"""Advantage schemes: one file each, knowing no model and no staleness.

``advantages(table, **options)`` returns float64 [tokens], or an ``Estimate`` when it also has targets for a critic. The optional
``needs(**options)`` names the token columns it reads ("value", "prm", "kl", "log_ratio"): that is what makes the learner hold a
critic, an implicit reward model or a reference. The optional ``metrics(table, **options)`` measures each batch.
A new scheme is a new file here and ``learner.scheme = "its name"``.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import msgspec

from learner.table import TurnTable
from learner.targets import Estimate
from wire.options import checked, known


class Scheme(msgspec.Struct, frozen=True):
    """A scheme with its options. needs: the token columns it reads. measure: what it measures of each batch."""

    name: str
    function: Callable[..., Any]
    options: dict[str, Any]
    needs: frozenset[str]
    measure: Callable[..., dict[str, float]] | None = None

    def __call__(self, table: TurnTable) -> Estimate:
        made = self.function(table, **self.options)
        return made if isinstance(made, Estimate) else Estimate(made)

    def metrics(self, table: TurnTable) -> dict[str, float]:
        """Its own metrics of a batch, by name."""
        return {} if self.measure is None else self.measure(table, **self.options)


def names() -> list[str]:
    """The known schemes."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str, options: dict[str, Any]) -> Scheme:
    """The scheme ``name``; raises ValueError naming the known schemes, or the options it takes and what each expects."""
    known(f"learner.scheme = {name!r}", name, names())
    module = importlib.import_module(f"{__name__}.{name}")
    options = checked("learner.scheme_options", f"scheme {name!r}", module.advantages, options, ("table",))
    needs = module.needs(**options) if hasattr(module, "needs") else ()
    return Scheme(name, module.advantages, options, frozenset(needs), getattr(module, "metrics", None))
