"""Options of plug-ins (schemes, corrections, environments, judges): keyword arguments from the config, checked before anything is paid for."""

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec


def checked(section: str, what: str, function: Callable[..., Any], options: dict[str, Any], given: tuple[str, ...]) -> dict[str, Any]:  # fmt: skip
    """``options`` as ``function`` takes them beside the arguments ``given``. Raises ValueError naming key, value and what is expected."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()  # of a class without __init__: *args, **kwargs
    takes = [p.name for p in parameters if p.name not in given and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = set(options) - set(takes)
    if unknown:
        raise ValueError(f"{section}: {sorted(unknown)} unknown to {what}, which takes {takes or 'no options'}")
    made = {}
    for name, value in options.items():
        try:
            made[name] = msgspec.convert(value, hints.get(name, Any))
        except msgspec.ValidationError as error:
            shown = str(error) if _is_struct(hints[name]) else f"expected {_shown(hints[name])}"
            raise ValueError(f"{section}.{name} = {value!r}: {shown}") from None
    return made


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _shown(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    if isinstance(hint, types.UnionType):
        return " or ".join(_shown(part) for part in typing.get_args(hint))
    return {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "a string"}.get(
        getattr(hint, "__name__", ""), str(hint)
    )
