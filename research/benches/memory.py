"""Peak memory of a whole run: the proportional set size (PSS) of every process of ``coppice
launch``, sampled from outside.

PSS divides a page among the processes that map it, so the sum over all processes is the memory that
the run takes from the machine. ``coppice dev bench memory --set actors=1 --set learner=1 --set
'changes=["learner.dtype=float32"]'`` measures other sizes and number types.
"""

import os
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from coppice.common.numbers import Count
from coppice.research.benches import launch_command, result
from coppice.tools.bootstrap import ROOT

LARGE = ROOT / "configs" / "slate-cpu.toml"
"""The largest model that a laptop is meant to train: SmolLM2-135M."""
SHORT = {"scheduler.updates": 1, "scheduler.evaluation.questions": 8}
"""One update needs as much memory as sixteen, because the largest forest and the fullest cache make
the peak."""
INTERVAL_S = 0.3
GOAL_GIB = {8: 12.0, 2: 4.0}
"""The goal by the total number of actors and ranks: the free memory of a laptop with 16 GB, and
with 8 GB."""
_PROCESS_FILE = re.compile(r"processes/([a-z-]+?)(-\d+)?\.json$")


class Peaks(msgspec.Struct):
    """Peaks in GiB. total: the sum over all processes. each: one process of a kind. at: the parts
    of the largest total. counts: the most processes of a kind that were seen at once. Starts empty;
    ``take`` adds samples."""

    total: float = 0.0
    each: dict[str, float] = {}
    at: dict[str, float] = {}
    counts: dict[str, int] = {}

    def take(self, sizes: Sequence[tuple[str, float]]) -> None:
        """Add one sample: the kind and the GiB of every process."""
        sums, seen = Counter[str](), Counter[str]()
        for kind, size in sizes:
            sums[kind] += size  # pyright: ignore[reportArgumentType] (a Counter can add floats)
            seen[kind] += 1
            self.each[kind] = max(size, self.each.get(kind, 0.0))
        for kind, count in seen.items():
            self.counts[kind] = max(count, self.counts.get(kind, 0))
        if sum(sums.values()) > self.total:
            self.total, self.at = sum(sums.values()), dict(sums)


def kind(command: Sequence[str]) -> str:
    """Return the kind of a launcher's descendant: "actor" for actor-3 and so on by its process
    file, else "set-up": the set-up, the fork server, and the moment before a fork has its line."""
    # a fork's line ends with empty words
    match = _PROCESS_FILE.search(" ".join(command).strip())
    return match[1] if match else "set-up"


def sample(root: psutil.Process) -> list[tuple[str, float]]:
    """Return the kind and GiB of a process and of all its descendants. Processes that end meanwhile
    are left out."""
    sizes = []
    try:
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return []
    for process in family:
        try:
            size = process.memory_full_info().pss / 2**30
            sizes.append(("launcher" if process == root else kind(process.cmdline()), size))
        except psutil.Error:
            continue
    return sizes


def watch(command: Sequence[str], printed: Path, variables: Mapping[str, str] = {}) -> Peaks:
    """Run ``command`` to its end, with its output in the file ``printed``. Return the peaks of its
    processes. Raises RuntimeError, with the end of its output, if it fails."""
    peaks = Peaks()
    with printed.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | variables, stdout=out, stderr=out, process_group=0
        )
        try:
            root = psutil.Process(process.pid)
            while process.poll() is None:
                peaks.take(sample(root))
                time.sleep(INTERVAL_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if process.returncode:
        end = printed.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}:\n{end}")
    return peaks


def measure(config: Path, settings: Mapping[str, object]) -> Peaks:
    """Return the peaks of ``coppice launch`` in a folder of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        return watch(launch_command(folder / "run", config, settings), folder / "printed")


def run(actors: Count = 4, learner: Count = 4, changes: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the peak in GiB of a run of one update on SmolLM2-135M. changes: keys of the config
    that have other values."""
    sizes = {"actors.count": actors, "learner.count": learner}
    peaks = measure(LARGE, SHORT | sizes | dict(change.split("=", 1) for change in changes))
    name = f"memory: GiB of all processes, --actors {actors} --learner {learner}"
    goal = GOAL_GIB.get(actors + learner, GOAL_GIB[8])
    return result(name, peaks.total, goal, "lower", **msgspec.to_builtins(peaks))
