"""One TOML file per experiment becomes typed structs, over the file that its key ``extends`` names
and over the parts of its ``method``. An unknown key, a wrong type or a value out of range is
refused with its path."""

import difflib
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from coppice.common.options import check_choice, option
from coppice.tools.bootstrap import ROOT
from coppice.tools.launching import method, rules
from coppice.tools.launching.record import shown
from coppice.tools.launching.settings import Config, with_agent, with_arguments

DEFAULT_CONFIG = ROOT / "configs" / "slate-tiny.toml"

_SYNONYMS = {
    "learning_rate": "lr",
    "batch_size": "questions_per_update",
    "train_batch_size": "questions_per_update",
    "max_new_tokens": "max_action_tokens",
    "max_tokens": "max_action_tokens",
    "max_model_len": "max_context",
    "num_epochs": "epochs",
    "total_steps": "updates",
    "max_steps": "updates",
    "max_grad_norm": "grad_clip",
    "warmup_steps": "warmup_updates",
    "lr_scheduler_type": "lr_schedule",
    "kl_beta": "kl_coef",
    "model_name_or_path": "name",
}
"""Names that other libraries give to keys -> our keys."""


class ConfigError(ValueError):
    """A configuration that cannot be used. The message names the key, the value and what was
    expected."""


def default(overrides: list[str]) -> Path:
    """The config of a command line that names none. Other libraries have nothing to search."""
    named = [text.strip("'\"") for text in overrides if text.startswith("data.environment=")]
    others = named and named[-1].endswith(("gymnasium", "textarena", "other_python"))
    return ROOT / "configs/shared/others-tiny.toml" if others else DEFAULT_CONFIG


def load(path: Path, overrides: list[str]) -> Config:
    """The config of a TOML file, over the file that it ``extends`` and the parts of its ``method``,
    with ``a.b=value`` overrides (``a.b=null`` takes a key or section away). Raises ConfigError."""
    named: dict[str, Any] = {}
    for override in overrides:
        if override.partition("=")[0].strip() == "method":
            _set(named, override)
    try:
        tree = method.over(_read(path), named)
        for override in overrides:
            _set(tree, override)
        tree = method.under(tree)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"config: {error}") from None
    for section, part in method.NAMED:  # without the part, its options belong to nothing
        if f"{section}.{part}=null" in overrides:
            tree.get(section, {}).pop(f"{part}_options", None)
    return convert(tree, overrides)  # again, because a null takes a part of the method away, too


