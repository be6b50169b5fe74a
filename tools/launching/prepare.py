"""What a config needs of this machine, and the set-up of a run in a process of its own, so that the
launcher never holds torch in memory."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from coppice.actors.environments.task_files import EXPECTED, hub_set_of, listed
from coppice.common import hardware
from coppice.common.process import Killed, in_subprocess
from coppice.tools.launching import forks
from coppice.tools.launching.settings import Assets, Config


def prepare(config: Config, quiet: bool = False) -> Assets:
    """Make every asset that is not cached yet. quiet: without the progress lines. Raises
    FileNotFoundError, ValueError or MemoryError with the remedy."""
    try:
        return in_subprocess(_prepare, config, quiet, method=forks.method)
    except Killed:
        raise MemoryError(
            "the set-up's process was killed, most likely for memory: free some, then start again"
        ) from None


def _prepare(config: Config, quiet: bool) -> Assets:
    if quiet:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # that of this process and of its children
    from coppice.tools.launching import set_up  # it imports torch

    return set_up.prepare(config)


_HAS = "import importlib.util, sys; sys.exit(importlib.util.find_spec('{}') is None)"


def lacking_files(config: Config) -> Iterator[str]:
    """Yield the files that the config names and that are not here. Nothing is asked of the hub."""
    data = config.data
    if config.cluster.on:
        return
    for key, sources in (("train", data.train), ("heldout", data.heldout)):
        for source in listed(sources):
            if source != "default" and not Path(source).exists() and hub_set_of(source) is None:
                yield f"data.{key} = {source!r} does not exist: give {EXPECTED}"
    if data.corpus != "default" and not Path(data.corpus).exists():
        yield f"data.corpus = {data.corpus!r} does not exist: give a JSONL file of {{id, contents}}"


def lacking_machine(config: Config) -> Iterator[str]:
    """Yield what the config's agent or engine needs and this machine lacks."""
    engine, g = config.actors.engine, config.actors.served
    if config.cluster.on:
        return
    for name in config.data.options.get("pass_env", ()):
        if name not in os.environ:
            yield f"data.options.pass_env names {name!r}, which is not set: export it"
    gpus = hardware.visible_gpus()
    software = hardware.gpu_software() if gpus else {}
    made, runs = software.get("torch's CUDA", ""), software.get("CUDA", "")
    if made and runs and int(made.split(".")[0]) > int(runs.split(".")[0]):
        yield (
            f"driver {software['driver']} is made for CUDA {runs}, and torch for CUDA {made}:"
            " expected a newer driver or another torch, or CUDA_VISIBLE_DEVICES= for the CPU"
        )
    w = config.learner
    if gpus and w.here > len(gpus):
        yield (
            f"learner.count = {w.count}: expected at most a rank per GPU ({len(gpus)} here), or"
            " CUDA_VISIBLE_DEVICES= for the CPU"
        )
    if g is None or g.way == "url":
        return
    # a wheel of vLLM is for GPUs or for CPUs
    on_gpus = engine == "sglang" and g.arguments.get("device") != "cpu"
    if on_gpus and not gpus:
        yield (
            "actors.engine = 'sglang' needs a GPU, and nvidia-smi and CUDA_VISIBLE_DEVICES show"
            " none here: start on a machine with a GPU, or take configs/slate-cpu.toml"
        )
    whole = w.publish != "file" and not w.lora.rank
    broadcasts = whole and config.actors.sglang.weights != "disk"
    if on_gpus and gpus and broadcasts and not 0 < g.gpus <= len(gpus) - w.here:
        yield (
            f"learner.publish = {w.publish!r} with actors.sglang.gpus = {g.gpus}: expected GPUs"
            f" beside the learner's (of {len(gpus)}) for broadcasts, or learner.publish = 'file'"
        )
    python, find = g.python or sys.executable, _HAS.format(engine)
    try:
        has = subprocess.run([python, "-c", find], capture_output=True).returncode == 0
    except OSError as error:
        yield f"actors.{engine}.python = {g.python!r} cannot be started: {error.strerror}"
        return
    if not has:
        yield (
            f"actors.engine = {engine!r}, and {python} has no {engine}: install it into an"
            f" environment of its own (docs/engines.md) and let actors.{engine}.python name its"
            " interpreter"
        )
