"""Writes the job that starts a run on a cluster: a SLURM script, or a RayJob for KubeRay. Both
start Ray on the nodes, and the same command with ``--cluster ray`` on the first of them. A job that
is started again goes on with its run."""

import math
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from coppice.tools.bootstrap import CHECKOUT, ROOT
from coppice.tools.defaults.settings import importable
from coppice.tools.launching.config import ConfigError
from coppice.tools.launching.settings import Config

PORT = 6379
"""Ray's default, where the nodes find the first one."""
GRACE_S = 120
"""Seconds before the end of its time at which SLURM sends SIGTERM, for the learner's last
checkpoint: to the script alone, which has the launcher stop in order. ``srun`` would send it to all
processes of the step at once, and Ray would die before the run had ended."""
_STOP = (
    "import pathlib, sys; from coppice.tools.launching import control;"
    " print(control.stop(pathlib.Path(sys.argv[1])))"
)
_SHARED = "/runs"
"""Where the pods see the shared volume."""


def nodes(config: Config) -> int:
    """Return how many nodes the plan needs, by the GPUs of learner and actors or, where nodes have
    none, by the threads of all."""
    c, a, w = config.cluster, config.actors, config.learner
    if c.gpus:
        own = a.own_gpus if a.served else 1
        if own > c.gpus:
            limit = f"cluster.gpus = {c.gpus}, those of one node"
            raise ConfigError(f"actors.{a.engine}.gpus = {own}: expected at most {limit}")
        of_actors = a.count / (c.gpus // own) if own else 0
        return max(1, math.ceil(w.count / c.gpus + of_actors))
    threads = a.count * a.threads + w.count * w.threads + config.retriever.threads + 3
    return math.ceil(threads / c.cpus)


def _command(given: list[str], run: str) -> tuple[str, str]:
    """Return the options of the first start and those of a later one. run: the run folder, unless
    the options name one."""
    words = [word for word in given if not word.startswith("--cluster=")]
    if "--cluster" in words:
        del words[(place := words.index("--cluster")) : place + 2]
    named = [word for word in words if re.match(r"--(run-folder|resume)(=|$)", word)]
    if named:
        own = f"the job chooses its run folder, {run}"
        raise ConfigError(f"{named[0]} with --cluster slurm or kuberay: {own}: leave it out")
    first = shlex.join([*words, "--cluster", "ray"])
    return f"{first} --run-folder {run}", f"--resume {run}"


def slurm(config: Config, given: list[str]) -> str:
    """Return the script for sbatch. given: the options of coppice launch."""
    c, name = config.cluster, config.name
    first, later = _command(given, '"$run"')
    options = [f"--job-name={name}", f"--nodes={nodes(config)}", "--ntasks-per-node=1"]
    options += [f"--cpus-per-task={c.cpus}", *([f"--gpus-per-node={c.gpus}"] if c.gpus else [])]
    options += [f"--mem={c.memory_gib}G", f"--output={name}-%j.log", "--requeue"]
    options += [f"--signal=B:TERM@{GRACE_S}", *c.options]
    head = "\n".join(f"#SBATCH {option}" for option in options)
    bin = "${COPPICE_VENV:-$PWD/.venv}/bin" if CHECKOUT else shlex.quote(f"{sys.prefix}/bin")
    return f"""#!/bin/bash
{head}
set -euo pipefail
cd {shlex.quote(str(ROOT if CHECKOUT else Path.cwd()))}
source={shlex.quote(str(importable()))}
run=${{1:-{shlex.quote(config.runs)}/{name}-$SLURM_JOB_ID}}
launch=(coppice launch {first})
if [ -f "$run/config.json" ]; then launch=(coppice launch {later}); fi
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_USAGE_STATS_ENABLED=0 PATH={bin}:$PATH  # Ray starts itself by its name
srun --kill-on-bad-exit=1 ray symmetric-run --address "$first:{PORT}" \\
  --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus={c.cpus} --num-gpus={c.gpus} -- "${{launch[@]}}" &
step=$!
trap 'PYTHONPATH=$source python -c "{_STOP}" "$run" || kill $step' TERM
wait $step || wait $step  # the signal ends the first
"""


def kuberay(config: Config, given: list[str]) -> str:
    """Return the manifest of a RayJob. given: the options of coppice launch."""
    c = config.cluster
    for key in ("image", "volume"):
        if not getattr(c, key):
            such = f"--set cluster.{key}={'registry/coppice:1' if key == 'image' else 'runs'}"
            raise ConfigError(f'cluster.{key} = "": --cluster kuberay needs it, such as {such}')
    name = re.sub(r"[^a-z0-9-]+", "-", config.name.lower()).strip("-")
    first, later = _command(given, f"{_SHARED}/{name}")
    start = (
        f"cd {shlex.quote(c.folder)}; if [ -f {_SHARED}/{name}/config.json ];"
        f" then coppice launch {later}; else coppice launch {first}; fi"
    )
    others = nodes(config) - 1
    group = {
        "groupName": "nodes", "replicas": others, "minReplicas": others, "maxReplicas": others,
        "rayStartParams": {}, "template": _pod(config, "ray-worker"),
    }  # fmt: skip
    cluster = {
        "headGroupSpec": {"rayStartParams": {}, "template": _pod(config, "ray-head")},
        "workerGroupSpecs": [group] if others else [],
    }
    spec = {
        "entrypoint": f"bash -c {shlex.quote(start)}", "shutdownAfterJobFinishes": True,
        "rayClusterSpec": cluster,
    }  # fmt: skip
    job = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name}, "spec": spec}
    return yaml.safe_dump(job, sort_keys=False, width=120)


def _pod(config: Config, name: str) -> dict[str, Any]:
    c = config.cluster
    limits = {"cpu": str(c.cpus), "memory": f"{c.memory_gib}Gi"}
    limits |= {"nvidia.com/gpu": str(c.gpus)} if c.gpus else {}
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "COPPICE_CACHE": f"{_SHARED}/cache"}
    mounts = {"runs": _SHARED, "memory": "/dev/shm"}
    container: dict[str, Any] = {
        "name": name, "image": c.image,
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "volumeMounts": [{"name": key, "mountPath": path} for key, path in mounts.items()],
        "resources": {"limits": limits, "requests": dict(limits)},
    }  # fmt: skip
    if c.secret:
        container["envFrom"] = [{"secretRef": {"name": c.secret}}]
    volumes = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": c.volume}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    return {"spec": {"containers": [container], "volumes": volumes}}


WRITERS: dict[str, Callable[[Config, list[str]], str]] = {"slurm": slurm, "kuberay": kuberay}
"""The values of ``--cluster`` that print a job and start nothing."""
