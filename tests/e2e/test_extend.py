"""docs/extend.md does what it says: every file and every command of the page, from a config to a
finished tiny run."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from coppice.tools.bootstrap import ROOT

PAGE = (ROOT / "docs" / "extend.md").read_text()
TRY, *SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_page_has_a_section_for_each_kind_of_plug_in() -> None:
    kinds = [section.partition(":")[0] for section in SECTIONS]
    assert kinds == ["Scheme", "Correction", "Judge", "Strategy", "Environment", "Engine"]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition(":")[0].lower())
def test_a_plug_in_of_the_page_runs_as_the_page_says(section: str, tmp_path: Path) -> None:
    for code in blocks(section, "python"):
        (tmp_path / code.partition("\n")[0].removeprefix("# ")).write_text(code)
    (given,), (command,) = blocks(TRY, "sh"), blocks(section, "sh")
    script = f"{given}{command.strip()} --run-folder run".replace(
        "coppice launch", str(ROOT / "tools" / "launch")
    )
    done = subprocess.run(
        ["bash", "-ec", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    updates = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [update["version"] for update in updates if "learner/seconds" in update] == [1]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    (module,) = {path.stem for path in tmp_path.glob("*.py")}
    assert f"{module}:" in json.dumps(config)
