"""The script of tools/launching/jobs.py on a real SLURM of one node, apart from this machine's
processes and network: Ray stops all of its kind on a node."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from coppice.tools.launching import jobs
from coppice.tools.launching.config import load
from tests.chaos.invariants import of_the_files
from tests.forks import ROOT
from tests.world import QUESTIONS

NODE = r"""
hostname one
ip link set lo up
ip link add node type veth peer name other && ip address add 10.99.0.1/24 dev node
ip link set other up && ip link set node up
printf '127.0.0.1 localhost\n10.99.0.1 one\n' > hosts && mount --bind hosts /etc/hosts
mkdir state && export SLURM_CONF=$PWD/slurm.conf
printf '%s\n' ClusterName=one SlurmctldHost=one SlurmUser=root AuthType=auth/none \
  CredType=cred/none ProctrackType=proctrack/linuxproc SelectType=select/cons_tres \
  SelectTypeParameters=CR_Core_Memory StateSaveLocation=$PWD/state SlurmdSpoolDir=$PWD/spool \
  SlurmctldPidFile=$PWD/ctld.pid SlurmdPidFile=$PWD/d.pid EnforcePartLimits=ALL \
  SlurmdParameters=config_overrides "NodeName=one CPUs=8 RealMemory=16000" \
  "PartitionName=all Nodes=ALL Default=YES State=UP" > slurm.conf
slurmctld -c && slurmd -c
job=$(sbatch --parsable job)
until grep -qs '"version":1' runs/*/metrics.jsonl; do sleep 0.2; done
scancel --signal=TERM --batch $job
until [ -z "$(squeue --noheader)" ]; do sleep 0.2; done
sbatch --wait job runs/*-$job
"""


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("slurmctld") or os.geteuid() > 0, reason="needs SLURM, root")
def test_slurm_runs_the_script_stops_it_in_order_and_goes_on(
    searching: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # relative paths are those of the shell that wrote the job
    changes = "runs=runs cluster.on=ray cluster.gpus=0 cluster.cpus=8 cluster.memory_gib=12"
    settings = load(searching, [*changes.split(), "scheduler.updates=12", "actors.count=2"])
    (tmp_path / "job").write_text(jobs.slurm(settings, ""))
    cache = {"COPPICE_CACHE": str(searching.parent / "cache")}
    environment = os.environ | cache | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    apart = "unshare --uts --mount --net --pid --fork --mount-proc --kill-child bash -euc".split()
    subprocess.run([*apart, NODE], cwd=tmp_path, env=environment, check=True, timeout=500)
    (run,) = (tmp_path / "runs").iterdir()
    first, second = (path.read_text() for path in sorted(tmp_path.glob("test-*.log")))
    assert "stopping: the learner writes a checkpoint" in first
    assert "going on with runs/" in second
    assert of_the_files(run, QUESTIONS) == []
