"""Prompt templates of the LLM judges: text files with {placeholders}, filled in one pass."""

import re
from pathlib import Path

PROMPTS = Path(__file__).parent / "prompts"


def read(judge: str, built_in: dict[str, str], own: dict[str, str] | None) -> dict[str, str]:
    """Template text by part. built_in: file names in prompts/. own: the user's paths that replace some.

    Raises ValueError for a part that the judge does not have, FileNotFoundError for a path that is not there.
    """
    own = own or {}
    if unknown := set(own) - set(built_in):
        raise ValueError(f"judge {judge}: templates for {sorted(unknown)}; expected {list(built_in)}")
    return {part: Path(own.get(part, PROMPTS / name)).read_text() for part, name in built_in.items()}


def fill(template: str, **values: str) -> str:
    """The template with its known placeholders replaced; braces and placeholders inside a value are left as they are."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), template)
