"""The built-in environments by name. The name of your own environment is ``module:Class``."""

from typing import Any

from coppice.actors.environments.base import Environment
from coppice.common.options import check_choice, checked, imported

BUILT_IN = {
    "search_qa": "coppice.actors.environments.search_qa.environment:SearchQA",
    "tictactoe": "coppice.actors.environments.tictactoe.environment:TicTacToe",
    "sudoku": "coppice.actors.environments.sudoku.environment:Sudoku",
    "bfcl": "coppice.actors.environments.bfcl.environment:Bfcl",
    "agent": "coppice.actors.environments.agents.environment:AgentEnvironment",
    "gymnasium": "coppice.actors.environments.others.in_process:Gymnasium",
    "other_python": "coppice.actors.environments.others.other_python:OtherPython",
    "textarena": "coppice.actors.environments.others.in_process:TextArena",
    "sotopia": "coppice.actors.environments.sotopia.environment:Sotopia",
    "minesweeper": "coppice.actors.environments.minesweeper.environment:Minesweeper",
    "sokoban": "coppice.actors.environments.sokoban.environment:Sokoban",
    "webshop": "coppice.actors.environments.webshop.environment:WebShop",
}


def load(name: str, options: dict[str, Any]) -> Environment:
    """Return the environment. Raises ValueError or FileNotFoundError with the expectation."""
    setting = f"data.environment = {name!r}"
    if ":" not in name:
        check_choice(setting, name, BUILT_IN, ", or module:Class")
    kind = imported(setting, BUILT_IN.get(name, name))
    arguments = checked("data.options", name, kind.__init__, options, ("self",))
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ValueError(f"data.options of {name}: {error}") from None


def makes_tasks(environment: Environment) -> bool:
    """Return whether the environment makes its own tasks. Otherwise they come from task files."""
    return hasattr(environment, "task")
