"""What documents and code point at exists: sections of docs/methods.md, and files that a document
links to."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
METHODS = (ROOT / "docs" / "methods.md").read_text()
SECTIONS = set(re.findall(r"^##+ (\d(?:\.\d)?)\.? ", METHODS, re.MULTILINE))
ROWS = set(re.findall(r"^\| (\d+) \|", METHODS.split("## 6. ")[1], re.MULTILINE))
SOURCES = sorted(
    path
    for folder in "wire common scheduler learner actors judges tools configs tests docs".split()
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".toml", ".md", "") and path.is_file() and "corpus" not in path.parts
)
DOCUMENTS = [*ROOT.glob("*.md"), *(path for path in SOURCES if path.suffix == ".md")]

_SECTION = r"(\d(?:\.\d+)?)(?![\d.]*\d)"
_CITED = re.compile(
    rf"methods\.md[`)]? {_SECTION}((?:(?:, | and | to |; ){_SECTION})*)(?:, row (\d+))?"
)


def citations(text: str) -> list[tuple[str, str]]:
    """Pairs of a cited section and a cited row ("" for none)."""
    pairs = []
    for first, more, _, row in _CITED.findall(text):
        pairs += [(first, row), *((section, "") for section in re.findall(_SECTION, more))]
    return pairs


def test_every_cited_section_and_row_of_methods_md_exists() -> None:
    others = [path for path in SOURCES if path != Path(__file__)]
    cited = {(path.relative_to(ROOT), *c) for path in others for c in citations(path.read_text())}
    assert len(cited) > 100, "the citations were not found"
    assert {"0", "1.8", "2.5", "3.6", "4.6", "6"} <= SECTIONS
    assert [c for c in cited if c[1] not in SECTIONS or (c[2] and c[2] not in ROWS)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_document_links_to_exists(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (document.parent / link).exists()] == []


def test_the_first_agent_of_the_page_is_the_file_of_the_example() -> None:
    code = (ROOT / "examples" / "ten_lines.py").read_text().partition('"""\n\n')[2]
    assert f"```python\n# examples/ten_lines.py\n{code}```" in (ROOT / "docs/agents.md").read_text()
