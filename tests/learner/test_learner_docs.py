"""The tables of docs/learner.md and docs/corrections.md name what exists."""

from pathlib import Path

from learner import corrections, schemes

PAGE = (Path(__file__).parent.parent.parent / "docs" / "learner.md").read_text()


def test_the_page_names_every_scheme() -> None:
    assert all(f"`{name}`" in PAGE for name in schemes.names())


def test_the_page_of_corrections_names_every_correction() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "corrections.md").read_text()
    assert all(f"`{name}`" in page for name in corrections.CORRECTIONS)
