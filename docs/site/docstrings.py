"""An extension of griffe, which reads the docstrings for the reference: they are plain text, which
becomes Markdown."""

import re
from typing import Any

import griffe


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


class Readable(griffe.Extension):
    """Gives mkdocstrings Markdown. griffe calls it for every object that it has read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)
