"""Runs that coppice dev chaos strikes, and what its checks find."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from coppice.scheduler.ledger.journal import Journal
from tests.chaos import invariants, plan
from tests.chaos.chapters import chaos
from tests.forks import ROOT, Server
from tests.scheduler.test_journal import add


@pytest.mark.slow
def test_faults_that_strike_a_whole_run_lose_nothing(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = ["cut", "lose", "twice", "reorder", "wrong", "stray", "nan", "huge", "unloaded"]
    damage = ["unwritable", "journal", "checkpoint", "part", "diverge"]
    broken = chaos(plan.plan(21690, 12, [*inside, *damage]), tmp_path, server)
    assert len(check(capsys.readouterr().out)) == 12  # the seed's faults are of different kinds
    assert not broken


@pytest.mark.long
def test_faults_of_every_kind_lose_nothing() -> None:
    program = "import sys; from tests.chaos import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "--faults", "100", "--seed", "1"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    left_out = {"full", "read-only"} if "no disk can be mounted" in said else set()
    assert check(said) == set(plan.KINDS) - left_out


def check(said: str) -> set[str]:
    """Return the kinds of faults that struck, all of which must have been survived."""
    lines = said.splitlines()
    assert lines[-1] == "every invariant holds", said
    table = [line.split() for line in lines[lines.index("kind          struck  survived") :]]
    assert all(struck == survived for _, struck, survived in table[1:-1]), said
    return {kind for kind, *_ in table[1:-2]}


def test_a_task_that_is_neither_trained_nor_quarantined_is_found(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    for number in range(4):
        add(journal, number, "closed")
        journal.mark_trained(number, 1 + number // 2)
    journal.close()
    assert invariants.account(tmp_path) == invariants.Account(4, 4, 0, in_updates=4, updates=2)
    with sqlite3.connect(tmp_path / "journal.sqlite") as database:
        database.execute("UPDATE groups SET trained=NULL WHERE id=2")
    faults = invariants.of_the_files(tmp_path, 2)
    assert "nothing lost: 4 drawn, 3 trained and 0 quarantined" in faults
    assert "whole updates: 3 tasks are in 2 updates of 2 tasks each" in faults
    assert f"the run is over: there is no {tmp_path / 'summary.json'}" in faults
