"""The plan of a run of several schedulers, and the settings that are refused with it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from coppice.actors.config import ActorProcess
from coppice.common.shards import Shard, folder
from coppice.judges.serve import JudgeProcess
from coppice.learner.config import LearnerProcess
from coppice.scheduler.config import SchedulerProcess
from coppice.tools.launching import processes
from coppice.tools.launching.config import DEFAULT_CONFIG, ConfigError, load
from coppice.tools.launching.settings import Assets

TWO = ["scheduler.shards=2", "actors.count=3", "scheduler.questions_per_update=6"]
TWO += ["learner.count=1", "scheduler.trackers=['trackio']"]


def read(run: Path, name: str, kind: type[Any]) -> Any:
    return msgspec.json.decode((run / "processes" / f"{name}.json").read_bytes(), type=kind)


def test_every_shard_has_its_own_workers_and_its_part_of_an_update(tmp_path: Path) -> None:
    assets = Assets("MODEL", "TRAIN", "HELDOUT", "INDEX")
    plan = processes.make(load(DEFAULT_CONFIG, TWO), assets, tmp_path)
    assert {(p.name, p.shard) for p in plan if not p.name.startswith("learner")} == {
        *((name, 0) for name in ("scheduler", "judges", "retriever", "actor-0", "actor-2")),
        *((name, 1) for name in ("scheduler-1", "judges-1", "retriever-1", "actor-1")),
    }
    assert {p.name for p in plan if p.vital} == {"scheduler", "learner-0"}
    first = read(tmp_path, "scheduler", SchedulerProcess)
    second = read(tmp_path, "scheduler-1", SchedulerProcess)
    assert (first.shard, second.shard) == (Shard(0, 2), Shard(1, 2))
    assert (first.actors, second.actors) == (2, 1)
    assert (first.scheduler.questions_per_update, second.scheduler.questions_per_update) == (3, 3)
    assert second.scheduler.evaluation.questions == 0
    assert (first.scheduler.trackers, second.scheduler.trackers) == (["trackio"], [])
    learner = read(tmp_path, "learner", LearnerProcess)
    assert (learner.run, learner.questions_per_update, learner.shards) == (str(tmp_path), 6, 2)
    assert read(tmp_path, "actor-1", ActorProcess).run == str(folder(tmp_path, 1))
    assert read(tmp_path, "judges-1", JudgeProcess).run == str(folder(tmp_path, 1))


@pytest.mark.parametrize(
    ("settings", "gpus", "spare", "ranks"),
    [
        ([], [], [False, False, True], 2),
        (["actors.threads=2", "learner.count=1"], [], [False, True, True], 1),
        (["actors.threads=8", "learner.threads=2"], [], [False, True, True], 1),
        (["deterministic=true", "scheduler.max_staleness=0"], [], [False] * 3, 4),
        ([], ["0"], [False] * 3, 4),
    ],
)
def test_actors_and_ranks_beyond_the_cores_compute_nothing(
    settings: list[str], gpus: list[str], spare: list[bool], ranks: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(processes.hardware, "cores", lambda: 2)
    monkeypatch.setattr(processes.hardware, "visible_gpus", lambda: gpus)
    config = load(DEFAULT_CONFIG, ["actors.count=3", *settings])
    processes.make(config, Assets("MODEL", "TRAIN", "HELDOUT", "INDEX"), tmp_path)
    actors = [read(tmp_path, f"actor-{place}", ActorProcess) for place in range(len(spare))]
    assert [actor.spare for actor in actors] == spare
    assert read(tmp_path, "learner", LearnerProcess).computing == ranks


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("scheduler.questions_per_update=5", "questions_per_update = 5 WITH a multiple of 2"),
        ("actors.count=1", "actors.count = 1 WITH at least 2, one for each scheduler"),
        ("scheduler.bind='tcp://127.0.0.1:7000'", "WITH port 0"),
        ("deterministic=true", "deterministic = true WITH 1"),
    ],
)
def test_what_several_schedulers_cannot_share_is_refused(override: str, said: str) -> None:
    said = said.replace("WITH", "with scheduler.shards = 2: expected")
    with pytest.raises(ConfigError, match=said):
        load(DEFAULT_CONFIG, [*TWO, override])
    many = ["scheduler.shards=12", "actors.count=12", "scheduler.questions_per_update=12"]
    with pytest.raises(ConfigError, match="shards = 12: expected at most 11, as many journals as"):
        load(DEFAULT_CONFIG, many)
