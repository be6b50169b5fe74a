"""The built-in environments by name. One of your own is ``module:Class``."""

import importlib
import sys
from pathlib import Path
from typing import Any

from actors.environments.base import Environment
from wire.options import checked

KNOWN = {
    "search_qa": "actors.environments.search_qa:SearchQA",
    "tictactoe": "actors.environments.tictactoe:TicTacToe",
    "sudoku": "actors.environments.sudoku:Sudoku",
    "minesweeper": "actors.environments.minesweeper:Minesweeper",
}


def load(name: str, options: dict[str, Any]) -> Environment:
    """The environment ``name`` with its constructor's options. Raises ValueError or FileNotFoundError saying what was expected."""
    spec = KNOWN.get(name, name)
    module, colon, kind = spec.partition(":")
    if not colon:
        raise ValueError(f"data.environment = {name!r}: expected one of {sorted(KNOWN)}, or module:Class")
    if name not in KNOWN:
        sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(module), kind)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"data.environment = {name!r}: {error}") from None
    given = checked("data.options", name, made.__init__, options, ("self",))
    try:
        return made(**given)
    except ValueError as error:
        raise ValueError(f"data.options of {name}: {error}") from None


def makes_tasks(environment: Environment) -> bool:
    """Does it make its own tasks (``Generator``), or read task files?"""
    return hasattr(environment, "task")
