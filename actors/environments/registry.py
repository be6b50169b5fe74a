"""The built-in environments by name. The name of your own environment is ``module:Class``."""

from typing import Any

from actors.environments.base import Environment
from wire.options import checked, imported, known

KNOWN = {
    "search_qa": "actors.environments.search_qa:SearchQA",
    "tictactoe": "actors.environments.tictactoe:TicTacToe",
    "sudoku": "actors.environments.sudoku:Sudoku",
    "agent": "actors.environments.agents.environment:Agent",
    "gymnasium": "actors.environments.others.gymnasium_text:Gymnasium",
    "openenv": "actors.environments.others.openenv:OpenEnv",
    "openenv_server": "actors.environments.others.openenv:OpenEnvServer",
    "other_python": "actors.environments.others.other_python:OtherPython",
    "reasoning_gym": "actors.environments.others.reasoning:ReasoningGym",
    "textarena": "actors.environments.others.textarena_games:TextArena",
    "sotopia": "actors.environments.sotopia.environment:Sotopia",
    "minesweeper": "actors.environments.minesweeper:Minesweeper",
    "sokoban": "actors.environments.sokoban:Sokoban",
    "webshop": "actors.environments.webshop.environment:WebShop",
    "webshop_server": "actors.environments.webshop.server:WebShopServer",
}


def load(name: str, options: dict[str, Any]) -> Environment:
    """Return the environment ``name`` with these options. Raises ValueError or FileNotFoundError,
    which say what was expected."""
    setting = f"data.environment = {name!r}"
    if ":" not in name:
        known(setting, name, KNOWN, ", or module:Class")
    kind = imported(setting, KNOWN.get(name, name))
    arguments = checked("data.options", name, kind.__init__, options, ("self",))
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ValueError(f"data.options of {name}: {error}") from None


def makes_tasks(environment: Environment) -> bool:
    """Return whether the environment makes its own tasks (``Generator``). Otherwise tasks come from
    task files."""
    return hasattr(environment, "task")
