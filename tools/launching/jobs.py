"""Writes the job that starts a run on a cluster: a SLURM script, or a RayJob for KubeRay. Both
carry the config, and start Ray on the nodes and the run on the first of them. A job that is started
again goes on with its run."""

import copy
import math
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml

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
WAIT_S = 600
"""Seconds in which all nodes of a SLURM job must have started Ray, from a shared disk perhaps."""
RAY = "2.52.0"
"""The version of Ray that KubeRay counts on: the first one with tokens."""
USER = 1000
"""The number of the user in the image (Dockerfile)."""
RETRIES = 3
"""How often KubeRay starts the cluster anew when a job failed, which goes on with its run."""
NAME_LENGTH = 31
"""Letters of a name that are kept, because KubeRay allows a RayJob 47, with the date."""
_SHARED, _JOB = "/runs", "/job"
"""Where the pods see the shared volume, and the head the start of the job."""


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


def _begin(config: Config, run: str) -> str:
    """Return the lines of bash that set $run and give a new run folder its config: a run that is
    there keeps its own. run: the folder, in bash."""
    text = msgspec.json.format(msgspec.json.encode(config), indent=1).decode()
    return f"""run={run}
if [ -f "$run/config.json" ]; then
  echo "going on with $run by the settings of its own config.json"
else
  mkdir -p "$run"
  cat > "$run/config.new" << 'END'
{text}
END
  mv "$run/config.new" "$run/config.json"
fi"""


def slurm(config: Config, flags: str) -> str:
    """Return the script for sbatch. flags: of coppice launch. Raises ConfigError."""
    c, name = config.cluster, config.name
    for option in (c.partition, c.time, *c.options):
        if option.splitlines() != [option] and option:
            raise ConfigError(f"cluster has {option!r} for sbatch: expected one line")
    folder = f"${{1:-{shlex.quote(config.runs)}/{name}-$SLURM_JOB_ID}}"
    options = [f"--job-name={name}", f"--nodes={nodes(config)}", "--ntasks-per-node=1"]
    # Ray has fixed ports and ends with all of its kind on a node, so it must be alone there
    chosen = {"partition": c.partition, "time": c.time}
    options += ["--exclusive", *(f"--{key}={value}" for key, value in chosen.items() if value)]
    options += [f"--cpus-per-task={c.cpus}", *([f"--gpus-per-node={c.gpus}"] if c.gpus else [])]
    options += [f"--mem={c.memory_gib}G", f"--output={name}-%j.log", "--requeue"]
    options += [f"--signal=B:TERM@{GRACE_S}", *c.options]
    head = "\n".join(f"#SBATCH {option}" for option in options)
    return f"""#!/bin/bash
{head}
set -euo pipefail
cd {shlex.quote(str(Path.cwd()))}
source={shlex.quote(str(importable()))}
{_begin(config, folder)}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_USAGE_STATS_ENABLED=0 RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT={WAIT_S}
export PATH={shlex.quote(f"{sys.prefix}/bin")}:$PATH  # Ray starts itself by its name
# without a token, whoever reaches Ray's ports runs code as you
RAY_AUTH_TOKEN=$(python -c "import secrets; print(secrets.token_hex(32))")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
srun --export=ALL --kill-on-bad-exit=1 --cpus-per-task={c.cpus} ray symmetric-run \\
  --address "$first:{PORT}" --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus={c.cpus} \\
  --num-gpus={c.gpus} -- coppice launch --resume "$run" --cluster ray {flags} &
step=$!
trap 'PYTHONPATH=$source python -c "{_STOP}" "$run" || kill $step' TERM
wait $step || wait $step  # the signal ends the first
[ -d "$run/processes" ] || {{ echo "Ray did not start: see above"; exit 1; }}  # Ray exits with 0
"""


