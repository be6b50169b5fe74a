"""An extension of griffe, which reads the docstrings for the reference: fields and parameters
become tables.

The docstrings of this project describe fields in their text: "count: how many there are. seed: of
the draws." Each field, with its type and its default, becomes a row of a table; what stands before
the first field stays text.
"""

import re
from typing import Any

import griffe

_ENTRY = r"(?:^|(?<=[.;:]\s))((?:%s)(?:,\s(?:%s))*):\s"


def described(text: str, names: list[str]) -> tuple[str, dict[str, str]]:
    """Split a docstring into its text and the descriptions of ``names``; names that share one
    ("epochs, minibatches: ..") each get it.

    A description ends before the next name, and at the end of its paragraph.
    """
    either = "|".join(re.escape(name) for name in names) or "(?!)"
    paragraphs, descriptions = list[str](), dict[str, str]()
    for paragraph in re.split(r"\n\s*\n", text):
        start, *entries = re.split(_ENTRY % (either, either), paragraph)
        paragraphs.append(start.strip())
        for together, description in zip(entries[::2], entries[1::2], strict=True):
            descriptions |= dict.fromkeys(
                re.split(r",\s", together), description.strip().rstrip(";")
            )
    return "\n\n".join(filter(None, paragraphs)), descriptions


def readable(text: str) -> str:
    """Return the text of a docstring as Markdown: drawings and indented examples as code, and tags
    such as <think> as they are written."""
    blocks = re.split(r"\n\s*\n", text)
    return "\n\n".join(
        f"```text\n{block}\n```"
        if re.search(r"\S {3,}\S|^ {2,}\S", block, re.MULTILINE)
        else re.sub(r"(`[^`]+`)|<(?=[\w/])", lambda match: match[1] or "&lt;", block)
        for block in blocks
    )


class Fields(griffe.Extension):
    """Gives mkdocstrings the sections of each docstring. griffe calls it for every object that it
    has read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.parsed = sections(obj, obj.docstring.value)


def sections(thing: griffe.Object, docstring: str) -> list[griffe.DocstringSection]:
    """Return the text of a docstring and, below it, a table of the parameters that it describes or
    of the fields of a class."""
    table = list[griffe.DocstringParameter]()
    if isinstance(thing, griffe.Function):
        docstring, descriptions = described(
            docstring, [parameter.name for parameter in thing.parameters]
        )
        described_ones = [
            parameter for parameter in thing.parameters if parameter.name in descriptions
        ]
        table = [
            _row(one.name, one.annotation, one.default, descriptions[one.name])
            for one in described_ones
        ]
    elif isinstance(thing, griffe.Class):
        own = [
            field
            for name, field in thing.attributes.items()
            if name[0] != "_" and "property" not in field.labels
        ]
        docstring, descriptions = described(docstring, [field.name for field in own])
        for field in own:
            # a subclass has the fields of its base, whose docstrings became rows already
            described_here = (
                field.docstring.value if field.docstring else field.extra["row"].get("is", "")
            )
            if field.name in descriptions or field.annotation:
                table.append(
                    _row(
                        field.name,
                        field.annotation,
                        field.value,
                        descriptions.get(field.name, described_here),
                    )
                )
                field.extra["row"]["is"] = described_here
                field.docstring = None  # the row says it
    title = "Parameters:" if isinstance(thing, griffe.Function) else "Fields:"
    text = griffe.DocstringSectionText(readable(docstring))
    return [text, griffe.DocstringSectionParameters(table, title)] if table else [text]


def _row(name: str, annotation: Any, default: Any, description: str) -> griffe.DocstringParameter:
    return griffe.DocstringParameter(
        name, description=readable(description), annotation=annotation, value=default
    )
