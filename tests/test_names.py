"""Names say what they hold: words that say nothing are not used, and a class name is used once."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).parent.parent
ROOMS = "wire common actors judges scheduler learner tools research examples".split()
SAYS_NOTHING = frozenset(
    "shop asked beside spread apart aside together sight nursery giver known noted standing".split()
)


def modules() -> Iterator[tuple[str, ast.Module]]:
    for room in ROOMS:
        for path in sorted((HOUSE / room).rglob("*.py")):
            yield str(path.relative_to(HOUSE)), ast.parse(path.read_text())


def named(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Each identifier that ``tree`` introduces, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno


@pytest.mark.second
def test_no_name_is_one_of_the_words_that_say_nothing() -> None:
    found = [
        f"{path}:{line} {name}"
        for path, tree in modules()
        for name, line in named(tree)
        if name.strip("_").lower() in SAYS_NOTHING
    ]
    found += [path for path, _ in modules() if Path(path).stem in SAYS_NOTHING]
    assert not found, "\n".join(found)


@pytest.mark.second
def test_a_class_name_is_used_for_one_thing() -> None:
    places = defaultdict(list)
    for path, tree in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    twice = [f"{name}: {' '.join(where)}" for name, where in places.items() if len(where) > 1]
    assert not twice, "\n".join(sorted(twice))
