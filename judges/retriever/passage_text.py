"""The text format of a Search-R1 passage: the quoted title, a newline, the text."""


def title_and_text(contents: str) -> tuple[str, str]:
    """Title (without quotes) and text of a passage's ``contents``."""
    title, _, text = contents.partition("\n")
    return title.strip().strip('"'), text.strip()


def contents_of(title: str, text: str) -> str:
    """The ``contents`` of a passage; inverse of ``title_and_text``."""
    return f'"{title}"\n{text}'
