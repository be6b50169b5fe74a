"""What a user sees of a run, on terminals of real sizes and where there is none."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coppice.tools.launching.command import arguments, main
from coppice.tools.launching.screen import (
    BLOCK,
    COLUMNS,
    WIDEST,
    ProgressBar,
    RunScreen,
    UpdateTable,
    spoken,
)
from tests.terminals import output, seen

ROOT = Path(__file__).parent.parent.parent.parent
UPDATES = 50
SHOW = """
import sys
from coppice.tools.launching.screen import RunScreen
source, copy = open(sys.argv[2], "rb"), open(sys.argv[2] + ".out", "wb")
RunScreen(int(sys.argv[1])).relay(source, copy)
"""


def record(version: int, **values: float) -> bytes:
    names = {key: 0.5 for name, key, _ in COLUMNS if name not in ("process", "search")}
    whole = {**names, "learner/groups": 3.0, **values, "version": version}
    return json.dumps(whole).encode() + b"\n"


def lines(updates: int = UPDATES) -> bytes:
    """The lines of a scheduler: a record per update, an evaluation, a warning that is wider than
    the terminal, and the end."""
    told = [b"waiting for workers: 4 x generate\n"]
    for version in range(1, updates + 1):
        told.append(record(version))
        if version == 10:
            told.append(b'{"version":10.0,"heldout/em":0.5}\n')
        if version == 30:
            told.append(b"<4>warning, update 30: " + b"the gradient is large " * 20 + b"\n")
    return b"".join([*told, b"<5>\n", b"<5>summary\n"])


def shown(tmp_path: Path, size: tuple[int, int], **environment: str) -> tuple[str, list[str]]:
    (tmp_path / "lines").write_bytes(lines())
    command = [sys.executable, "-c", SHOW, str(UPDATES), str(tmp_path / "lines")]
    written = output(command, *size, PYTHONPATH=str(ROOT / "src"), **environment)
    return written, seen(written, *size)


@pytest.mark.parametrize("size", [(24, 80), (50, 200), (10, 40)])
def test_a_terminal_shows_every_update_once_above_a_bar_that_stays_in_the_last_line(
    size: tuple[int, int], tmp_path: Path
) -> None:
    written, rows = shown(tmp_path, size)
    assert "\x1b[32m" in written
    assert "\x1b[33mwarning, update 30" in written
    assert max(map(len, rows)) <= size[1]
    table = [row for row in rows if row.strip().split(" ")[0].isdigit() and "updates" not in row]
    assert max(map(len, table)) <= WIDEST
    assert [int(row.split()[0]) for row in table] == list(range(1, UPDATES + 1))
    headings = [place for place, row in enumerate(rows) if row.strip().startswith("update ")]
    for start, end in zip(headings, [*headings[1:], len(rows)], strict=True):
        assert 1 <= len([row for row in rows[start:end] if row in table]) <= BLOCK
    assert [row for row in rows if f"of {UPDATES} updates" in row] == [rows[-4]]
    assert "50 of 50 updates  100%  done" in rows[-4]
    assert rows[-3:] == ["", "summary", ""]
    # while the run goes on, the bar is the last line and tells of the last row
    rows = seen(written[: written.index("30 of 50 updates")] + "30 of 50\n", *size)
    assert rows[-3].split()[0] == "30"
    assert rows[-2].strip(".#m 2130\x1b[") == "of 5"
    assert not any("heldout" in row for row in rows)


def test_a_terminal_without_colour_gets_no_code_at_all(tmp_path: Path) -> None:
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        written, rows = shown(tmp_path, (24, 80), **environment)
        assert "\x1b" not in written
        bars = [row for row in rows if "of 50 updates" in row]
        assert len(bars) == -(-UPDATES // BLOCK) + 1
        assert "50 of 50 updates  100%  done" in bars[-1]


def test_a_pipe_gets_lines_of_at_most_a_hundred_columns_and_no_code(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    environment.pop("COLUMNS", None)
    (tmp_path / "lines").write_bytes(lines())
    command = [sys.executable, "-c", SHOW, str(UPDATES), str(tmp_path / "lines")]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    written = done.stdout.decode()
    assert "\x1b" not in written
    table = [line for line in written.splitlines() if line.startswith("  ")]
    assert max(map(len, table)) <= WIDEST
    # bars and headings, rows, the last bar, and four lines of words
    assert len(written.splitlines()) == 3 * 2 + UPDATES + 1 + 4
    told = [line for line in written.splitlines() if "of 50 updates" not in line]
    assert told == (tmp_path / "lines.out").read_text().splitlines()


def test_quiet_shows_faults_and_the_end_and_the_file_has_everything(tmp_path: Path) -> None:
    out, copy = io.StringIO(), tmp_path / "copy"
    RunScreen(UPDATES, quiet=True, out=out).relay(io.BytesIO(lines()), copy.open("wb"))
    told = [line[:21] for line in out.getvalue().splitlines()]
    assert told == ["warning, update 30: t", "", "summary"]
    assert copy.read_text().count("\n") == 1 + UPDATES + 3 + 1 + 2


def test_records_go_out_as_json_evaluations_too_and_words_elsewhere(tmp_path: Path) -> None:
    out, records = io.StringIO(), io.StringIO()
    RunScreen(UPDATES, records=records, out=out).relay(
        io.BytesIO(lines()), (tmp_path / "copy").open("wb")
    )
    read = [json.loads(line) for line in records.getvalue().splitlines()]
    assert len(read) == UPDATES + 1
    assert {"version": 10.0, "heldout/em": 0.5} in read
    assert len(out.getvalue().splitlines()) == 4


def test_two_schedulers_have_one_row_an_update_and_the_second_one_s_faults_its_name(
    tmp_path: Path,
) -> None:
    out, copy = io.StringIO(), tmp_path / "copy"
    screen = RunScreen(3, out=out, schedulers=2)
    for number, more in enumerate(
        (b"waiting for workers\n", b"waiting for workers\n<4>judge.slate fails: no\n<5>summary\n")
    ):
        screen.relay(io.BytesIO(more + record(1) + record(2)), copy.open("ab"), number)
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["waiting for workers", "scheduler-1: judge.slate fails: no"]
    assert [line.split()[0] for line in lines[4:]] == ["1", "2"]
    assert "scheduler-1: summary\n" in copy.read_text()
    out, records = io.StringIO(), io.StringIO()
    screen = RunScreen(3, records=records, out=out, schedulers=2)
    for number in range(2):
        screen.relay(io.BytesIO(record(1, **{"count/calls": 4.0})), copy.open("ab"), number)
    assert [json.loads(line)["count/calls"] for line in records.getvalue().splitlines()] == [8.0]


def test_neither_a_cut_off_record_nor_a_letter_that_the_terminal_lacks_ends_the_relay(
    tmp_path: Path,
) -> None:
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


@pytest.mark.parametrize(
    "flags", [["--quiet", "--dry-run"], ["--json", "--dry-run"], ["--quiet", "--status", "RUN"]]
)
def test_a_flag_without_effect_is_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(flags)
    assert f"{flags[0]} has no effect with --" in capsys.readouterr().err


def test_the_table_tells_its_headings_again_when_a_column_comes() -> None:
    table = UpdateTable()
    values: dict[str, Any] = {"version": 1.0, "score/reward": 1.0}
    assert table.lines(values, 100)[0].split() == ["update", "reward"]
    assert table.lines(values, 100)[0] == ""
    heading, row = table.lines(values | {"score/judge_valid": 0.5}, 100)
    assert heading.split() == ["update", "reward", "judged"]
    assert row.split()[2] == "0.50"


def test_any_width_shows_as_many_columns_as_it_has_room_for_and_the_update_always() -> None:
    names = {name: key for name, key, _ in COLUMNS}
    values = dict.fromkeys(names.values(), 1.0)
    for width in range(7, 200):
        heading, row = UpdateTable().lines(values, width)
        assert len(heading) == len(row) <= width
        assert len(heading.split()) == min(len(names), (width + 2) // 9)
        assert heading.split()[0] == "update"


def test_the_time_left_is_of_the_pace_of_the_last_updates() -> None:
    clock = [0.0]
    progress = ProgressBar(100, lambda: clock[0])
    assert progress.line(80)[2] == "  0 of 100 updates    0%"
    for version in range(1, 61):
        clock[0] += 60.0 if version <= 30 else 2.0
        progress.reached(version)
    full, empty, words = progress.line(100)
    assert (len(full), len(empty)) == (24, 16)
    assert words == "  60 of 100 updates   60%  1 min 20 s left"
    progress.reached(55)  # a crash took five back
    assert progress.line(80)[2] == "  55 of 100 updates   55%"
    assert progress.line(27)[:2] == ("", "")
    assert len(progress.line(10)[2]) <= 10
    assert [spoken(s) for s in (0.4, 59.4, 59.6, 3599, 3600, 90_000)] == [
        "0 s", "59 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "25 h 00 min",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--track", "wandbb"], "did you mean 'wandb'? expected one of ['trackio', 'wandb']"),
        (["--track", "wandb"], "'wandb', which is not installed: "),
        (["--set", "scheduler.prometheus=9100"], "scheduler.prometheus = 9100: expected `str`"),
        (["--set", "scheduler.prometheus=here:99999"], "host:port, such as '127.0.0.1:9100'"),
    ],
)
def test_a_tracker_that_cannot_work_is_refused_before_the_set_up(
    flags: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "coppice.tools.launching.command.prepare", lambda config: pytest.fail("set up")
    )
    monkeypatch.setattr(
        "coppice.scheduler.telemetry.tracking.importlib.util.find_spec", lambda name: None
    )
    assert main([*flags, "--run-folder", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
