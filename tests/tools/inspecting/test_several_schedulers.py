"""Every tool shows the whole run, also when several schedulers have a part of it each."""

import json
import re
from pathlib import Path

import pytest

from tests import run_folder
from tools.inspecting import critical, dump, frames, notebook, report, runs, trace, watched
from tools.launching import status
from wire.shards import Shard, folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three updates of two trees, one of each scheduler."""
    for number in range(2):
        run_folder.make(
            folder(tmp_path / "run", number), exact={} if number else {0: 0.25, 3: 0.75}, shard=Shard(number, 2)
        )
    return tmp_path / "run"


def test_dump_finds_the_trees_of_all_journals(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dump.main([str(run), "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["5", "4", "3", "2", "1", "0"]
    assert dump.main([str(run), "--tree", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tree"] == 5
    assert dump.main([str(folder(run, 1)), "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["5", "3", "1"]


def test_frames_have_the_seconds_of_every_scheduler_s_calls(run: Path) -> None:
    trees, nodes = frames.read(run)
    assert trees["generate_s"].to_list() == [run_folder.GENERATED_S] * 6
    assert nodes["tree"].n_unique() == 6
    assert len(notebook.Run(run).records) == 3


def test_the_trace_has_the_calls_of_all_actors(run: Path) -> None:
    start = critical.recorded(run, runs.read(run).records)
    assert {call.worker for call in start.calls if call.start >= start.began} == {"actor-0", "actor-1"}
    assert [update.trees for update in start.updates] == [{0, 1}, {2, 3}, {4, 5}]
    assert trace.main([str(run), "--out", str(run / "trace.json")]) == 0
    names = re.findall(r'"name":"(actor-\d|learner)"', (run / "trace.json").read_text().replace(" ", ""))
    assert {"actor-0", "actor-1", "learner"} <= set(names)


def test_the_report_counts_all_trees_and_shows_the_rollouts_of_both(run: Path) -> None:
    assert report.main([str(run), "--out", str(run / "report.html")]) == 0
    page = (run / "report.html").read_text()
    assert re.search(r"trees closed.{0,40}>6<", page, re.DOTALL)
    read = runs.read(run)
    assert (read.missing, read.name) == ([], "run")


def test_watch_and_status_see_both(run: Path) -> None:
    look = watched.Reader(run).look()
    assert [row[0] for row in look.trees] == ["5", "4", "3", "2", "1", "0"]
    assert len(look.records) == 3
    assert status.gather(run, 0.0).trees == {"closed": 6}
