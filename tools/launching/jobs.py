"""Writes the job that starts a run on a cluster: a SLURM script, or a RayJob for KubeRay. Both
carry the config, and start Ray on the nodes and the run on the first of them. A job that is started
again goes on with its run."""

import math
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import yaml

from coppice.common.atomic import as_json
from coppice.tools.defaults.settings import importable
from coppice.tools.launching.config import ConfigError
from coppice.tools.launching.settings import Config

USER = 1000
"""The number of the user in the image (Dockerfile)."""
NAME_LENGTH = 31
"""Letters of a name that are kept, because KubeRay allows a RayJob 47, with the date."""


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


def _written(template: str, config: Config, run: str, flags: str, **values: Any) -> str:
    """Return a template of this folder with its values. run: the run's folder, in bash."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("coppice.tools.launching", ""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    text = as_json(config).decode()
    values |= {"cluster": config.cluster, "config": text, "run": run, "flags": flags}
    return environment.get_template(template).render(values)


def slurm(config: Config, flags: str) -> str:
    """Return the script for sbatch. flags: of coppice launch. Raises ConfigError."""
    c, name = config.cluster, config.name
    for option in (c.partition, c.time, *c.options):
        if option.splitlines() != [option] and option:
            raise ConfigError(f"cluster has {option!r} for sbatch: expected one line")
    run = f"${{1:-{shlex.quote(config.runs)}/{name}-$SLURM_JOB_ID}}"
    places = {"here": str(Path.cwd()), "source": str(importable()), "prefix": sys.prefix}
    return _written("slurm.sh.jinja", config, run, flags, name=name, nodes=nodes(config), **places)


def kuberay(config: Config, flags: str) -> str:
    """Return a RayJob, behind a ConfigMap with its start. Every manifest has a run folder of its
    own. flags: of coppice launch. Raises ConfigError."""
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
    text = _written(
        "kuberay.yaml.jinja", config, f"/runs/{name}", flags,
        name_of_job=name, others=nodes(config) - 1, user=USER,
    )  # fmt: skip
    needs = "KubeRay 1.5 or later, and the claim below with accessModes: [ReadWriteMany]"
    manifests = yaml.safe_dump_all(yaml.safe_load_all(text), sort_keys=False, width=120)
    return f"# needs {needs}\n{manifests}"


WRITERS: dict[str, Callable[[Config, str], str]] = {"slurm": slurm, "kuberay": kuberay}
"""The values of ``--cluster`` that print a job and start nothing."""
