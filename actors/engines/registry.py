"""The engines by name. A user's own engine is named "module:Class" (docs/extend.md). A built-in
engine is imported only where it runs."""

import inspect
from typing import Any

from coppice.actors.config import ActorProcess
from coppice.actors.engines.base import Engine
from coppice.common.options import check_choice, checked, imported

BUILT_IN = {
    "local": "coppice.actors.engines.local:LocalEngine",
    "sglang": "coppice.actors.engines.sglang:SGLangEngine",
}
_OWN = ("model", "config", "seed", "place", "deterministic")
"""Parameters of an engine's constructor that no option sets."""


def check(name: str, options: dict[str, Any]) -> None:
    """Raises ValueError for an unknown name and for options that the engine does not take."""
    if ":" in name:
        _imported(name, options)
        return
    entry = f"actors.engine = {name!r}"
    check_choice(entry, name, BUILT_IN, ", or module:Class")
    if options:
        raise ValueError(
            f"actors.engine_options {sorted(options)} have no effect with {entry}: remove them"
        )


def load(process: ActorProcess) -> Engine:
    """Return the engine of an actor process, not yet started. Raises ValueError for its options."""
    kind, options = _imported(process.actors.engine, process.actors.engine_options)
    values = (process.model, process.actors, process.seed, process.place, process.deterministic)
    own = dict(zip(_OWN, values, strict=True))
    takes = inspect.signature(kind).parameters
    return kind(**{key: value for key, value in own.items() if key in takes}, **options)


def _imported(name: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return an engine's class, and its options as the types that the constructor declares."""
    kind = imported(f"actors.engine = {name!r}", BUILT_IN.get(name, name))
    return kind, checked("actors.engine_options", name, kind.__init__, options, ("self", *_OWN))
