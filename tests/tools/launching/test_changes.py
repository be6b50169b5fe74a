"""What a resume may change of a run, and that a new run is never mixed with one that is there."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from coppice.tools.launching import changes, processes
from coppice.tools.launching.command import main
from coppice.tools.launching.config import DEFAULT_CONFIG, ROOT, convert, load
from coppice.tools.launching.settings import Assets, Config
from tests.run_folder import make
from tests.tools.said import Said, known_setting

JUDGED = [
    'judges.use.slate.endpoint={url = "http://127.0.0.1:1/v1", model = "m"}',
    "scheduler.judge=slate",
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    changes.record(tmp_path / "run", load(DEFAULT_CONFIG, ["learner.lr=1e-4"]))
    return tmp_path / "run"


def saved(run: Path) -> dict[str, Any]:
    return json.loads((run / "config.json").read_bytes())


@pytest.mark.usefixtures("nothing_made")
def test_a_new_run_takes_no_others_folder(tmp_path: Path, refused: Said) -> None:
    run = make(tmp_path / "run", ended=False)
    config, other = saved(run), ROOT / "configs" / "vpr-tictactoe-cpu.toml"
    told = refused(main, "--config", other, "--run-folder", run)
    assert f"{run} holds a run already: go on with it by" in told
    assert saved(run) == config


@pytest.mark.second
@pytest.mark.usefixtures("ends_at_once")
def test_a_resume_says_what_it_changes_and_keeps_the_configs(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def changed(*words: str, status: int = 1) -> list[str]:
        assert main(["--resume", str(run), *words]) == status
        return re.findall("changed: (.*)", capsys.readouterr().out)

    staleness, rate = "scheduler.max_staleness: 1 -> 3", "learner.lr: 0.0001 -> 5e-05"
    assert {*changed("learner.lr=5e-5", "scheduler.max_staleness=3")} == {staleness, rate}
    assert changed() == []
    again = ["scheduler.max_staleness: 3 -> 2"]
    assert changed("scheduler.max_staleness=2", "--dry-run", status=0) == again
    assert changed("scheduler.max_staleness=2") == again
    configs = [*changes.former(run), saved(run)]
    assert [config["scheduler"]["max_staleness"] for config in configs] == [1, 3, 2]


@pytest.mark.usefixtures("nothing_made")
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["scheduler.questions_per_update=2"], "16 -> 2 (its trees were admitted by that)"),
        (["scheduler.hops_in_turn=true"], "(its tasks and ids were drawn by it)"),
        (["model.name=other"], '"tiny-search" -> "other" (its weights began with that)'),
        (["method=grpo"], 'method: "slate" -> "grpo" (its trees have that shape)'),
        (JUDGED, 'scheduler.judge: "slate_rules" -> "slate" (its trees were scored so)'),
    ],
)
def test_what_would_spoil_old_trees_is_refused(
    overrides: list[str], said: str, run: Path, refused: Said
) -> None:
    config = saved(run)
    error = refused(main, "--resume", run, *overrides)
    assert f"--resume {run} cannot change " in error and said in error
    assert "remove the change, or begin another run" in error
    assert saved(run) == config


def test_where_a_judge_is_reached_may_change_and_how_it_judges_may_not(tmp_path: Path) -> None:
    changes.record(tmp_path, load(DEFAULT_CONFIG, JUDGED))
    moved = convert(saved(tmp_path), ["judges.use.slate.endpoint.url=http://127.0.0.1:2/v1"])
    changes.check(tmp_path, moved)
    (change,) = changes.changes(tmp_path, moved)
    assert change.key == "judges.use.slate.endpoint.url"
    with pytest.raises(ValueError, match=r'endpoint\.model: "m" -> "n"'):
        changes.check(tmp_path, convert(saved(tmp_path), ["judges.use.slate.endpoint.model=n"]))


def test_a_run_of_an_earlier_release_has_the_defaults_of_the_keys_that_it_lacks(run: Path) -> None:
    config = saved(run)
    del config["scheduler"]["top_k"], config["learner"]["watch"]
    (run / "config.json").write_text(json.dumps(config))
    assert changes.changes(run, convert(config, [])) == []


def test_the_rule_names_keys_that_exist() -> None:
    keys = [key for keys in (*changes.FIXED.values(), changes.REACHED) for key in keys]
    paths = [key.removesuffix(".*").removesuffix("*").split(".") for key in keys]
    assert [path for path in paths if not known_setting(Config, path)] == []


def test_the_index_is_among_what_trees_are_made_from(tmp_path: Path) -> None:
    index = tmp_path / "index" / "manifest.json"
    index.parent.mkdir()
    index.write_text("{}")
    for retriever, expected in ((str(index.parent), str(index)), ("http://one", None), ("", None)):
        processes.make(load(DEFAULT_CONFIG, []), Assets("M", "", "", retriever), tmp_path)
        scheduler = tmp_path / "processes" / "scheduler.json"
        assert json.loads(scheduler.read_bytes())["inputs"].get("index") == expected
