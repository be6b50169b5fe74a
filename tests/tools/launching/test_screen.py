"""What a user sees of a run."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coppice.tools.launching.command import main
from coppice.tools.launching.screen import BLOCK, COLUMNS, WIDEST, RunScreen
from tests.forks import ROOT
from tests.tools.said import Patch, Said

UPDATES = 50


def record(version: int, **values: float) -> bytes:
    names = {key: 0.5 for name, key, _ in COLUMNS if name not in ("process", "search")}
    whole = {**names, "learner/groups": 3.0, **values, "version": version}
    return json.dumps(whole).encode() + b"\n"


def lines(updates: int = UPDATES) -> bytes:
    """A record per update, an evaluation, a warning wider than the terminal, and the end."""
    told = [b"waiting for workers: 4 x generate\n"]
    for version in range(1, updates + 1):
        told.append(record(version))
        if version == 10:
            told.append(b'{"version":10.0,"heldout/em":0.5}\n')
        if version == 30:
            told.append(b"<4>warning, update 30: " + b"the gradient is large " * 20 + b"\n")
    return b"".join([*told, b"<5>\n", b"<5>summary\n"])


def test_every_update_has_a_row(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    clock = iter(60.0 * version for version in range(1, UPDATES + 1))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    out, copy = io.StringIO(), tmp_path / "copy"
    RunScreen(UPDATES, out=out).relay(io.BytesIO(lines()), copy.open("wb"))
    written = out.getvalue().splitlines()
    assert copy.read_text().splitlines() == written
    rows = [line for line in written if line.startswith("  ") and "update" not in line]
    assert [int(row.split()[0]) for row in rows] == list(range(1, UPDATES + 1))
    assert max(map(len, rows)) <= WIDEST
    assert [line for line in written if "updates" in line] == [
        "1 of 50 updates (2%)",
        "21 of 50 updates (42%), 0:29:00 left",
        "41 of 50 updates (82%), 0:09:00 left",
    ]
    assert sum(line.startswith(" update ") for line in written) == -(-UPDATES // BLOCK)


def test_quiet_shows_faults_and_the_end_and_the_file_has_everything(tmp_path: Path) -> None:
    out, copy = io.StringIO(), tmp_path / "copy"
    RunScreen(UPDATES, quiet=True, out=out).relay(io.BytesIO(lines()), copy.open("wb"))
    told = [line[:21] for line in out.getvalue().splitlines()]
    assert told == ["warning, update 30: t", "", "summary"]
    assert copy.read_text().count("\n") == 1 + UPDATES + 3 * 2 + 1 + 2


def test_records_go_out_as_json_evaluations_too_and_words_elsewhere(tmp_path: Path) -> None:
    out, records = io.StringIO(), io.StringIO()
    RunScreen(UPDATES, records=records, out=out).relay(
        io.BytesIO(lines()), (tmp_path / "copy").open("wb")
    )
    read = [json.loads(line) for line in records.getvalue().splitlines()]
    assert len(read) == UPDATES + 1
    assert {"version": 10.0, "heldout/em": 0.5} in read
    assert len(out.getvalue().splitlines()) == 4


def test_two_schedulers_have_one_row_an_update(tmp_path: Path) -> None:
    out, copy = io.StringIO(), tmp_path / "copy"
    screen = RunScreen(3, out=out, schedulers=2)
    for number, more in enumerate((b"waiting\n", b"waiting\n<4>judge.slate fails: no\n")):
        screen.relay(io.BytesIO(more + record(1) + record(2)), copy.open("ab"), number)
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["waiting", "scheduler-1: judge.slate fails: no"]
    assert [line.split()[0] for line in lines[4:]] == ["1", "2"]
    assert "scheduler-1: waiting\n" in copy.read_text()


def test_no_odd_line_or_letter_ends_the_relay(tmp_path: Path) -> None:
    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding="ascii", write_through=True)
    RunScreen(3, out=out).relay(
        io.BytesIO('{"version":1.0,"sco\nem 0.5 ±0.1\nnext\n'.encode()),
        (tmp_path / "copy").open("wb"),
    )
    assert written.getvalue().decode() == '{"version":1.0,"sco\nem 0.5 ?0.1\nnext\n'
    assert (tmp_path / "copy").read_text() == '{"version":1.0,"sco\nem 0.5 ±0.1\nnext\n'


LAUNCH = """
import subprocess, sys
from coppice.tools.launching import command
from coppice.tools.launching.settings import Assets

def prepare(config):
    subprocess.run(["echo", "set up"])
    return Assets("MODEL", "T", "H", "I")

def supervise(run, make, screen, nodes):
    screen.take('{"version":1.0,"learner/groups":3.0}')
    return 0

command.prepare, command.supervise = prepare, supervise
sys.exit(command.main(sys.argv[1:]))
"""


@pytest.mark.second
@pytest.mark.parametrize(
    ("flag", "on_stdout", "on_stderr"),
    [
        ("--json", ['{"version":1.0,'], ["set up", "number type float32", "run folder"]),
        ("--quiet", ["run folder"], []),
    ],
)
def test_a_launch_keeps_its_outlets_apart(
    flag: str, on_stdout: list[str], on_stderr: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", LAUNCH, "--run-folder", str(tmp_path / "run"), flag]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    for written, expected in ((done.stdout, on_stdout), (done.stderr, on_stderr)):
        told = [line for line in written.splitlines() if "warning: this plan needs" not in line]
        assert [line[: len(start)] for line, start in zip(told, expected, strict=True)] == expected


@pytest.mark.parametrize("flag", ["--quiet", "--json"])
def test_a_flag_without_effect_is_refused(flag: str, said: Said) -> None:
    assert f"{flag} has no effect with --" in said(main, flag, "--dry-run", status=2)


@pytest.mark.usefixtures("nothing_made")
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--track", "wandbb"], "did you mean 'wandb'? expected one of ['trackio', 'wandb']"),
        (["--track", "wandb"], "'wandb', which is not installed: "),
        (["--set", "scheduler.prometheus=here:99999"], "host:port, such as '127.0.0.1:9100'"),
    ],
)
def test_a_tracker_that_cannot_work_is_refused_before_the_set_up(
    flags: list[str], told: str, tmp_path: Path, refused: Said, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert told in refused(main, *flags, "--run-folder", tmp_path / "run")
