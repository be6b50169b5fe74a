"""The fence between the rooms, and what may stand nowhere."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {"wire", "common", "scheduler", "learner", "actors", "judges", "tools", "research"}
BELOW = {"wire", "common"}
MAY_IMPORT: dict[str, set[str]] = {
    "wire": set(),
    "common": {"wire"},
    "actors": BELOW,
    "judges": BELOW | {"actors.environments"},
    "scheduler": BELOW | {"actors.environments"},
    "learner": BELOW,
    "tools": ROOMS - {"research"},
    "research": ROOMS,
}
FLOORS = "defaults launching evaluating finetuning inspecting planning".split()
"""The folders of tools/, from the ground up: a folder imports only those before it."""


def modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def imports(path: Path) -> set[str]:
    return {name.removeprefix("coppice.") for name in spelled(path)}


@cache
def spelled(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.second
def test_every_room_is_imported_as_a_part_of_the_package() -> None:
    for path in (path for place in (*ROOMS, "tests", "examples") for path in modules(place)):
        bare = {name for name in spelled(path) if name.split(".")[0] in ROOMS}
        assert not bare - {"tools.bootstrap"}, f"{path}: {sorted(bare)}"


def test_the_package_is_all_that_its_folder_holds() -> None:
    assert [path.name for path in (ROOT / "src").iterdir() if path.suffix != ".egg-info"] == [
        "coppice"
    ]
    links = {path.name for path in (ROOT / "src" / "coppice").iterdir() if path.is_symlink()}
    assert links == {*ROOMS, "configs", "examples", "metrics.md"}


@pytest.mark.second
@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_what_stands_below_it(room: str) -> None:
    allowed = tuple(f"{name}." for name in MAY_IMPORT[room])
    for path in modules(room):
        foreign = [name for name in imports(path) if name.split(".")[0] in ROOMS - {room}]
        assert [name for name in foreign if not f"{name}.".startswith(allowed)] == [], path


def test_no_arrow_between_folders_of_tools_runs_back_up() -> None:
    folders = {path.name for path in (ROOT / "tools").iterdir() if (path / "__init__.py").exists()}
    assert folders == set(FLOORS)
    for place, folder in enumerate(FLOORS):
        above = tuple(f"tools.{name}." for name in FLOORS[place + 1 :])
        for path in modules(f"tools/{folder}"):
            assert [name for name in imports(path) if f"{name}.".startswith(above)] == [], path


@pytest.mark.second
def test_no_files_import_each_other_in_a_circle() -> None:
    every = [path for room in ROOMS for path in modules(room)]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in every]
    paths = {n.removesuffix(".__init__"): path for n, path in zip(names, every, strict=True)}
    arrows = {name: imported(path, paths) - {name} for name, path in paths.items()}
    while leaves := {name for name, targets in arrows.items() if not targets & set(arrows)}:
        for name in leaves:
            del arrows[name]
    assert not arrows, f"these import each other, or files that do: {sorted(arrows)}"


def imported(path: Path, paths: dict[str, Path]) -> set[str]:
    """The files of the project that ``path`` imports."""
    found = {name if name in paths else name.rpartition(".")[0] for name in imports(path)}
    return found & set(paths)


@pytest.mark.second
def test_the_scheduler_and_the_reading_of_a_config_import_nothing_that_computes() -> None:
    code = (
        "import sys; from coppice.scheduler import main;"
        " from coppice.tools.launching.config import DEFAULT_CONFIG, load;"
        " load(DEFAULT_CONFIG, []);"
        " sys.exit(str(sorted({'torch', 'faiss', 'peft', 'transformers'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip() == "[]"
