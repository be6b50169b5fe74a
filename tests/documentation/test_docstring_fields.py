"""Docstrings become tables of fields and parameters, and every key of a config is described."""

from pathlib import Path

import griffe
import pytest

from docs.site.fields import Fields, described

ROOT = Path(__file__).parents[2]
CONFIGS = (
    "scheduler.config scheduler.dispatch.calls actors.config judges.config learner.config".split()
)


def loaded(module: str, place: Path = ROOT / "src") -> griffe.Module:
    extensions = griffe.load_extensions(Fields)
    module_ = griffe.load(
        module, search_paths=[place], extensions=extensions, allow_inspection=False
    )
    assert isinstance(module_, griffe.Module)
    return module_


def of_config(thing: griffe.Object) -> bool:
    return thing.docstring is not None and "Section [" in thing.docstring.value


def fields(thing: griffe.Object) -> list[griffe.DocstringParameter]:
    """The rows of the table below the text of a docstring."""
    assert thing.docstring is not None
    return thing.docstring.parsed[1].value


def test_a_docstring_is_split_at_the_names_of_its_fields_and_nowhere_else() -> None:
    kind = 'one of\n"a" or b: c. Not: a field.'
    docstring = f"Section [x]. lr: the rate (0: none). epochs, steps: how many;\nkind: {kind}"
    assert described(
        f"{docstring}\n\nA second paragraph.", ["lr", "epochs", "steps", "kind", "b"]
    ) == (
        "Section [x].\n\nA second paragraph.",
        {"lr": "the rate (0: none).", "epochs": "how many", "steps": "how many", "kind": kind},
    )
    assert described("All: text.", []) == ("All: text.", {})


def test_fields_and_parameters_become_rows_with_types_and_defaults(tmp_path: Path) -> None:
    (tmp_path / "shapes.py").write_text(
        "class Circle:\n"
        '    """A circle. radius: in metres."""\n'
        "    radius: float\n"
        "    name: str = 'c'\n"
        '    """How it is called."""\n'
        "    _area: float = 0\n"
        "    def grow(self, factor: float = 2.0, again: bool = False) -> None:\n"
        '        """Grow it. factor: of the radius. Raises nothing."""\n'
    )
    circle = loaded("shapes", tmp_path)["Circle"]
    assert circle.docstring.parsed[0].value == "A circle."
    assert [
        (row.name, str(row.annotation), row.description, row.default and str(row.default))
        for row in fields(circle)
    ] == [("radius", "float", "in metres.", None), ("name", "str", "How it is called.", "'c'")]
    parameters = [(row.name, str(row.default), row.description) for row in fields(circle["grow"])]
    assert parameters == [("factor", "2.0", "of the radius. Raises nothing.")]


@pytest.mark.second
@pytest.mark.parametrize("module", CONFIGS)
def test_every_key_of_a_config_section_is_described(module: str) -> None:
    sections = [one for one in loaded(f"coppice.{module}").classes.values() if of_config(one)]
    rows = [row for section in sections for row in fields(section)]
    assert rows
    needs = [row for row in rows if "Config" not in str(row.annotation)]
    assert [row.name for row in needs if not row.description] == []
