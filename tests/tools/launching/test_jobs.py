"""tools/launching/jobs.py: the script for SLURM and the RayJob for KubeRay."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from coppice.tools.bootstrap import ROOT
from coppice.tools.launching import jobs
from coppice.tools.launching.config import DEFAULT_CONFIG, ConfigError, load
from coppice.tools.launching.settings import Config

SCHEMA = json.loads((Path(__file__).parent / "rayjob.schema.json").read_text())
SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
IMAGE = ["cluster.image=registry/coppice:1", "cluster.volume=runs"]


def config(*changes: str) -> Config:
    return load(DEFAULT_CONFIG, ["actors.count=4", "learner.count=4", *changes])


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        (["cluster.gpus=4"], 2),
        (["cluster.gpus=0", "cluster.cpus=64"], 1),
        (["cluster.gpus=0", "cluster.cpus=4"], 3),
    ],
)
def test_as_many_nodes_as_the_plan_needs(changes: list[str], count: int) -> None:
    assert jobs.nodes(config(*changes)) == count


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_manifest_is_a_rayjob_by_kuberays_own_schema(gpus: int) -> None:
    made = config(*IMAGE, "cluster.secret=api-keys", f"cluster.gpus={gpus}")
    job: Any = yaml.safe_load(jobs.kuberay(made, []))
    jsonschema.validate(job, SCHEMA)
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert sum(group["replicas"] for group in groups) == jobs.nodes(made) - 1
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert pod["envFrom"] == [{"secretRef": {"name": "api-keys"}}]
    assert ("nvidia.com/gpu" in pod["resources"]["limits"]) == bool(gpus)


def test_a_manifest_needs_an_image_and_a_volume() -> None:
    for missing in ("image", "volume"):
        with pytest.raises(ConfigError, match=f"cluster.{missing}"):
            jobs.kuberay(config(*(change for change in IMAGE if missing not in change)), [])


STAND_INS = """
scontrol() { echo first; echo second; }
srun() { printf '%s\\n' "$@"; }
export -f scontrol srun
"""


@pytest.mark.parametrize("again", [False, True], ids=["first", "requeued"])
def test_the_script_starts_or_resumes_the_same_command(again: bool, tmp_path: Path) -> None:
    given = ["--actors", "4", "--cluster", "slurm", "--set", 'judges.outside=["a b"]']
    options = 'cluster.options=["--partition=h100"]'
    script = jobs.slurm(config(f"runs={tmp_path}", "cluster.gpus=8", options), given)
    (tmp_path / "job").write_text(script)
    run = tmp_path / f"{config().name}-17"
    if again:
        run.mkdir()
        (run / "config.json").touch()
    environment = os.environ | SLURM
    environment.pop("COPPICE_VENV", None)
    command = ["bash", "-c", f"{STAND_INS}bash {tmp_path}/job"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[1:5] == ["ray", "symmetric-run", "--address", "first:6379"]
    launch = words[words.index("--") + 1 :]
    first = ["--resume"] if again else [*given[:2], *given[4:], "--cluster", "ray", "--run-folder"]
    assert launch == ["coppice", "launch", *first, str(run)]
    options = ("nodes=1", "gpus-per-node=8", "partition=h100")
    assert all(f"#SBATCH --{option}\n" in script for option in options)


LAUNCHER = """
import os, pathlib, psutil, signal, sys
from coppice.tools.launching.record import NAME, Record
from coppice.common.atomic import write_whole
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
write_whole(pathlib.Path(sys.argv[1]) / NAME, Record(os.getpid(), psutil.Process().create_time()))
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.second
def test_slurms_signal_stops_the_launcher_whose_status_is_the_jobs(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "job").write_text(jobs.slurm(config(), []))
    srun = f"srun() {{ exec python {tmp_path}/launcher.py {tmp_path}; }}"
    stand_ins = f"scontrol() {{ echo first; }}; {srun}; export -f scontrol srun"
    environment = os.environ | SLURM | {"COPPICE_VENV": sys.prefix, "PYTHONPATH": str(ROOT)}
    command = ["bash", "-c", f"{stand_ins}; exec bash {tmp_path}/job {tmp_path}"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGTERM)
        assert "stopping: the learner writes a checkpoint" in job.stdout.read()
        assert job.wait(60) == 130


def test_a_job_chooses_its_own_run_folder() -> None:
    with pytest.raises(ConfigError, match=r"--run-folder.*leave it out"):
        jobs.slurm(config(), ["--run-folder", "x", "--cluster", "slurm"])


def test_weights_in_memory_need_an_address_that_a_cluster_reaches() -> None:
    with pytest.raises(ConfigError, match=r"publish_host = '127\.0\.0\.1'"):
        config("cluster.on=ray", "learner.publish=both")
