"""A whole run on a Ray cluster of several nodes on this machine. Workers come and go, and a node is
killed in the middle."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from coppice.judges.command import plug_in
from coppice.research.chaos.invariants import of_the_files
from coppice.scheduler.telemetry import health
from coppice.tools.launching import control, holder, record
from tests import ftp
from tests.e2e.test_run import (
    CONFIG,
    QUESTIONS,
    ROOT,
    check_gradients,
    check_groups,
    finish,
    gone,
    launch,
    prepare,
)

UPDATES = 12
"""Enough for the run to need the lost processes again, on a fast machine too."""
OWN = ("scheduler", "learner-0", "learner-1")
"""Processes that stay on the launcher's node."""
GUEST = "guest"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The launcher's node, with room for the ranks and two more processes, and a second node that
    does not see the run folder."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False}
    )
    monkeypatch.setenv("RAY_ADDRESS", str(cluster.address))
    yield cluster
    cluster.shutdown()


def until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for what a living run does."""
    end = time.monotonic() + 240
    while not holds():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.1)


def workers(run: Path, name: str) -> list[health.WorkerHealth]:
    report = health.read(run)
    return (
        [worker for worker in report.workers if worker.name == name] if report is not None else []
    )


def guest(run: Path, folder: Path) -> subprocess.Popen[str]:
    """A judge that finds the run by its invitation alone, beside the run's own judge of the same
    name."""
    assert (
        plug_in(
            ["--run", str(run), "--invite", "judge.exact_match", "--to", str(folder / "invitation")]
        )
        == 0
    )
    command = [
        sys.executable,
        str(ROOT / "tools" / "serve"),
        "exact_match",
        "--name",
        GUEST,
        "--invite-file",
    ]
    return subprocess.Popen(
        [*command, str(folder / "invitation")], cwd=folder, stdout=subprocess.DEVNULL, text=True
    )


def test_workers_come_and_go_and_a_node_dies_and_nothing_is_lost(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Actors and judges of the second node read weights from the store alone; when it dies, they
    start on a third that joins then. The store is a server, to which only the launcher has the
    password."""
    for place in ("away", "store", "elsewhere"):
        (tmp_path / place).mkdir()
    away = tmp_path / "away"
    second = cluster.add_node(num_cpus=3, env_vars={holder.PLACE: str(away)})
    prepare(tmp_path)
    config, run = tmp_path / "e2e.toml", tmp_path / "run"
    config.write_text(
        CONFIG.format(
            model=tmp_path / "model", folder=tmp_path, updates=UPDATES, questions=QUESTIONS
        )
    )
    with ftp.serving(tmp_path / "store") as url, monkeypatch.context() as secret:
        secret.setenv("FSSPEC_FTP_USERNAME", ftp.USER)
        secret.setenv("FSSPEC_FTP_PASSWORD", ftp.PASSWORD)
        settings = f"learner.publish_url={url}", "scheduler.dispatch.heartbeat_s=0.25"
        process = launch(
            config,
            run,
            "--cluster",
            "ray",
            *(word for setting in settings for word in ("--set", setting)),
        )
        secret.undo()
        metrics = run / "metrics.jsonl"
        # the first update
        until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, process)
        members = json.loads((run / record.NAME).read_bytes())["members"]
        assert all(
            bool(member.get("host")) == (name != "scheduler") for name, member in members.items()
        )
        held = [folder for folder in away.iterdir() if folder.is_dir()]
        assert held, "nothing ran apart"
        assert not any((folder / "keys" / "peers" / "learner.json").exists() for folder in held)
        control.pause(run)  # so that the run lasts as long as the test, on a fast machine too
        process.send_signal(signal.SIGQUIT)
        until(
            lambda: all(
                "Current thread" in (run / "logs" / f"{name}.log").read_text() for name in members
            ),
            process,
        )
        judge = guest(run, tmp_path / "elsewhere")
        until(lambda: bool(workers(run, GUEST)), process)
        # of two idle workers the older one would get every call
        os.kill(members["judges"]["pid"], signal.SIGSTOP)
        control.resume(run)
        until(lambda: workers(run, GUEST)[0].answered > 0, process)
        os.kill(members["judges"]["pid"], signal.SIGCONT)
        control.pause(run)
        judge.send_signal(signal.SIGINT)
        assert judge.wait(60) == 0
        control.drain(run, "actor-1")
        until(lambda: workers(run, "actor-1")[0].state != "here", process)
        control.resume(run)
        cluster.remove_node(second, allow_graceful=False)
        cluster.add_node(num_cpus=3)
        out = finish(process)
    assert process.returncode == 0, out
    assert "is lost (Actor" in out
    assert all(f"{name}: its stacks are in " in out for name in members)
    restarts = {
        name: m["restarts"]
        for name, m in json.loads((run / record.NAME).read_bytes())["members"].items()
    }
    assert any(restarts.values()), restarts
    assert not any(restarts[name] for name in OWN)
    check_groups(run, UPDATES, QUESTIONS)
    check_gradients(run, UPDATES)
    assert of_the_files(run, QUESTIONS) == []
    for folder in (run, away):
        gone(folder)