def kuberay(config: Config, flags: str) -> str:
    """Return a RayJob, behind a ConfigMap with its start, which the head mounts. Every manifest has
    a run folder of its own. flags: of coppice launch. Raises ConfigError."""
    c = config.cluster
    for key, such in (("image", "registry/coppice:1"), ("volume", "runs")):
        if not getattr(c, key):
            needs = f"--cluster kuberay needs it, such as --set cluster.{key}={such}"
            raise ConfigError(f'cluster.{key} = "": {needs}')
    if own := c.pod.keys() & {"containers", "volumes"}:
        raise ConfigError(f"cluster.pod has {sorted(own)}: expected other keys of a pod's spec")
    word = re.sub(r"[^a-z0-9]+", "-", config.name.lower())[:NAME_LENGTH].strip("-")
    if not word[:1].isalpha():
        raise ConfigError(
            f"name = {config.name!r}: Kubernetes needs a letter first: --set name=..."
        )
    name = f"{word}-{time.strftime('%Y%m%d-%H%M%S')}"
    start = f"""set -eu
cd {shlex.quote(c.folder)}
{_begin(config, f"{_SHARED}/{name}")}
exec coppice launch --resume "$run" --cluster ray {flags}
"""
    files = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}
    files |= {"data": {"start": start}}
    others = nodes(config) - 1
    group = {
        "groupName": "nodes", "replicas": others, "minReplicas": others, "maxReplicas": others,
        "rayStartParams": {}, "template": _pod(config, "ray-worker"),
    }  # fmt: skip
    head = {
        "rayStartParams": {"dashboard-host": "0.0.0.0"},
        "template": _pod(config, "ray-head", name),
    }
    spec = {
        "entrypoint": f"bash {_JOB}/start", "shutdownAfterJobFinishes": True,
        "backoffLimit": RETRIES, "submitterPodTemplate": _submitter(config),
        "rayClusterSpec": {
            "rayVersion": RAY, "authOptions": {"mode": "token"}, "headGroupSpec": head,
            "workerGroupSpecs": [group] if others else [],
        },
    }  # fmt: skip
    job = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": name}, "spec": spec}
    needs = "KubeRay 1.5 or later, and the claim below with accessModes: [ReadWriteMany]"
    return f"# needs {needs}\n" + yaml.safe_dump_all([files, job], sort_keys=False, width=120)


def _pod(config: Config, name: str, job: str = "") -> dict[str, Any]:
    """Return the template of a pod of Ray. job: the job's name for the head, whose launcher alone
    gets the keys: it passes each process the ones that this process needs."""
    c = config.cluster
    limits = {"cpu": str(c.cpus), "memory": f"{c.memory_gib}Gi"}
    limits |= {"nvidia.com/gpu": str(c.gpus)} if c.gpus else {}
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "COPPICE_CACHE": f"{_SHARED}/cache"}
    mounts = {"runs": _SHARED, "memory": "/dev/shm"} | ({"job": _JOB} if job else {})
    volumes: list[dict[str, Any]] = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": c.volume}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    volumes += [{"name": "job", "configMap": {"name": job}}] if job else []
    container: dict[str, Any] = {
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "volumeMounts": [{"name": key, "mountPath": path} for key, path in mounts.items()],
        "resources": {"limits": limits, "requests": dict(limits)},
    }  # fmt: skip
    if c.secret and job:
        container["envFrom"] = [{"secretRef": {"name": c.secret}}]
    return _template(config, name, container, {"volumes": volumes})


def _submitter(config: Config) -> dict[str, Any]:
    """Return the template of the pod that hands the job to Ray's dashboard."""
    resources = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
    container = {"resources": resources}
    return _template(config, "ray-job-submitter", container, {"restartPolicy": "Never"})


def _template(
    config: Config, name: str, container: dict[str, Any], spec: dict[str, Any]
) -> dict[str, Any]:
    """Return a pod that the profile "restricted" of Kubernetes admits."""
    user = {"runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}
    own = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    pod = {
        "automountServiceAccountToken": False,
        "securityContext": user | {"seccompProfile": {"type": "RuntimeDefault"}},
    } | copy.deepcopy(config.cluster.pod)  # yaml would name what several pods share
    first = {"name": name, "image": config.cluster.image, "securityContext": own}
    return {"spec": pod | {"containers": [first | container]} | spec}


WRITERS: dict[str, Callable[[Config, str], str]] = {"slurm": slurm, "kuberay": kuberay}
"""The values of ``--cluster`` that print a job and start nothing."""
