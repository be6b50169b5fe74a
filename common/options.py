"""Options of plug-ins (schemes, corrections, environments, judges): keyword arguments from the
config, checked before a run starts any work; and the parser of every command."""

import argparse
import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_WORDS = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "a string"}


class _Help(argparse.RawDescriptionHelpFormatter):
    """Names the value of an option by its type, as short as ``N``, where the option does not name
    it."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        names: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}
        kind = typing.get_args(action.type)[0] if _is_range(action.type) else action.type
        return names.get(kind) or super()._get_default_metavar_for_optional(action)


class _Parser(argparse.ArgumentParser):
    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if not _is_range(action.type):
            return super()._get_value(action, arg_string)
        import msgspec  # not at the top: a Python without it prints the help of tools/test

        try:
            return msgspec.convert(arg_string, action.type, strict=False)
        except msgspec.ValidationError:
            fault = f"{arg_string}: expected {_shown(action.type)}"
            raise argparse.ArgumentError(action, fault) from None


def _is_range(kind: Any) -> bool:
    return typing.get_origin(kind) is typing.Annotated


def command_parser(prog: str, description: str, examples: str, usage: str | None = None) -> Any:
    """Return the ArgumentParser of a command, whose help ends with examples. A type of an option
    may be a range of numbers (common/numbers.py)."""
    return _Parser(prog, usage, description, f"examples:\n{examples}", formatter_class=_Help)


def gave_up(command: str, reason: object, status: int = 2) -> int:
    """Print why a command ends, and return its exit status. A broken pipe is raised: the reader of
    the output (head, less) has left."""
    if isinstance(reason, BrokenPipeError):
        raise reason
    if isinstance(reason, OSError) and reason.filename and reason.strerror:
        reason = f"{reason.filename}: {reason.strerror}"  # without its number
    print(f"{command}: {reason}", file=sys.stderr)
    return status


def check_choice(setting: str, name: str, names: Iterable[str], otherwise: str = "") -> None:
    """Refuse a ``name`` that is not in ``names``. The ValueError lists the nearest names, then all
    names.

    setting: how the error begins, such as "learner.scheme = 'slat'". otherwise: which other values
    are allowed.
    """
    names = sorted(names)
    if name not in names:
        near = " or ".join(map(repr, difflib.get_close_matches(name, names)))
        guess = f"did you mean {near}? " if near else ""
        raise ValueError(f"{setting}: {guess}expected one of {names}{otherwise}")


def imported(setting: str, place: str) -> Any:
    """Return the object at ``place``: "module:name", importable from the current folder, or
    "file.py:name". Raises ValueError, which begins with ``setting``."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    module, _, name = place.partition(":")
    try:
        return getattr(_module(module), name)
    except Exception as error:  # noqa: BLE001
        raise ValueError(
            f"{setting}: {type(error).__name__}: {error}; expected module:Class, importable from"
            f" {Path.cwd()}, or ./file.py:Class"
        ) from None


def _module(place: str) -> types.ModuleType:
    """Import a module by its name, or by the path of its file, which ends with .py. A file is run
    once."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve()
    if str(path) not in sys.modules:
        spec = importlib.util.spec_from_file_location(str(path), path)
        assert spec is not None and spec.loader is not None, "a .py file has a loader"
        module = sys.modules[str(path)] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[str(path)]
            raise
    return sys.modules[str(path)]


def option(text: str) -> tuple[str, Any]:
    """Read KEY=VALUE. The value is TOML, and a bare word is a string. Raises ValueError when there
    is no "="."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise ValueError(f"option {text!r}: expected KEY=VALUE")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value
    except RecursionError:
        raise ValueError(f"option {key}: its value is nested too deeply to be read") from None


def modules(package: str) -> list[str]:
    """Return the names of a package's modules."""
    folder = importlib.import_module(package).__path__
    return sorted(module.name for module in pkgutil.iter_modules(folder))


