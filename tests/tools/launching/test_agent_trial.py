"""An agent is tried before a run, and without one: what the documentation's example does, and what
is said of an agent that cannot begin."""

import ast
import re
import sys
from pathlib import Path

import pytest

from coppice.tools.bootstrap import ROOT
from coppice.tools.launching.command import main

PAGE = (ROOT / "docs" / "agents.md").read_text()
EXAMPLE = ROOT / "examples" / "ten_lines.py"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's config and a file of tasks, in the working folder, with the agent ``own``."""
    config = re.search(r"```toml\n# agent.toml\n(.*?)```", PAGE, re.DOTALL)
    assert config is not None
    (tmp_path / "agent.toml").write_text(config[1])
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text(
            '{"question": "1 + 1?", "golden_answers": ["2"], "unit": "apples"}\n'
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return tmp_path


def test_the_first_example_of_the_page_is_the_file_and_needs_no_library() -> None:
    code = EXAMPLE.read_text().partition('"""\n\n')[2]
    assert f"```python\n# examples/ten_lines.py\n{code}```" in PAGE
    modules = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(code))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [getattr(node, "module", None)]
        )
        if name
    }
    assert modules and modules <= sys.stdlib_module_names


@pytest.mark.slow
def test_the_agent_of_the_page_is_tried_as_the_page_says(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", "agent.toml", "--try-agent", "2"]) == 0
    said = capfd.readouterr().out
    assert (
        "call 1: user: 1 + 1?\n  reply: 2\n" in said
        and "call 2: user: Are you sure? Answer again.\n" in said
    )
    assert said.endswith("the episode ended after 2 calls: reward 1\n")


@pytest.mark.slow
def test_a_crash_in_a_trial_is_shown_with_the_output_and_the_columns_of_the_row(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = "    ask([{'role': 'user', 'content': task['unit']}])\n    return 'no'\n"
    agent = f"from examples.ten_lines import ask\ndef run(task):\n{body}"
    (folder / "own.py").write_text(agent)
    assert main(["--config", "agent.toml", "--set", "data.agent=own:run", "--try-agent"]) == 1
    said = capfd.readouterr().out
    assert "call 1: user: apples" in said
    assert "exit status 1: ValueError: own:run returned 'no'" in said and "Traceback" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (["data.agent=own:run"], "No module named 'not_there'). Mend the agent"),
        (["data.agent=missing-program x"], "x' cannot be started: there is no program"),
        (["data.options.pass_env=['NOT_SET_KEY']"], "names 'NOT_SET_KEY', which is not set"),
        (["data.options.python=nowhere/python"], "= 'nowhere/python': there is no such program"),
    ],
)
def test_an_agent_that_cannot_begin_is_refused_before_the_set_up(
    folder: Path,
    settings: list[str],
    refusal: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder / "own.py").write_text("import not_there\n")
    monkeypatch.setattr(
        "coppice.tools.launching.prepare._prepare", lambda config: pytest.fail("set up")
    )
    assert (
        main(["--config", "agent.toml", *(word for one in settings for word in ("--set", one))])
        == 2
    )
    assert refusal in capfd.readouterr().err
