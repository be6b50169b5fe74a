"""The engines by name. A user's own engine is named "module:Class" (docs/extend.md). An engine's module is imported only where it runs."""

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from actors.config import ActorProcess
from actors.engines.base import Engine
from wire.options import checked, imported, known

KNOWN = {"local": "actors.engines.local:LocalEngine", "sglang": "actors.engines.sglang:SGLangEngine"}


def check(name: str, options: dict[str, Any]) -> None:
    """Raises ValueError for a name that no engine has. The engine is not imported."""
    entry = f"actors.engine = {name!r}"
    if ":" not in name:
        known(entry, name, KNOWN, ", or module:Class")
        if options:
            raise ValueError(f"actors.engine_options {sorted(options)} have no effect with {entry}: remove them")
        return
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    module = name.partition(":")[0]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise ValueError(f"{entry}: there is no module {module!r} importable from {Path.cwd()}; expected module:Class")


def load(process: ActorProcess) -> Engine:
    """Return the engine of an actor process, which is not started yet. Raises ValueError for options that the engine does not take."""
    name = process.actors.engine
    kind = imported(f"actors.engine = {name!r}", KNOWN.get(name, name))
    own = {"model": process.model, "config": process.actors, "seed": process.seed, "place": process.place}
    options = checked("actors.engine_options", name, kind.__init__, process.actors.engine_options, ("self", *own))
    takes = inspect.signature(kind).parameters
    return kind(**{key: value for key, value in own.items() if key in takes}, **options)
