"""Options of plug-ins (schemes, corrections, environments, judges): keyword arguments from the config, checked before anything is paid for."""

import difflib
import importlib
import inspect
import pkgutil
import sys
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def known(what: str, name: str, names: Iterable[str], otherwise: str = "") -> None:
    """Refuse a ``name`` that is none of ``names``. Raises ValueError with the nearest of them and all.

    what: how the error begins, such as "learner.scheme = 'slat'". otherwise: what else would do.
    """
    names = sorted(names)
    if name not in names:
        near = " or ".join(map(repr, difflib.get_close_matches(name, names)))
        raise ValueError(f"{what}: {f'did you mean {near}? ' if near else ''}expected one of {names}{otherwise}")


def imported(what: str, place: str) -> Any:
    """The object at ``place``, "module:name", with the current folder importable. Raises ValueError, which begins with ``what``."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 whatever a plug-in raises while it is read is what is wrong with it
        raise ValueError(
            f"{what}: {type(error).__name__}: {error}; expected module:Class, importable from {Path.cwd()}"
        ) from None


def modules(package: str) -> list[str]:
    """The names of a package's modules."""
    return sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__))


def plugin(what: str, name: str, package: str, function: str) -> tuple[Any, Callable[..., Any]]:
    """The module and the function of a plug-in: ``function`` of the module ``name`` of ``package``, or a user's own "module:function".

    Raises ValueError, which begins with ``what``, with the nearest names.
    """
    if ":" in name:
        own = imported(what, name)
        return sys.modules[name.partition(":")[0]], own
    known(what, name, modules(package), f", or module:{function}")
    module = importlib.import_module(f"{package}.{name}")
    return module, getattr(module, function)


def declared(what: str, module: Any, name: str, kind: type[T], function: Callable[..., Any], options: dict[str, Any]) -> T:  # fmt: skip
    """What a plug-in's module declares with its function ``name``, which gets every option of the plug-in's ``function``.

    Raises ValueError, which begins with ``what``, when the module declares nothing, or something else than a ``kind``.
    """
    expected = f"expected a function {name}(**options) that returns a wire.declared.{kind.__name__} (docs/extend.md)"
    if not hasattr(module, name):
        raise ValueError(f"{what}: {module.__name__} does not declare itself: {expected}")
    defaults = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.default is not p.empty}
    said = getattr(module, name)(**defaults | options)
    if not isinstance(said, kind):
        raise ValueError(f"{what}: {module.__name__}.{name} returned {said!r}: {expected}")
    return said


def checked(section: str, what: str, function: Callable[..., Any], options: dict[str, Any], given: tuple[str, ...]) -> dict[str, Any]:  # fmt: skip
    """``options`` as ``function`` takes them beside the arguments ``given``. Raises ValueError naming key, value and what is expected."""
    hints = typing.get_type_hints(function, include_extras=True)
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
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_shown(part) for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is typing.Annotated:
        plain, limits = typing.get_args(hint)[0], typing.get_args(hint)[1]
        words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
        told = [f"{word} {getattr(limits, key):g}" for key, word in words.items() if getattr(limits, key) is not None]
        return f"{_shown(plain)}, {' and '.join(told)}"
    return {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "a string"}.get(
        getattr(hint, "__name__", ""), str(hint)
    )
