"""Prompt templates of the LLM judges: text files with {placeholders}, filled in one pass."""

import re
from pathlib import Path

PROMPTS = Path(__file__).parent / "prompts"


def read(judge: str, built_in: dict[str, str], own: dict[str, str] | None) -> dict[str, str]:
    """Return the template texts by part. built_in: file names in prompts/. own: paths of the user's
    templates that replace some of them.

    Raises ValueError for a part that the judge does not have, and FileNotFoundError for a path that
    does not exist.
    """
    own = own or {}
    if unknown := set(own) - set(built_in):
        raise ValueError(
            f"judge {judge}: templates for {sorted(unknown)}; expected {list(built_in)}"
        )
    return {
        part: Path(own.get(part, PROMPTS / name)).read_text() for part, name in built_in.items()
    }


def fill(template: str, **values: str) -> str:
    """Replace the known placeholders of a template. Braces and placeholders inside a value stay
    unchanged."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)
