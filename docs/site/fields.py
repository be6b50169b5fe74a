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


def described(docstring: str, names: list[str]) -> tuple[str, dict[str, str]]:
    """Split a docstring into its text and the descriptions of ``names``; names that share one
    ("epochs, minibatches: ..") each get it.

    A description ends before the next name, and at the end of its paragraph.
    """
    either = "|".join(re.escape(name) for name in names) or "(?!)"
    paragraphs, descriptions = list[str](), dict[str, str]()
    for paragraph in re.split(r"\n\s*\n", docstring):
        start, *entries = re.split(_ENTRY % (either, either), paragraph)
        paragraphs.append(start.strip())
        for shared, text in zip(entries[::2], entries[1::2], strict=True):
            descriptions |= dict.fromkeys(re.split(r",\s", shared), text.strip().rstrip(";"))
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
    title, table = "Fields:", list[griffe.DocstringParameter]()
    if isinstance(thing, griffe.Function):
        title, parameters = "Parameters:", thing.parameters
        docstring, descriptions = described(docstring, [one.name for one in parameters])
        table = [
            _row(one.name, one.annotation, one.default, descriptions[one.name])
            for one in parameters
            if one.name in descriptions
        ]
    elif isinstance(thing, griffe.Class):
        attributes = [one for name, one in thing.attributes.items() if name[0] != "_"]
        fields = [one for one in attributes if "property" not in one.labels]
        docstring, descriptions = described(docstring, [field.name for field in fields])
        for field in fields:
            # a subclass has the fields of its base, whose docstrings became rows already
            said = field.extra["row"]
            own = field.docstring.value if field.docstring else said.get("text", "")
            if field.name in descriptions or field.annotation:
                said["text"] = own
                text = descriptions.get(field.name, own)
                table.append(_row(field.name, field.annotation, field.value, text))
                field.docstring = None  # the row says it
    text = griffe.DocstringSectionText(readable(docstring))
    return [text, griffe.DocstringSectionParameters(table, title)] if table else [text]


def _row(name: str, annotation: Any, default: Any, description: str) -> griffe.DocstringParameter:
    description = readable(description)
    return griffe.DocstringParameter(
        name, description=description, annotation=annotation, value=default
    )
