"""The text format of a Search-R1 passage: the quoted title, a newline, and the text."""


def title_and_text(contents: str) -> tuple[str, str]:
    """Return the title (without quotes) and the text of a passage's ``contents``."""
    title, _, text = contents.partition("\n")
    return title.strip().strip('"'), text.strip()


def contents_of(title: str, text: str) -> str:
    """Return the ``contents`` of a passage. This is the inverse of ``title_and_text``."""
    return f'"{title}"\n{text}'
