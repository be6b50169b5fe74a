"""The best version's weights outlive the learner's clearing up, and the tools find them."""

import os
import shutil
from pathlib import Path

import pytest

from coppice.scheduler.evaluation import best
from coppice.tools.evaluating import versions
from coppice.wire.published import Manifest, Weights, chain


def published(run: Path, version: int, file: bool = True) -> Weights:
    """A version as the learner writes it, the three newest kept."""
    folder = run / "weights" / f"v{version:06d}"
    folder.mkdir(parents=True)
    if file:
        (folder / "model.safetensors").write_bytes(b"weights %d" % version)
    Manifest(version, "full", "d" * 64, file).write(folder)
    for old in sorted(folder.parent.glob("v??????"))[:-3]:
        shutil.rmtree(old)
    return Weights(version, str(folder), "d" * 64)


def after(run: Path, values: list[float]) -> None:
    """A run whose versions 0, 1, .. reach ``values``."""
    for version, value in enumerate(values):
        best.keep(run, published(run, version) if version else Weights(), "em", value)


def kept(run: Path) -> tuple[best.Best, Path]:
    found = best.read(run)
    assert found is not None
    return found


def test_the_best_of_all_evaluated_versions_is_there_at_the_end(tmp_path: Path) -> None:
    after(tmp_path, [0.1, 0.3, 0.5, 0.4, 0.2, 0.45, 0.5])
    found = kept(tmp_path)
    assert found[0] == best.Best(2, "em", 0.5)
    assert (found[1] / "model.safetensors").read_bytes() == b"weights 2"
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["v000002"]
    assert versions.chosen(tmp_path, "best") == (2, found[1])
    assert versions.chosen(tmp_path, 2) == (2, found[1])
    assert versions.chosen(tmp_path, None)[0] == 6
    told = r"--version 3: .* holds \[2, 4, 5, 6\] \(the newest, best 2\), and 0"
    with pytest.raises(ValueError, match=told):
        versions.chosen(tmp_path, 3)


def test_the_newest_version_is_not_the_best_one_that_a_crash_has_undone(tmp_path: Path) -> None:
    after(tmp_path, [0.1, 0.2, 0.9])
    shutil.rmtree(tmp_path / "weights" / "v000002")
    assert versions.chosen(tmp_path, None)[0] == 1
    assert versions.chosen(tmp_path, "best")[0] == 2


def test_the_best_version_keeps_the_chain_that_it_is_made_of(tmp_path: Path) -> None:
    for number, digest in ((1, "a"), (2, "b"), (3, "c")):
        folder = tmp_path / "weights" / f"v{number:06d}"
        folder.mkdir(parents=True)
        (folder / ("model" if number == 1 else "delta-00000")).write_bytes(b"%d" % number)
        previous = (number - 1, "ab"[number - 2]) if number > 1 else None
        Manifest(number, "full", digest, previous=previous).write(folder)
    assert best.keep(tmp_path, Weights(3, str(tmp_path / "weights" / "v000003"), "c"), "em", 0.4)
    shutil.rmtree(tmp_path / "weights")
    links = chain(kept(tmp_path)[1], "c")
    assert [link.digest for _, link in links] == ["a", "b", "c"]
    assert (links[0][0] / "model").read_bytes() == b"1"
    assert (links[2][0] / "delta-00000").read_bytes() == b"3"


def test_a_version_that_a_crash_has_undone_gives_way_to_a_better_one(tmp_path: Path) -> None:
    after(tmp_path, [0.1, 0.5])
    shutil.rmtree(tmp_path / "weights")
    again = published(tmp_path, 1)
    (Path(again.path) / "model.safetensors").write_bytes(b"trained again")
    assert not best.keep(tmp_path, again, "em", 0.4) and best.keep(tmp_path, again, "em", 0.8)
    found = kept(tmp_path)
    assert found[0].value == 0.8
    assert (found[1] / "model.safetensors").read_bytes() == b"trained again"


def test_values_that_were_measured_otherwise_are_not_compared(tmp_path: Path) -> None:
    assert best.keep(tmp_path, published(tmp_path, 1), "em", 0.5, "64 tasks")
    assert best.keep(tmp_path, published(tmp_path, 2), "em", 0.4, "128 tasks")
    assert not best.keep(tmp_path, published(tmp_path, 3), "em", 0.4, "128 tasks")
    assert best.keep(tmp_path, published(tmp_path, 4), "f1", 0.3, "128 tasks")
    assert kept(tmp_path)[0] == best.Best(4, "f1", 0.3, "128 tasks")
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["v000004"]


def test_a_disk_that_takes_nothing_costs_the_copy_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    after(tmp_path, [0.1, 0.3])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    monkeypatch.setattr(shutil, "copy2", full)
    assert not best.keep(tmp_path, published(tmp_path, 2), "em", 0.4)
    assert "could not be kept" in caplog.text
    found = kept(tmp_path)
    assert found[0].version == 1
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["v000001"]


def test_weights_that_were_never_a_file_cannot_be_kept_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not best.keep(tmp_path, published(tmp_path, 1, file=False), "em", 0.4)
    assert "given out of memory" in caplog.text
    assert best.read(tmp_path) is None


def test_a_torn_record_ends_no_run_and_gives_way_to_the_next_that_is_kept(tmp_path: Path) -> None:
    after(tmp_path, [0.1, 0.5])
    (tmp_path / "best" / "v000001" / "best.json").write_bytes(b"")
    assert best.read(tmp_path) is None
    assert best.keep(tmp_path, Weights(1, str(tmp_path / "weights" / "v000001"), ""), "em", 0.3)
    found = kept(tmp_path)
    assert found[0] == best.Best(1, "em", 0.3)
