"""What a user sees of a run."""

import io
import json
import sys
import time
from pathlib import Path

import pytest

from coppice.tools.launching.command import main
from coppice.tools.launching.screen import COLUMNS, WIDEST, RunScreen
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
    assert "41 of 50 updates (82%), 0:09:00 left" in written


def test_quiet_shows_faults_and_the_end_and_the_file_has_everything(tmp_path: Path) -> None:
    out, copy = io.StringIO(), tmp_path / "copy"
    RunScreen(UPDATES, quiet=True, out=out).relay(io.BytesIO(lines()), copy.open("wb"))
    told = [line[:21] for line in out.getvalue().splitlines()]
    assert told == ["warning, update 30: t", "", "summary"]
    assert copy.read_text().count("\n") > UPDATES


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
