"""Runs that are killed at every kind of point: each task is trained exactly once, and a
deterministic run ends with the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coppice.common.atomic import write_whole
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.inspecting.audit import Violation, audit
from coppice.wire import digest
from tests.faults.one_process import POINTS, QUESTIONS, UPDATES, Plan

RUNS = ["undisturbed", "early", "late", "damaged"]


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    """A folder with runs that lived through all crash points, and one that was not disturbed."""
    place = tmp_path_factory.mktemp("lives")
    points = list(POINTS)
    plans = {
        "undisturbed": Plan(str(llama), 1, []),
        "early": Plan(str(llama), 2, [points[3], *points[:3], *points[4:6]]),
        "late": Plan(str(llama), 1, [points[12], *points[6:11]], keep=1),
        "damaged": Plan(str(llama), 1, points[9:12], damage=True, keep=1),
        "sifted": Plan(str(llama), 4, [], sifted=2),
        "sifted late": Plan(str(llama), 4, [points[9], points[8], points[2]], sifted=2),
        "stale": Plan(str(llama), 1, [points[7], points[9]], staleness=1, deterministic=False),
    }
    write_whole(place / "lives.json", plans)
    command = [sys.executable, "-m", "tests.faults.one_process", str(place)]
    one = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=one, check=True, timeout=600)
    return place


def weights(run: Path) -> str:
    checkpoint = run / "checkpoints" / f"v{UPDATES:06d}"
    return digest.safetensors_file(checkpoint / "policy-00000.safetensors")


def test_every_life_ends_at_its_crash_point_and_the_last_one_with_the_run(lived: Path) -> None:
    lives = {"undisturbed": 0, "early": 6, "late": 6, "damaged": 3, "stale": 2}
    lives |= {"sifted": 0, "sifted late": 3}
    for name, killed in lives.items():
        assert json.loads((lived / name / "codes.json").read_text()) == [-9] * killed + [0]
    assert list((lived / "damaged" / "checkpoints").glob("*.damaged"))


@pytest.mark.parametrize("name", RUNS)
def test_a_deterministic_run_ends_with_the_same_bits_wherever_it_was_killed(
    lived: Path, name: str
) -> None:
    assert weights(lived / name) == weights(lived / "undisturbed")


def test_a_deterministic_run_replaces_the_same_trees_wherever_it_was_killed(lived: Path) -> None:
    assert weights(lived / "sifted late") == weights(lived / "sifted")
    journal = Journal(lived / "sifted late" / "journal.sqlite", readonly=True)
    assert journal.trees("status='replaced'")
    assert audited(lived / "sifted late", 0) == []


def audited(run: Path, bound: int) -> list[Violation]:
    (run / "config.json").write_text(f'{{"scheduler": {{"max_staleness": {bound}}}}}')
    return audit(run)


def test_a_run_with_stale_data_trains_every_task_once_too(lived: Path) -> None:
    assert audited(lived / "stale", 1) == []
    assert {v.rule for v in audited(lived / "stale", 0)} == {"within the staleness bound"}


@pytest.mark.parametrize("name", RUNS)
def test_every_task_is_trained_exactly_once_and_every_update_has_one_record(
    lived: Path, name: str
) -> None:
    assert audited(lived / name, 0) == []
    journal = Journal(lived / name / "journal.sqlite", readonly=True)
    trees = journal.trees("split='train'")
    assert [tree.position for tree in trees] == list(range(UPDATES * QUESTIONS))
    assert [version for tree in trees for _, version in journal.groups(tree.id)] == [
        version for version in range(1, UPDATES + 1) for _ in range(QUESTIONS)
    ]
    removed = [tree.position for tree in trees if tree.removed]
    assert removed == [*range(len(removed))] and bool(removed) == (name in ("late", "damaged"))
    records = map(json.loads, (lived / name / "metrics.jsonl").read_text().splitlines())
    versions = [record["version"] for record in records if "learner/groups" in record]
    assert versions == list(range(1, UPDATES + 1))
