"""docs/extend.md does what it says: every file and every command of the page, from a config to a
finished tiny run."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.forks import ROOT
from tests.runs import Launch

PAGE = (ROOT / "docs" / "extend.md").read_text()
TRY, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_page_has_a_section_for_each_kind_of_plug_in() -> None:
    kinds = [section.partition(":")[0] for section in SECTIONS]
    assert kinds == ["Scheme", "Correction", "Judge", "Strategy", "Environment", "Engine"]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition(":")[0].lower())
def test_a_plug_in_of_the_page_runs_as_the_page_says(
    section: str, tmp_path: Path, launch: Launch
) -> None:
    for code in blocks(section, "python"):
        (tmp_path / code.partition("\n")[0].removeprefix("# ")).write_text(code)
    (given,), (command,) = blocks(TRY, "sh"), blocks(section, "sh")
    script = f"{given}\nset -- {command.strip()}\nprintf '%s\\0' \"$@\""
    words = subprocess.run(
        ["bash", "-ec", script], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    assert words[:2] == ["coppice", "launch"]
    run = launch(None, "", *words[2:-1], cwd=tmp_path)
    run.finish()
    assert [r["version"] for r in run.records() if "learner/seconds" in r] == [1]
    (module,) = {path.stem for path in tmp_path.glob("*.py")}
    assert f"{module}:" in json.dumps(json.loads((run.folder / "config.json").read_text()))
