"""The key ``method``: one word brings the vetted parts of a method, as a layer under the file. The
words and their parts are the tables of ``configs/shared/methods.toml``."""

import copy
import functools
import tomllib
import typing
from typing import Any

from coppice.common.options import check_choice
from coppice.tools.bootstrap import ROOT

Tree = dict[str, Any]
"""The nested tables of a TOML file."""

NAMED = (("scheduler", "strategy"), ("learner", "scheme"), ("learner", "correction"))
"""Keys that name a part, whose options are in the key ``<part>_options`` beside them."""
_OWN = (("scheduler", "judge"), ("learner", "critic"), ("learner", "prm"))
"""Further parts that a config chooses for its method."""


@functools.cache
def bundles() -> dict[str, Tree]:
    """The tables of every method by its word."""
    return tomllib.loads((ROOT / "configs" / "shared" / "methods.toml").read_text("utf-8"))


def bundle(tree: Tree) -> Tree:
    """The parts of the method that ``tree`` names, {} for none. Raises ValueError."""
    method = tree.get("method", "")
    if not method or not isinstance(method, str):  # another type is refused with all others
        return {}
    check_choice(f"method = {method!r}", method, bundles())
    return copy.deepcopy(bundles()[method])


def merged(base: Tree, changes: Tree) -> Tree:
    """Apply changes to base: tables are merged key by key, every other value is replaced."""
    result = dict(base)
    for key, value in changes.items():
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = merged(typing.cast(Tree, old), typing.cast(Tree, value))
        result[key] = value
    return result


def over(base: Tree, changes: Tree) -> Tree:
    """Apply changes to the tables of a file. If they name another method, what the file states for
    parts of its former method that the new one does not have goes. Raises ValueError."""
    old, new = bundle(base), bundle(changes)
    if not old or not new:
        return merged(base, changes)
    kept = {key: dict(value) if isinstance(value, dict) else value for key, value in base.items()}
    for section, part in NAMED:
        own = _section(kept, section)
        if part not in own and old[section].get(part) != new[section].get(part):
            own.pop(f"{part}_options", None)
    for section, part in _OWN:
        former, now = old[section].get(part), new[section].get(part)
        renamed = isinstance(former, str) and former != now
        if renamed or (former is not None and type(former) is not type(now)):
            _section(kept, section).pop(part, None)
    return merged(kept, changes)


def under(tree: Tree) -> Tree:
    """The tables over those of their method. Raises ValueError."""
    return merged(_fitting(bundle(tree), tree), tree)


def _fitting(parts: Tree, tree: Tree) -> Tree:
    """The parts of a method without the options of those that ``tree`` chooses otherwise."""
    fitting = {section: dict(value) for section, value in parts.items()}
    for section, part in NAMED if parts else ():
        if _section(tree, section).get(part, parts[section].get(part)) != parts[section].get(part):
            fitting[section].pop(f"{part}_options", None)
    return fitting


def _section(tree: Tree, section: str) -> Tree:
    value = tree.get(section, {})
    return value if isinstance(value, dict) else {}  # another type is refused with all others


def using(section: str, part: str, name: str) -> list[str]:
    """The methods that have this part."""
    return [word for word, parts in bundles().items() if parts[section].get(part) == name]