def plugin(setting: str, name: str, package: str, function: str) -> tuple[Any, Callable[..., Any]]:
    """Return the module and the function of a plug-in: ``function`` of module ``package.name``, or
    a user's own "module:function".

    Raises ValueError, which begins with ``setting`` and lists the nearest names.
    """
    if ":" in name:
        own = imported(setting, name)
        return _module(name.partition(":")[0]), own
    check_choice(setting, name, modules(package), f", or module:{function}")
    module = importlib.import_module(f"{package}.{name}")
    return module, getattr(module, function)


def with_defaults(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the value of every option of a plug-in's function: its default, or the given one."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | options


def check_takes(setting: str, module: Any, name: str, *tables: Any, **options: Any) -> None:
    """Refuse a module whose function ``name``, if it has one, cannot be called with ``tables`` and
    every option. Raises ValueError, which begins with ``setting``."""
    try:
        if hasattr(module, name):
            inspect.signature(getattr(module, name)).bind(*tables, **options)
    except TypeError as error:
        raise ValueError(
            f"{setting}: {module.__name__}.{name} {error}. It is called with every option,"
            f" {sorted(options)}: name each as a parameter, or take the rest with **_"
        ) from None


def declared(setting: str, module: Any, name: str, kind: type[T], options: dict[str, Any]) -> T:
    """Return the declaration of a plug-in: what its module's function ``name`` returns for
    ``options`` (``with_defaults``). Raises ValueError, which begins with ``setting``, when there is
    no such function, or when it takes other options or returns no ``kind``."""
    wish = f"a function {name}(**options) that returns a {kind.__name__} (docs/extend.md)"
    if not hasattr(module, name):
        raise ValueError(f"{setting}: {module.__name__} does not declare itself: expected {wish}")
    check_takes(setting, module, name, **options)
    declaration = getattr(module, name)(**options)
    if not isinstance(declaration, kind):
        raise ValueError(f"{setting}: {name} returned {declaration!r}: expected {wish}")
    return declaration


def checked(
    section: str, plug_in: str, function: Callable[..., Any], options: dict[str, Any],
    others: tuple[str, ...],
) -> dict[str, Any]:  # fmt: skip
    """Return ``options`` as the types that ``function`` declares. others: parameters that no option
    sets. Raises ValueError naming the key.

    "null", which TOML lacks, is None for an option that may be None; it takes any other option
    away.
    """
    import msgspec  # as above

    hints = typing.get_type_hints(function, include_extras=True)
    # a class without __init__ has *args and **kwargs
    parameters = inspect.signature(function).parameters.values()
    plain = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes = [name for name in plain if name not in others]
    options = {name: value for name, value in options.items() if name in takes or value != "null"}
    if unknown := set(options) - set(takes):
        raise ValueError(
            f"{section}: {sorted(unknown)} unknown to {plug_in}, which takes"
            f" {takes or 'no options'}"
        )
    converted = {}
    for name, value in options.items():
        value, hint = None if value == "null" else value, hints.get(name, Any)
        try:
            converted[name] = msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            if value is None:
                continue
            is_struct = isinstance(hint, type) and issubclass(hint, msgspec.Struct)
            shown = str(error) if is_struct else f"expected {_shown(hint)}"
            raise ValueError(f"{section}.{name} = {value!r}: {shown}") from None
    return converted


def _shown(hint: Any) -> str:
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind is typing.Literal:
        return "one of " + ", ".join(map(repr, parts))
    if kind in (tuple, list):
        return f"a list, each member {_shown(parts[0])}"
    if kind in (typing.Union, types.UnionType):
        return " or ".join(_shown(part) for part in parts if part is not types.NoneType)
    if kind is typing.Annotated:
        words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
        limits = {word: getattr(parts[1], key) for key, word in words.items()}
        bounds = [f"{word} {limit:g}" for word, limit in limits.items() if limit is not None]
        return f"{_shown(parts[0])}, {' and '.join(bounds)}"
    return _WORDS.get(getattr(hint, "__name__", ""), str(hint))
