"""Keys are changed by key=value, with or without --set, and a plug-in may be named by its file."""

from pathlib import Path

import pytest

from coppice.tools.launching.command import arguments, resolve
from coppice.tools.launching.config import DEFAULT_CONFIG, ConfigError, load

JUDGE = """
from coppice.judges.base import Judge

class Brevity(Judge):
    name, columns = "brevity", ("think", "query", "answer")
"""


def test_a_key_is_changed_by_key_value_alone_between_other_options() -> None:
    given = [
        "scheduler.updates=7",
        "--actors",
        "2",
        "learner.lr=1e-5",
        "--set",
        "seed=3",
        "--learner",
        "1",
    ]
    config, _ = resolve(arguments(given))
    assert (config.scheduler.updates, config.learner.lr, config.seed) == (7, 1e-5, 3)
    assert (config.actors.count, config.learner.count) == (2, 1)


def test_a_word_that_is_no_change_is_refused_with_an_example() -> None:
    with pytest.raises(ConfigError, match=r"'slate': expected key=value, such as learner.lr=1e-6"):
        resolve(arguments(["slate"]))


def test_a_plug_in_is_named_by_the_path_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judges").mkdir()  # a folder that has the name of one of ours
    (tmp_path / "judges" / "mine.py").write_text(JUDGE)
    monkeypatch.chdir(tmp_path)
    changes = ["scheduler.judge=brevity", 'judges.use."./judges/mine.py:Brevity"={}']
    config = load(DEFAULT_CONFIG, changes)
    assert config.judges.use["./judges/mine.py:Brevity"] == {}


def test_a_strategy_and_a_scheme_of_one_file_declare_themselves(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    scheme = tmp_path / "own.scheme.py"
    scheme.write_text((root / "learner" / "schemes" / "slate.py").read_text())
    config = load(DEFAULT_CONFIG, [f"learner.scheme={scheme}:advantages"])
    assert config.learner.scheme == f"{scheme}:advantages"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("./nowhere.py:Judge", "No such file"),
        ("./broken.py:Judge", "division by zero"),
        ("./broken:Judge", "module"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused_with_its_cause(
    place: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"{said}.*or \./file\.py:Class"):
        load(DEFAULT_CONFIG, ["scheduler.judge=x", f'judges.use."{place}"={{}}'])
