"""tools/launching/jobs.py: the script for SLURM and the RayJob for KubeRay."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from coppice.tools.launching import command as launching
from coppice.tools.launching import jobs
from coppice.tools.launching.config import DEFAULT_CONFIG, ConfigError, load
from coppice.tools.launching.settings import Config
from tests.tools.said import Said

SCHEMA = json.loads((Path(__file__).parent / "rayjob.schema.json").read_text())
SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
IMAGE = ["cluster.image=registry/coppice:1", "cluster.volume=runs"]
POD = (
    'cluster.pod={nodeSelector={gpu="h100"}, imagePullSecrets=[{name="registry"}],'
    ' tolerations=[{key="gpu", operator="Exists", effect="NoSchedule"}]}'
)


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


def manifest(*changes: str) -> tuple[Any, Any, list[Any]]:
    """The ConfigMap, the RayJob, and the templates of its pods, those of the head first."""
    files, job = yaml.safe_load_all(jobs.kuberay(config(*IMAGE, POD, *changes), ""))
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [group["template"] for group in groups]
    return files, job, [*pods, job["spec"]["submitterPodTemplate"]]


@pytest.mark.parametrize("gpus", [0, 4])
def test_the_manifest_is_a_rayjob_by_kuberays_own_schema(gpus: int) -> None:
    _, job, pods = manifest("cluster.secret=api-keys", f"cluster.gpus={gpus}")
    jsonschema.validate(job, SCHEMA)
    assert len(pods) - 1 == jobs.nodes(config(f"cluster.gpus={gpus}"))
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    first, *others = (pod["spec"]["containers"][0] for pod in pods)
    assert first["envFrom"] == [{"secretRef": {"name": "api-keys"}}]
    assert not any("envFrom" in other for other in others)  # the launcher alone has the keys
    assert ("nvidia.com/gpu" in first["resources"]["limits"]) == bool(gpus)


def test_kubernetes_itself_would_take_each_part() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    files, _, pods = manifest("cluster.gpus=4")
    begin = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
    for part in (files, *(begin | pod for pod in pods)):
        validate(part, "1.34", strict=True)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (IMAGE[:1], r"cluster\.volume"),
        (IMAGE[1:], r"cluster\.image"),
        ([*IMAGE, "cluster.pod={volumes=[]}"], r"cluster\.pod has \['volumes'\]"),
        ([*IMAGE, "name=7b"], "name = '7b': Kubernetes needs a letter"),
        *((['name="' + name + '"'], "digit") for name in ("$(id)", "a b", "", "..", "a/b", r"a\n")),
    ],
)
def test_a_manifest_that_could_not_work_is_refused(changes: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        jobs.kuberay(config(*changes), "")


def test_an_option_of_sbatch_is_one_line() -> None:
    with pytest.raises(ConfigError, match="expected one line"):
        jobs.slurm(config('cluster.options=["--a\\nrm x"]'), "")


STAND_INS = """
scontrol() { echo first; echo second; }
srun() { mkdir -p "$run/processes"; env | grep ^RAY_AUTH; printf '%s\\n' "$@"; }
export -f scontrol srun
"""


@pytest.mark.parametrize("again", [False, True], ids=["first", "requeued"])
def test_the_script_starts_or_resumes_a_run_with_its_config(again: bool, tmp_path: Path) -> None:
    options = 'cluster.options=["--account=lab"]'
    settings = config(f"runs={tmp_path}/a b", "cluster.gpus=8", "cluster.partition=h100", options)
    (tmp_path / "job").write_text(script := jobs.slurm(settings, "--quiet"))
    run = tmp_path / "a b" / f"{settings.name}-17"
    if again:
        run.mkdir(parents=True)
        (run / "config.json").touch()
    command = ["bash", "-c", f"{STAND_INS}bash {tmp_path}/job"]
    words = subprocess.check_output(command, env=os.environ | SLURM, text=True).splitlines()
    token = next(word for word in words if word.startswith("RAY_AUTH_TOKEN="))
    assert "RAY_AUTH_MODE=token" in words
    assert len(token) > 60
    assert words[(at := words.index("--address")) : at + 2] == ["--address", "first:6379"]
    launch = words[words.index("--") + 1 :]
    assert launch == ["coppice", "launch", "--resume", str(run), "--cluster", "ray", "--quiet"]
    assert ("going on with" in words[0]) == again
    if not again:
        assert launching.resolve(launching.arguments(["--resume", str(run)]))[0] == settings
    lines = "nodes=1 gpus-per-node=8 partition=h100 account=lab time=24:00:00 exclusive".split()
    assert all(f"#SBATCH --{line}\n" in script for line in lines)


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
    (tmp_path / "job").write_text(jobs.slurm(config(), ""))
    srun = f"srun() {{ exec python {tmp_path}/launcher.py {tmp_path}; }}"
    stand_ins = f"scontrol() {{ echo first; }}; {srun}; export -f scontrol srun"
    environment = os.environ | SLURM
    command = ["bash", "-c", f"{stand_ins}; exec bash {tmp_path}/job {tmp_path}"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGTERM)
        assert "stopping: the learner writes a checkpoint" in job.stdout.read()
        assert job.wait(60) == 130


def test_a_job_chooses_its_own_run_folder(said: Said) -> None:
    told = said(launching.main, "--run-folder", "x", "--cluster", "slurm", status=2)
    assert "leave out --resume and --run-folder" in told
