"""coppice launch: what it says of folders it cannot use, of torn configs and of a full disk."""

import errno
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from coppice.tools.launching.command import main
from coppice.tools.launching.processes import PlannedProcess
from coppice.tools.launching.screen import RunScreen
from coppice.tools.launching.supervisor import supervise
from tests.tools.said import Patch, Said


@pytest.mark.usefixtures("nothing_made")
def test_a_run_folder_below_a_file_is_refused(tmp_path: Path, refused: Said) -> None:
    file = tmp_path / "file"
    file.touch()
    told = refused(main, "--run-folder", file / "sub" / "run", "--dry-run")
    assert f"{file} is a file, expected a folder: choose another --run-folder\n" in told


@pytest.mark.usefixtures("ends_at_once")
def test_a_dry_run_prints_the_doubts(tmp_path: Path, said: Said, monkeypatch: Patch) -> None:
    none = psutil.virtual_memory()._replace(available=0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: none)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    correction = ["learner.correction=gspo", "learner.aggregation=token"]
    told = said(main, "--run-folder", tmp_path / "run", *correction, "--dry-run")
    assert "warning: learner.correction = 'gspo'" in told
    assert "warning: this plan needs about" in told


def test_a_torn_config_of_a_run_is_named(tmp_path: Path, refused: Said) -> None:
    (tmp_path / "config.json").write_text('{"name": "x"')
    error = refused(main, "--resume", tmp_path)
    assert f"--resume {tmp_path}" in error and "is torn" in error
    (tmp_path / "config.json").write_text('{"name": 7}')
    assert f"config {tmp_path}/config.json: name = 7: expected" in refused(
        main, "--resume", tmp_path
    )


@pytest.mark.usefixtures("ends_at_once")
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, " MB free: the processes cannot write; free some, then start again\n"),
        (errno.EROFS, "/lock': make it writable and launch again, or choose another --run-fold"),
    ],
)
def test_a_disk_that_takes_nothing_at_the_start_is_one_line_with_the_remedy(
    number: int, said: str, tmp_path: Path, refused: Said, monkeypatch: Patch
) -> None:
    run, real = tmp_path / "run", Path.open

    def full(path: Path, *given: Any, **more: Any) -> Any:
        if path.is_relative_to(run):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *given, **more)

    monkeypatch.setattr(Path, "open", full)
    assert said in refused(main, "--run-folder", run)


@pytest.mark.usefixtures("ends_at_once")
def test_a_launch_lifts_the_pause_that_an_earlier_start_left(tmp_path: Path) -> None:
    (tmp_path / "paused").touch()
    main(["--run-folder", str(tmp_path)])
    assert (tmp_path / "config.json").exists()
    assert not (tmp_path / "paused").exists()


@pytest.mark.usefixtures("ends_at_once")
def test_a_full_disk_takes_no_config(tmp_path: Path, said: Said, monkeypatch: Patch) -> None:
    run, write = tmp_path / "run", Path.write_bytes
    said(main, "--run-folder", run, status=1)
    config = (run / "config.json").read_bytes()

    def full(path: Path, content: bytes) -> None:
        write(path, content[:5])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    told = said(main, "--resume", run, status=2)
    assert f"free some, then coppice launch --resume {run}\n" in told
    assert (run / "config.json").read_bytes() == config


def test_a_process_that_died_of_a_full_disk_says_so_though_its_log_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Patch,
    ends_at_once: PlannedProcess,
) -> None:  # fmt: skip
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    (tmp_path / "config.json").touch()
    assert supervise(tmp_path, lambda: [ends_at_once], RunScreen(0)) == 1
    told = capsys.readouterr().out
    assert f"scheduler failed: {sys.executable}: No module named no_such_module\n" in told
    assert f"remedy: {tmp_path}'s disk has 0.1 MB free: the processes cannot write;" in told


class Full(io.BytesIO):
    """A file on a full disk."""

    def write(self, _: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["copy", "terminal"])
def test_lines_are_read_though_one_place_does_not_take_them(where: str, tmp_path: Path) -> None:
    """Else the scheduler would stand still at its next line."""
    source, sound = io.BytesIO(b"one\ntwo\n"), (tmp_path / "lines").open("wb", buffering=0)
    copy: IO[bytes] = Full() if where == "copy" else sound
    terminal = io.TextIOWrapper(Full() if where == "terminal" else sound, write_through=True)
    RunScreen(0, out=terminal).relay(source, copy)
    assert source.read() == b""
    assert (tmp_path / "lines").read_bytes() == b"one\ntwo\n"


def test_a_terminal_that_is_gone_stops_no_launcher() -> None:
    code = (
        "from coppice.tools.launching.screen import RunScreen; s = RunScreen(0);"
        " [s.say(f'line {i}') for i in range(3)]; s.say('x' * 100_000)"
    )
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    os.close(reader)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, b"")
