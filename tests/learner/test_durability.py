"""What the learner leaves on disk, whole or not at all: checkpoints, proven before the one before
goes and set aside when damaged, and published weights."""

import os
import random
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from coppice.common import frontier
from coppice.learner.config import LearnerConfig
from coppice.learner.model import checkpoint
from coppice.learner.model.model import check_fits
from coppice.learner.model.publish import Publisher, announce
from coppice.learner.model.ranks import Ranks
from coppice.wire import digest
from coppice.wire.published import Weights
from tests.learner.conftest import Make
from tests.updates import batch, changed, everything


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def two(tmp_path: Path, make: Make) -> tuple[Path, Path]:
    learner = make()
    learner.update(batch(0, 0))
    first = checkpoint.save(learner, tmp_path, [(1, 1, 1)], 3)
    learner.update(batch(1, 1))
    return first, checkpoint.save(learner, tmp_path, [(1, 1, 1), (2, 2, 2)], 3)


Two = tuple[Path, Path]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_all_is_synced_before_the_checkpoint_has_its_name_and_its_place_after(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def syncing(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renaming(path: Path, target: Path) -> Path:
        calls.append(f"rename {path.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(Path, "rename", renaming)
    learner = make()
    learner.version = 7
    folder = checkpoint.save(learner, tmp_path, [], 3)
    named = calls.index("rename v000007.draft")
    assert {*names(folder), "v000007.draft"} <= set(calls[:named])
    assert calls[named + 1 :] == ["checkpoints", tmp_path.name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["state.json", "policy-00000.safetensors", digest.SUMS])
@pytest.mark.parametrize("fault", ["flipped", "missing", "cut"])
def test_a_damaged_newest_checkpoint_is_set_aside_by_name_and_the_one_before_is_restored(
    tmp_path: Path, make: Make, two: Two, name: str, fault: str
) -> None:
    first, second = two
    file = second / name
    if fault == "flipped":
        flip(file)
    elif fault == "missing":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2)
    expected, resumed = make(), make()
    checkpoint.restore(expected, first)
    restored, (warning,) = checkpoint.restore_newest(resumed, tmp_path)
    assert (restored.version, restored.groups(), resumed.version) == (1, {1: 1}, 1)
    assert "v000002" in warning
    assert "from version 1" in warning
    assert not changed(everything(resumed), everything(expected))
    assert names(first.parent) == ["v000001", "v000002.damaged"]


class SecondOfTwo:
    """Rank 1 of two ranks; the other one has found damage in its share of the files."""

    rank, count, sharded = 1, 2, False

    def add(self, values: torch.Tensor) -> torch.Tensor:
        return values + torch.ones(2)


def test_a_rank_loads_nothing_where_another_finds_damage(make: Make, two: Two) -> None:
    second, resumed = two[1], make()
    os.truncate(second / "policy-00000.safetensors", 10)  # in the share of rank 0
    before = everything(resumed)
    resumed.ranks = SecondOfTwo()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(checkpoint.DamagedError, match="another rank could not read it"):
        checkpoint.restore(resumed, second)
    assert not changed(before, everything(resumed))


def test_only_damage_of_every_checkpoint_ends_the_run(tmp_path: Path, make: Make, two: Two) -> None:
    for folder in two:
        flip(folder / "policy-00000.safetensors")
    for _ in range(2):
        with pytest.raises(checkpoint.CheckpointError, match=r"no checkpoint of .* can be read"):
            checkpoint.restore_newest(make(), tmp_path)
    assert names(tmp_path / "checkpoints") == ["v000001", "v000002"]


def test_a_run_that_lost_its_checkpoints_says_what_is_done_again(
    tmp_path: Path, make: Make
) -> None:
    assert checkpoint.restore_newest(make(), tmp_path) == (checkpoint.State(), [])
    announce(tmp_path, Weights(3))
    state, (warning,) = checkpoint.restore_newest(make(), tmp_path)
    assert (state.version, "its 3 updates are trained again" in warning) == (0, True)


def test_the_checkpoint_before_stays_until_the_new_one_reads_back(
    tmp_path: Path, make: Make, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def failing_disk(draft: Path, out: Path) -> Path:
        flip(draft / "policy-00000.safetensors")
        return rename(draft, out)

    monkeypatch.setattr(Path, "rename", failing_disk)
    learner = make()
    learner.version = 3
    told = r"v000003 could not be written .*not what was written"
    with pytest.raises(checkpoint.CheckpointError, match=told):
        checkpoint.save(learner, tmp_path, [], 1)
    assert names(tmp_path / "checkpoints") == ["v000001", "v000002", "v000003.damaged"]


def test_what_a_plug_in_draws_depends_on_seed_and_version(make: Make) -> None:
    def drawn(version: int) -> list[float]:
        make().update(batch(0, version))
        return [random.random(), np.random.random(), float(torch.rand(1))]

    assert drawn(3) == drawn(3)
    assert all(a != b for a, b in zip(drawn(3), drawn(4), strict=True))


def test_a_frontier_is_stored_as_runs_and_the_newest_one_is_read(tmp_path: Path) -> None:
    groups = {4: 1, 5: 1, 6: 2, 8: 2, 9: 2}
    stored = frontier.runs(groups)
    assert stored == [(4, 5, 1), (6, 6, 2), (8, 9, 2)]
    assert frontier.Frontier(2, stored).groups() == groups
    folder = tmp_path / "checkpoints" / "v000003"
    folder.mkdir(parents=True)
    (folder / frontier.FILE).write_text('{"version": 3, "trained": [[1, 2, 3]]}')
    assert frontier.read(tmp_path, 3).groups() == {1: 3, 2: 3}
    with pytest.raises(ValueError, match="the oldest checkpoint is v000003"):
        frontier.read(tmp_path, 2)  # nothing is known of what version 2 has trained
    assert frontier.read(tmp_path / "new", 0) == frontier.Frontier()


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, make: Make, two: Two) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(checkpoint.CheckpointError, match="the one before is untouched"):
            checkpoint.save(make(), tmp_path, [], 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(tmp_path / "checkpoints") == ["v000001", "v000002"]
    assert checkpoint.restore(make(), two[1]).groups() == {1: 1, 2: 2}


@pytest.mark.parametrize(
    ("rank", "told"), [(0, "other parameters"), (8, r"another model.*learner\.lora\.rank")]
)
def test_a_checkpoint_of_another_parametrisation_is_refused_and_not_called_damage(
    make: Make, two: Two, rank: int, told: str
) -> None:
    with pytest.raises(checkpoint.CheckpointError, match=told):
        checkpoint.restore(make(rank), two[0])


def test_the_last_checkpoints_are_kept(tmp_path: Path, make: Make, two: Two) -> None:
    made = make()
    made.version = 3
    checkpoint.save(made, tmp_path, [], 2)
    assert names(tmp_path / "checkpoints") == ["v000002", "v000003"]


def test_published_weights_stay_for_as_long_as_an_evaluation_may_be_behind(
    tmp_path: Path, make: Make
) -> None:
    for stale, kept in ((0, [4, 5]), (2, [2, 3, 4, 5])):
        run = tmp_path / str(stale)
        publisher = Publisher(make().policy, run, LearnerConfig(keep=1), max_staleness=stale)
        for version in range(1, 6):
            publisher.publish(version)
        assert names(run / "weights") == [f"v{version:06d}" for version in kept]


def test_a_model_too_large_is_refused_before_it_is_loaded(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    config, ranks = LearnerConfig(), Ranks(60)
    with pytest.raises(FileNotFoundError, match="safetensors"):
        check_fits(str(tmp_path), config, ranks)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**42)  # sparse: takes no space
    with pytest.raises(MemoryError, match=r"most is for frozen weights; take learner\.sharding"):
        check_fits(str(tmp_path), config, ranks)


@pytest.mark.parametrize("rank", [0, 4])
def test_moments_in_main_memory_give_the_same_checkpoints(
    tmp_path: Path, make: Make, rank: int
) -> None:
    sums: list[str] = []
    for away in (False, True):
        made, again = make(rank, offload_optimizer=away), make(rank, offload_optimizer=away)
        made.update(batch(3, 0))
        checkpoint.restore(again, checkpoint.save(made, tmp_path / str(away), [], 3))
        again.update(batch(9, 1))
        folder = checkpoint.save(again, tmp_path / str(away), [], 3)
        sums.append((folder / "SHA256SUMS").read_text())
    for state_ in again.stepper.adamw.state.values():  # between steps nothing has storage
        held = (state_[moment] for moment in ("exp_avg", "exp_avg_sq"))
        assert not any(moment.untyped_storage().nbytes() for moment in held)
    assert sums[0] == sums[1]
