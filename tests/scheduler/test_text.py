"""The chat format: a template's switches, models without a template, and a template with a date."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from coppice.scheduler.growth.text import Text

TEMPLATE = """{% if tools %}{{ tools | tojson }}
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
USER, RESULT = {"role": "user", "content": "hi"}, {"role": "tool", "content": "found"}
REPLY = np.empty(0, np.int32)


def text_of(folder: Path, llama: Path, template: str) -> Text:
    shutil.copytree(llama, folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("chat_template", None)
    path.write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return Text(str(folder))


@pytest.mark.parametrize("thinking", [True, False])
def test_every_turn_is_asked_not_to_think_with_tools_and_without(
    tmp_path: Path, llama: Path, thinking: bool
) -> None:
    text, end = text_of(tmp_path / "m", llama, TEMPLATE), "" if thinking else "<think></think>"
    for shown in (
        text.prompt([USER], thinking),
        text.prompt([USER], thinking, [TOOL]),
        text.after(REPLY, [USER], thinking),
        text.after(REPLY, [RESULT], thinking),
    ):
        assert shown.endswith(f"assistant:{end}")


def test_without_a_template_tools_and_their_results_are_plain_text(
    tmp_path: Path, llama: Path
) -> None:
    text = text_of(tmp_path / "m", llama, "")
    assert text.prompt([USER]) == "hi\n"
    shown = text.prompt([USER], tools=[TOOL])
    assert json.dumps(TOOL) in shown and shown.endswith("\nhi\n")
    assert "found" in text.after(REPLY, [RESULT])


def test_a_templates_date_is_that_of_the_start(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_of(tmp_path / "m", llama, "{{ strftime_now('%d %s') }}" + TEMPLATE)
    before, later = text.prompt([USER]), time.time() + 100_000
    monkeypatch.setattr(time, "time", lambda: later)
    monkeypatch.setattr(time, "localtime", lambda *_: time.gmtime(later))
    assert text.prompt([USER]) == before
