"""What appears whole or not at all: folders and files that are written beside their place and
renamed."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from coppice.common.atomic import draft_of, drafted, fresh, write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_at_the_end_and_failed_work_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with drafted(tmp_path / "out") as draft:
            (draft / "half").touch()
            raise KeyError("work")

    with pytest.raises(KeyError):
        fail()
    assert names(tmp_path) == []
    with drafted(tmp_path / "out") as draft:
        (draft / "whole").touch()
        assert not (tmp_path / "out").exists()
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["whole"]


def test_commands_that_begin_in_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as commands:
        made = list(commands.map(fresh, [tmp_path / "runs" / "slate-20261124-120000"] * 8))
    assert sorted(path.name for path in made) == names(tmp_path / "runs")
    assert set(names(tmp_path / "runs")) == {
        "slate-20261124-120000",
        *(f"slate-20261124-120000-{n}" for n in range(2, 9)),
    }


def test_a_link_to_nothing_above_a_new_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "unmounted")
    with pytest.raises(FileExistsError, match="runs"):
        fresh(tmp_path / "runs" / "one")


@pytest.mark.parametrize("there", ["link", "file"])
def test_what_is_no_empty_folder_is_refused_before_the_work(tmp_path: Path, there: str) -> None:
    out = tmp_path / "out"
    _ = out.symlink_to(tmp_path / "gone") if there == "link" else out.touch()
    with pytest.raises(OSError, match="out exists and is no empty folder"), drafted(out):
        pytest.fail("the work was begun")


def test_a_folder_that_is_there_is_kept_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with (
        pytest.raises(OSError, match="out exists and is no empty folder: choose"),
        drafted(tmp_path / "out"),
    ):
        pass
    assert names(tmp_path / "out") == ["mine"]
    with drafted(tmp_path / "out", replace=True) as draft:
        (draft / "new").touch()
    assert names(tmp_path / "out") == ["new"]


def test_a_dead_process_draft_of_a_folder_with_one_writer_is_replaced(tmp_path: Path) -> None:
    left = draft_of(tmp_path / "v000001", alone=True)
    left.mkdir()
    (left / "half").touch()
    with drafted(tmp_path / "v000001", replace=True, alone=True) as draft:
        assert draft == left
        (draft / "whole").touch()
    assert names(tmp_path) == ["v000001"]
    assert names(tmp_path / "v000001") == ["whole"]


def test_a_failed_write_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_whole(path, {"version": 1})

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:3])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, {"version": 2})
    assert names(tmp_path) == ["result.json"]
    assert b"1" in path.read_bytes()
    write_whole(path, b"lines\n", alone=False)
    assert path.read_bytes() == b"lines\n"


def test_weights_may_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with drafted(tmp_path / "model") as draft:
            save_file({"row": np.zeros(2)}, draft / "model.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "model" / "model.safetensors").stat().st_mode & 0o777 == 0o640
