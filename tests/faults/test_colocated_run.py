"""A whole run whose learner and engines share GPUs, with a scripted SGLang server per actor."""

import contextlib
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.forks import ROOT, Server
from tests.runs import Run
from tests.sglang_cpu import colocated


def waits_for_turn(pid: int) -> bool:
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it may be closed meanwhile
            if "gpus" in os.readlink(file):
                return True
    return False


def test_no_update_overlaps_with_an_engine_that_holds_memory_whoever_is_killed(
    searching: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(colocated.FOLDER, str(tmp_path))
    run = Run(searching, tmp_path / "run", server, begin=f"{colocated.__name__}:watch")
    log, gate, python = (tmp_path / name for name in ("log", "gate", "python"))
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exit\necho $$ holds server >> {log}\n'
        f'exec {sys.executable} -m {colocated.__name__} "$@"\n'
    )
    python.chmod(0o755)
    own = {"python": str(python), "environment.PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    own |= {"arguments.device": "cpu", "colocated": True, "gpus": 1}
    run.launch(
        "actors={engine='sglang',count=2} learner.count=2 scheduler.updates=100",
        *(f"actors.sglang.{key}={json.dumps(value)}" for key, value in own.items()),
    )
    for victim in ("actor-0", "actor-1", "learner-0"):
        run.moved()
        if victim != "actor-0":  # while the learner trains and the engines have released
            gate.touch()
            run.wait(lambda: log.read_text().endswith("holds learner\n"), "an update")
        pids = run.pids()
        ends = [child.pid for child in psutil.Process(pids[victim]).children()]
        for pid in [pids["learner-0"], pids["learner-1"]] if victim == "learner-0" else ends:
            colocated.note("ends", pid)
        run.signal(victim, signal.SIGKILL)
        run.wait(lambda: run.pids()[victim] != pids[victim], "a new process")  # noqa: B023
        if victim == "actor-1":
            run.wait(partial(waits_for_turn, run.pids()[victim]), "a turn")
        gate.unlink(missing_ok=True)
    run.finish()
    run.check(100)
    holding, ended = dict[str, str](), set[str]()
    for line in log.read_text().splitlines():
        pid, what, *kind = line.split()
        ended |= {pid} if what == "ends" else set()
        # one that is to be killed may hold once more between the note and its death
        if what == "holds" and pid not in ended:
            holding[pid] = kind[0]
            assert len(set(holding.values())) == 1, line
        else:
            holding.pop(pid, None)
    assert log.read_text().count("holds server") > 12
