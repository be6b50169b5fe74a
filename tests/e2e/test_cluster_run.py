"""A whole run on a Ray cluster of several nodes on this machine, one of which is killed in the middle."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.e2e.test_run import CONFIG, QUESTIONS, check_gradients, check_groups, finish, launch, prepare
from tools.launching import holder, record

UPDATES = 8
"""Enough for the run to need the lost processes again, on a fast machine too."""
OWN = ("scheduler", "learner-0", "learner-1")
"""Processes that stay on the launcher's node."""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The launcher's node, with room for the ranks and two more processes, and a second node that does not see the run folder."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    monkeypatch.setenv("RAY_ADDRESS", str(cluster.address))
    yield cluster
    cluster.shutdown()


def _until(path: Path, lines: int, process: subprocess.Popen[str]) -> None:
    """Wait until a file of a living run has ``lines`` lines."""
    end = time.monotonic() + 240
    while not path.exists() or path.read_text().count("\n") < lines:
        assert process.poll() is None, finish(process)
        assert time.monotonic() < end, f"{path} has not {lines} lines"
        time.sleep(0.1)


def test_a_node_that_is_killed_costs_nothing_but_its_processes(cluster: Cluster, tmp_path: Path) -> None:
    """Actors and judges of the second node read weights from the store alone; when it dies, they start on a third that joins then."""
    (away := tmp_path / "away").mkdir()
    second = cluster.add_node(num_cpus=3, env_vars={holder.PLACE: str(away)})
    prepare(tmp_path)
    config, run = tmp_path / "e2e.toml", tmp_path / "run"
    config.write_text(CONFIG.format(model=tmp_path / "model", folder=tmp_path, updates=UPDATES, questions=QUESTIONS))
    process = launch(config, run, "--cluster", "ray", "--set", f"learner.publish_url=file://{tmp_path}/store")
    _until(run / "metrics.jsonl", 2, process)  # the first update
    members = json.loads((run / record.NAME).read_bytes())["members"]
    assert all(bool(member.get("host")) == (name != "scheduler") for name, member in members.items())
    held = [folder for folder in away.iterdir() if folder.is_dir()]
    assert held, "nothing ran apart"
    assert not any((folder / "keys" / "peers" / "learner.json").exists() for folder in held)
    cluster.remove_node(second, allow_graceful=False)
    cluster.add_node(num_cpus=3)
    out = finish(process)
    assert process.returncode == 0, out
    assert "is lost (Actor" in out
    restarts = {name: m["restarts"] for name, m in json.loads((run / record.NAME).read_bytes())["members"].items()}
    assert any(restarts.values()), restarts
    assert not any(restarts[name] for name in OWN)
    check_groups(run, UPDATES, QUESTIONS)
    check_gradients(run, UPDATES)
