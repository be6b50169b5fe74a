"""The built-in environments by name. The name of your own environment is ``module:Class``."""

import inspect
from typing import Any

import msgspec

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


_FORMS: dict[str, Any] = {
    "name": str, "stop": list[str], "measured": tuple[str, ...], "speakers": tuple[str, ...],
}  # fmt: skip


def load(name: str, options: dict[str, Any]) -> Environment:
    """Return the environment. Raises ValueError or FileNotFoundError with the expectation."""
    setting = f"data.environment = {name!r}"
    if ":" not in name:
        check_choice(setting, name, BUILT_IN, ", or module:Class")
    kind = imported(setting, BUILT_IN.get(name, name))
    arguments = checked("data.options", name, kind.__init__, options, ("self",))
    declared = inspect.signature(kind).parameters.values()
    plain = [p for p in declared if p.kind is p.POSITIONAL_OR_KEYWORD]
    if lacking := [p.name for p in plain if p.default is p.empty and p.name not in arguments]:
        raise ValueError(f"data.options of {name}: expected {lacking}, which have no default")
    try:
        made = kind(**arguments)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001
        cause = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"data.options of {name}: {cause}{error}") from None
    for attribute, form in _FORMS.items():
        value = getattr(made, attribute, None)
        try:
            msgspec.convert(value, form)
        except msgspec.ValidationError as error:
            raise ValueError(f"{setting}: its {attribute} = {value!r}: {error}") from None
    return made


def makes_tasks(environment: Environment) -> bool:
    """Return whether the environment makes its own tasks. Otherwise they come from task files."""
    return hasattr(environment, "task")
