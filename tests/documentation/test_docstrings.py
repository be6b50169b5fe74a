"""The reference shows every key of a config, and docstrings as they are written."""

from pathlib import Path

import griffe
import pytest

from docs.site.docstrings import readable

ROOT = Path(__file__).parents[2]
CONFIGS = (
    "scheduler.config scheduler.dispatch.calls actors.config judges.config learner.config"
    " tools.launching.settings tools.defaults.settings"
).split()


def test_tags_stay_and_drawings_become_code() -> None:
    assert (
        readable("a <think> `<b>` < 3\n\nx    y")
        == "a &lt;think> `<b>` < 3\n\n```text\nx    y\n```"
    )


@pytest.mark.second
@pytest.mark.parametrize("module", CONFIGS)
def test_every_key_of_a_config_section_is_described(module: str) -> None:
    read = griffe.load(f"coppice.{module}", search_paths=[ROOT / "src"], allow_inspection=False)
    assert isinstance(read, griffe.Module)
    sections = [
        one
        for one in read.classes.values()
        if "Section [" in str(one.docstring and one.docstring.value)
    ]
    keys = [key for section in sections for key in section.attributes.values()]
    assert keys
    needs = [key for key in keys if "Config" not in str(key.annotation)]
    assert [key.name for key in needs if key.docstring is None] == []
