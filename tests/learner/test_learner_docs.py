"""docs/learner.md: the new scheme runs as written, and the tables name what exists."""

import re
from pathlib import Path

import numpy as np
import pytest

from learner import corrections, schemes
from learner.table import TurnTable

PAGE = (Path(__file__).parent.parent.parent / "docs" / "learner.md").read_text()


def test_the_scheme_of_the_page_is_one_file_and_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    (tmp_path / "best.py").write_text(code[1])
    monkeypatch.setattr(schemes, "__path__", [*schemes.__path__, str(tmp_path)])
    table = TurnTable(
        tree=np.array([0, 0, 0]), group=np.array([0, 0, 0]), trajectory=np.array([0, 0, 1]), turn=np.array([1, 2, 1]),
        tokens=np.array([1, 1, 2]), scores={"outcome": np.array([np.nan, 1.0, 0.0])},
    )  # fmt: skip
    assert schemes.load("best", {})(table).advantages.tolist() == [0.5, 0.5, 0.0, 0.0]
    with pytest.raises(ValueError, match="takes"):
        schemes.load("best", {"colum": "outcome"})


def test_the_page_names_every_scheme() -> None:
    assert all(f"`{name}`" in PAGE for name in schemes.names())


def test_the_page_of_corrections_names_every_correction() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "corrections.md").read_text()
    assert all(f"`{name}`" in page for name in corrections.CORRECTIONS)