def _read(path: Path, *heirs: Path) -> dict[str, Any]:
    """The tables of a TOML file over those of the file that its key ``extends`` names. heirs: the
    files that extend this one, the nearest last. path: from the nearest's folder, or from configs/
    if nothing is there."""
    near = heirs[-1].parent / path if heirs else path
    places = (near, ROOT / path, ROOT / "configs" / path)
    path = next((place for place in places if os.path.exists(place)), near)
    named = f"config {path}" + (f", which {heirs[-1]} extends," if heirs else "")
    there = map(str, map(shown, sorted((ROOT / "configs").glob("*.toml"))))
    if path.resolve() in [heir.resolve() for heir in heirs]:
        circle = " -> ".join(map(str, (*heirs, path)))
        raise ConfigError(f"{named} extends itself: {circle}; remove one `extends`")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{named} does not exist; there are {', '.join(there)}") from None
    except OSError as error:
        raise ConfigError(f"{named} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named} is not UTF-8 ({error}): save it in that encoding") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{named} is not TOML: {error}") from None
    base = tree.pop("extends", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ConfigError(f"{named} has extends = {base!r}: expected the path of one TOML file")
    return method.over(_read(Path(base), *heirs, path), tree)


def convert(tree: dict[str, Any], overrides: list[str], source: str = "config") -> Config:
    """The config of a table of settings, with ``a.b=value`` overrides. Raises ConfigError, which
    begins with source."""
    for override in overrides:
        _set(tree, override)
    try:
        method.bundle(tree)
        _check_keys(tree, Config, "")
        for path, value in leaves(tree):  # processes get JSON, which has no NaN
            if isinstance(value, int | float) and not math.isfinite(value):
                raise ValueError(f"{path} = {value}: expected a finite number")
        config = with_agent(msgspec.convert(tree, Config))
        rules.check(config)
    except msgspec.ValidationError as error:
        fault = _located(tree, str(error))
    except (ValueError, FileNotFoundError) as error:  # also of a name or an option of a plug-in
        fault = str(error)
    else:
        return with_arguments(config)
    raise ConfigError(f"{source}: {_without_secrets(tree, fault)}")


def _without_secrets(tree: dict[str, Any], text: str) -> str:
    """Return the text of an error without what was written under a key that looks like one of a
    secret, where only a variable belongs.

    A text of fewer than eight characters is no secret, and the error could hold it in any word.
    """
    for path, value in leaves(tree):
        secret = path.rpartition(".")[2] in ("api_key", "key", "token", "password", "secret")
        if secret and isinstance(value, str) and len(value) >= 8:
            text = text.replace(value, "(hidden)")
    return text


def _located(tree: dict[str, Any], fault: str) -> str:
    """Put the path and its value before the text of msgspec's error, which is "Expected .. - at
    `$.path`"."""
    expected, _, place = fault.partition(" - at `$.")
    value: Any = tree
    try:
        for part in re.findall(r"[^.\[\]`]+", place):
            value = value[int(part)] if isinstance(value, list) else value[part]
    except (KeyError, ValueError):
        return fault
    # an error of the file as a whole, such as a missing name, has no place
    told = f"{place.rstrip('`')} = {value!r}: {expected[0].lower()}{expected[1:]}"
    return told if place else fault


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested tables and lists by their paths, "a.b" and "a.b[0]"."""
    if isinstance(value, dict):
        for key, inner in typing.cast(dict[str, Any], value).items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(typing.cast(Sequence[Any], value)):
            yield from leaves(inner, f"{path}[{place}]")
    else:
        yield path, value


def _set(tree: dict[str, Any], override: str) -> None:
    try:
        key, value = option(override)
    except ValueError:
        raise ConfigError(f"{override!r}: expected key=value, such as learner.lr=1e-6") from None
    # A part in quotes may have dots: judges.use."./judges/mine.py:Brevity"
    *path, last = (part.strip('"') for part in re.findall(r'"[^"]*"|[^.]+', key.strip()) or [key])
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{override!r}: {part!r} is a value, not a section")
    # An option of a correction may know null as a value (common.options.checked).
    if value == "null" and path[-1:] != ["correction_options"]:
        tree.pop(last, None)
    else:
        tree[last] = value


def _check_keys(tree: dict[str, Any], kind: type, path: str) -> None:
    hints = typing.get_type_hints(kind)
    for key, value in tree.items():
        if key not in hints:
            near = _nearest(path, key, list(hints))
            guess = f"did you mean {near}?" if near else f"expected one of {sorted(hints)}"
            raise ValueError(f"unknown key {path}{key} = {value!r}; {guess}")
        if typing.get_origin(hints[key]) is Literal and isinstance(value, str):
            check_choice(f"{path}{key} = {value!r}", value, typing.get_args(hints[key]))
        inner = _struct(hints[key])
        if inner is not None and isinstance(value, dict):
            _check_keys(value, inner, f"{path}{key}.")


def _nearest(path: str, key: str, here: list[str]) -> str:
    """Return the key that was probably meant, "" if none comes near: first the name here of another
    library's key, then the same name in another section or a plug-in, then the nearest of the
    section's keys, ``here``."""
    name = _SYNONYMS.get(key, key)
    if name in here:
        return f"{path}{name}"
    keys = {*_keys(Config), *method.options()}
    elsewhere = [one for one in keys if one.endswith(f".{name}")]
    elsewhere = [one for one in elsewhere if one.startswith(path)] or elsewhere
    near = [f"{path}{one}" for one in difflib.get_close_matches(key, here, 1)]
    return next(iter([*elsewhere, *near] if len(elsewhere) == 1 else near), "")


def _keys(kind: type, path: str = "") -> Iterator[str]:
    for key, hint in typing.get_type_hints(kind).items():
        yield f"{path}{key}"
        if (inner := _struct(hint)) is not None:
            yield from _keys(inner, f"{path}{key}.")


def _struct(hint: Any) -> type | None:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, msgspec.Struct)), None)
