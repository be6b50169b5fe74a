"""Stand-ins for compiled packages: every name of theirs can be imported, and using one says what is
missing."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any


class Missing:
    """A name of a package that is not here: anything can be done with it but to run it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __getitem__(self, key: Any) -> Missing:
        return self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, str]:
        return {"type": "any"}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self._name} is a placeholder: there are no compiled kernels here")


def missing(name: str) -> Any:
    last = name.rpartition(".")[2]
    return type(last, (Exception,), {}) if last.endswith(("Error", "Exception")) else Missing(name)


class Package(types.ModuleType):
    """A module whose absent names are made by ``member`` when they are asked for."""

    def __init__(self, name: str, member: Callable[[str], Any]) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "0"
        self._member = member

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        made = self._member(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes ``root`` (unless ``below`` is set: only what lies below it) out of placeholders."""

    def __init__(
        self, root: str, member: Callable[[str], Any] | None = None, below: bool = False
    ) -> None:
        self._root, self._member, self._below = root, member or missing, below

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        root = fullname == self._root and not self._below
        if root or fullname.startswith(f"{self._root}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Package(spec.name, self._member)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(finder: Finder) -> None:
    sys.meta_path.append(finder)


def triton(name: str) -> Any:
    """What a name of triton is at import: a class, a decorator that leaves kernels undefined, or
    arithmetic."""
    last = name.rpartition(".")[2]
    if name.startswith("triton.knobs."):
        return None  # no kernel is ever loaded, so there is nothing to watch
    if last in _TRITON:
        return _TRITON[last]
    return type(last, (Exception,), {}) if last[:1].isupper() else Missing(name)


class _Made:
    """A choice of an autotuned kernel, or a constant: modules make both at import."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.value = args[0] if args else None


def _decorator(*args: Any, **options: Any) -> Any:
    """``@jit`` and ``@jit(...)``, and the same for autotune and heuristics."""
    if args and isinstance(args[0], (types.FunctionType, Missing)):
        return args[0] if isinstance(args[0], Missing) else Missing(args[0].__qualname__)
    return _decorator


_TRITON: dict[str, Any] = {
    "jit": _decorator,
    "autotune": _decorator,
    "heuristics": _decorator,
    "Config": _Made,
    "constexpr": _Made,
    "cdiv": lambda a, b: -(a // -b),
    "next_power_of_2": lambda n: 1 << (n - 1).bit_length() if n > 0 else 1,
}
