"""The tables of docs/learner.md and docs/corrections.md name what exists."""

from pathlib import Path

from coppice.learner import schemes
from coppice.learner.update import corrections

PAGE = (Path(__file__).parent.parent.parent / "docs" / "learner.md").read_text()


def test_the_page_of_corrections_names_every_correction() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "corrections.md").read_text()
    assert all(f"`{name}`" in page for name in corrections.CORRECTIONS)


def test_the_page_names_the_aggregation_of_every_scheme() -> None:
    rows = [line.split("|") for line in PAGE.splitlines() if line.startswith("| `") and line.count("|") == 6]
    for name in schemes.names():
        (cell,) = [row[5] for row in rows if f"`{name}`" in row[1]]
        own = [part for part in cell.split(";") if f"`{name}`" in part] or [cell]
        assert own[0].split(":")[-1].strip() == schemes.load(name, {}).needs.aggregation
