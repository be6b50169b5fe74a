"""A whole run with both trackers, offline, and an endpoint for Prometheus; kill -9 of everything in
its midst."""

import json
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.test_run import (
    UPDATES,
    check_whole,
    config,
    finish,
    kill_everything,
    launch,
    left_over,
    wait_for_update,
)
from tests.scheduler.test_tracking import in_trackio, in_wandb

__all__ = ["config"]
pytestmark = pytest.mark.slow


def test_a_killed_run_goes_on_in_its_trackers_and_its_records_come_out_as_json(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("WANDB_API_KEY", "planted-6f1c0b7e4d2a")
    run = tmp_path / "run"
    flags = ["--track", "wandb", "--track", "trackio", "--set", "scheduler.prometheus=127.0.0.1:0"]
    process = launch(config, run, *flags)
    wait_for_update(run, process)
    scraped = urllib.request.urlopen((run / "prometheus").read_text(), timeout=60).read().decode()
    assert 'coppice_learner_groups{run="run"}' in scraped
    assert (
        f'coppice_health_updates{{run="run"}} {UPDATES}.0' in scraped
    )  # its workers may have come since the last heartbeat
    kill_everything(run, process)
    process = launch(config, run, "--resume", str(run), "--json")
    out = finish(process)
    assert process.returncode == 0, out
    assert left_over(run) == []
    check_whole(run)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert set(lines) & set(out.splitlines())
    losses = {
        int(r["version"]): r["learner/surrogate"]
        for r in map(json.loads, lines)
        if "learner/groups" in r
    }
    # as the terminal says of a tracker that a busy machine has not let finish
    for name in ("wandb", "trackio"):
        subprocess.run(
            [sys.executable, "-m", "coppice.scheduler.telemetry.tracking", name, str(run)],
            stdin=subprocess.DEVNULL,
            check=True,
        )
    for points in (in_trackio(run), in_wandb(run)):
        updates = [(step, loss) for step, loss in points if loss is not None]
        assert max(Counter(step for step, _ in updates).values()) == 1, "no update twice"
        assert updates[-1][0] == UPDATES
        # a record that was on its way at the kill may be missing
        assert dict(updates).items() <= losses.items()
    for log in ("wandb", "trackio", "scheduler"):
        assert "planted-6f1c0b7e4d2a" not in (run / "logs" / f"{log}.log").read_text()
