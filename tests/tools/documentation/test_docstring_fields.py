"""Docstrings become tables of fields and parameters, and every key of a config is described."""

from pathlib import Path

import griffe

from tools.documentation.fields import Fields, described, readable

ROOT = Path(__file__).parents[3]


def loaded(module: str, place: Path = ROOT) -> griffe.Module:
    extensions = griffe.load_extensions(Fields)
    module_ = griffe.load(module, search_paths=[place], extensions=extensions, allow_inspection=False)
    assert isinstance(module_, griffe.Module)
    return module_


def test_a_docstring_is_split_at_the_names_of_its_fields_and_nowhere_else() -> None:
    docstring = (
        "Section [x]. lr: the rate (0: none). epochs, steps: how many;\nkind: one of\n\"a\" or b: c. Not: a field.\n\nA second paragraph."
    )  # fmt: skip
    assert described(docstring, ["lr", "epochs", "steps", "kind", "b"]) == (
        "Section [x].\n\nA second paragraph.",
        {"lr": "the rate (0: none).", "epochs": "how many", "steps": "how many", "kind": 'one of\n"a" or b: c. Not: a field.'},
    )  # fmt: skip
    assert described("All: text.", []) == ("All: text.", {})


def test_tags_and_drawings_are_shown_as_they_are_written() -> None:
    assert readable("Write <think> or ``<a>``; 1 < 2.") == "Write &lt;think> or ``<a>``; 1 < 2."
    assert readable("Text.\n\na ---> b\n  |    c") == "Text.\n\n```text\na ---> b\n  |    c\n```"


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
    text, fields = circle.docstring.parsed
    assert text.value == "A circle."
    assert [(f.name, str(f.annotation), f.description, f.value and str(f.value)) for f in fields.value] == [
        ("radius", "float", "in metres.", None),
        ("name", "str", "How it is called.", "'c'"),
    ]
    parameters = circle["grow"].docstring.parsed[1].value
    assert [(p.name, str(p.default), p.description) for p in parameters] == [
        ("factor", "2.0", "of the radius. Raises nothing.")
    ]
