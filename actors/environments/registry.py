"""The built-in environments by name. One of your own is ``module:Class``."""

from typing import Any

from actors.environments.base import Environment
from wire.options import checked, imported, known

KNOWN = {
    "search_qa": "actors.environments.search_qa:SearchQA",
    "tictactoe": "actors.environments.tictactoe:TicTacToe",
    "sudoku": "actors.environments.sudoku:Sudoku",
    "minesweeper": "actors.environments.minesweeper:Minesweeper",
}


def load(name: str, options: dict[str, Any]) -> Environment:
    """The environment ``name`` with its constructor's options. Raises ValueError or FileNotFoundError saying what was expected."""
    what = f"data.environment = {name!r}"
    if ":" not in name:
        known(what, name, KNOWN, ", or module:Class")
    made = imported(what, KNOWN.get(name, name))
    given = checked("data.options", name, made.__init__, options, ("self",))
    try:
        return made(**given)
    except ValueError as error:
        raise ValueError(f"data.options of {name}: {error}") from None


def makes_tasks(environment: Environment) -> bool:
    """Does it make its own tasks (``Generator``), or read task files?"""
    return hasattr(environment, "task")
