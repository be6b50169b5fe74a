"""Names say what they hold: words that say nothing are not used, and a class name is used once."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

HOUSE = Path(__file__).parent.parent
ROOMS = "wire common actors judges scheduler learner tools research examples".split()
SAYS_NOTHING = frozenset(
    "shop asked beside spread apart aside together sight nursery giver known noted standing".split()
)


@cache
def modules() -> list[tuple[str, ast.Module]]:
    paths = [path for room in ROOMS for path in sorted((HOUSE / room).rglob("*.py"))]
    return [(str(path.relative_to(HOUSE)), ast.parse(path.read_text())) for path in paths]


def named(tree: ast.Module) -> Iterator[str]:
    """Each identifier that ``tree`` introduces."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.arg(name) | ast.Name(name, ast.Store()) | ast.Attribute(_, name, ast.Store()):
                yield name


@pytest.mark.second
def test_no_name_is_one_of_the_words_that_say_nothing() -> None:
    for path, tree in modules():
        names = [Path(path).stem, *named(tree)]
        assert [name for name in names if name.strip("_").lower() in SAYS_NOTHING] == [], path


@pytest.mark.second
def test_a_class_name_is_used_for_one_thing() -> None:
    places = defaultdict(list)
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    twice = [f"{name}: {' '.join(where)}" for name, where in places.items() if len(where) > 1]
    assert not twice, "\n".join(sorted(twice))
