"""A whole run on a Ray cluster of several nodes on this machine, one of which is killed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from coppice.judges.command import plug_in
from coppice.scheduler.telemetry import health
from coppice.tools.launching import control, record
from tests.chaos.invariants import of_the_files
from tests.forks import ROOT
from tests.runs import Launch, Run
from tests.world import QUESTIONS

UPDATES = 12
"""Enough for the run to need the lost processes again, on a fast machine too."""
OWN = ("scheduler", "learner-0", "learner-1")
"""Processes that stay on the launcher's node."""
GUEST = "guest"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False}
    )
    monkeypatch.setenv("RAY_ADDRESS", str(cluster.address))
    yield cluster
    cluster.shutdown()


def workers(run: Run, name: str) -> list[health.WorkerHealth]:
    report = health.read(run.folder)
    return [worker for worker in report.workers if worker.name == name] if report else []


def guest(run: Path, folder: Path) -> subprocess.Popen[str]:
    invitation = str(folder / "invitation")
    invite = f"--run {run} --invite judge.exact_match --columns outcome,f1 --to {invitation}"
    assert plug_in(invite.split()) == 0
    serve = [sys.executable, str(ROOT / "tools" / "serve"), "exact_match", "--name", GUEST]
    return subprocess.Popen(
        [*serve, "--invite-file", invitation], cwd=folder, stdout=subprocess.DEVNULL, text=True
    )


def members(run: Run) -> dict[str, dict[str, int]]:
    return json.loads((run.folder / record.NAME).read_bytes())["members"]


def restarts(run: Run) -> dict[str, int]:
    return {name: member["restarts"] for name, member in members(run).items()}


def test_workers_come_and_go_and_a_node_dies_and_nothing_is_lost(
    cluster: Cluster, searching: Path, launch: Launch, tmp_path: Path
) -> None:
    """When the second node dies, its actors and judges start on a third that joins then."""
    second = cluster.add_node(num_cpus=3)
    settings = f"scheduler.dispatch.heartbeat_s=0.25 scheduler.updates={UPDATES}"
    run = launch(searching, f"--cluster=ray --actors=2 --learner=2 {settings}", anew=True)
    run.moved()
    # the record has a process's host once that has started
    run.wait(lambda: all(m.get("host") for n, m in members(run).items() if n != "scheduler"),
             "the hosts")  # fmt: skip
    first = members(run)
    assert not first["scheduler"].get("host")
    control.pause(run.folder)  # so that the run lasts as long as the test, on a fast machine too
    run.launcher.send_signal(signal.SIGQUIT)
    logs = [run.folder / "logs" / f"{name}.log" for name in first]
    run.wait(lambda: all("Current thread" in log.read_text() for log in logs), "the stacks")
    judge = guest(run.folder, tmp_path)
    run.wait(lambda: workers(run, GUEST), "the guest")
    # of two idle workers the older one would get every call
    os.kill(first["judges"]["pid"], signal.SIGSTOP)
    control.resume(run.folder)
    run.wait(lambda: workers(run, GUEST)[0].answered > 0, "an answer of the guest")
    os.kill(first["judges"]["pid"], signal.SIGCONT)
    control.pause(run.folder)
    judge.send_signal(signal.SIGINT)
    assert judge.wait(60) == 0
    control.drain(run.folder, "actor-1")
    run.wait(lambda: workers(run, "actor-1")[0].state != "here", "actor-1 to leave")
    cluster.remove_node(second, allow_graceful=False)
    cluster.add_node(num_cpus=3)
    # still paused: a fast machine would end the run before the processes start again
    run.wait(lambda: any(restarts(run).values()), "a process to start again")
    control.resume(run.folder)
    out = run.finish()
    assert "is lost (Actor" in out
    assert all(f"{name}: its stacks are in " in out for name in first)
    assert not any(restarts(run)[name] for name in OWN)
    run.check(UPDATES)
    assert of_the_files(run.folder, QUESTIONS) == []
