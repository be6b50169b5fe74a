"""Our packer of prefix trees and its peers, run through the suite of ``coppice.research.packers``:
which trees each trains exactly, and what its packing costs. The suite's tables go to stderr.

The suite runs in the environment that has the peers, so that packing is timed in rounds of one
process. The ratio counts and does not time."""

import json
import os
import subprocess

from coppice.common.numbers import Count
from coppice.research import venvs
from coppice.research.benches import result
from coppice.research.packers import BOUND
from coppice.tools.defaults.settings import importable

PACKERS = ("ours", "trl_row", "trl_recurrent", "grouper")


def run(rounds: Count = 7) -> dict[str, object]:
    """Run the suite. The ratio is that of the tokens that the best peer forwards to ours, on the
    worst batch. Raises RuntimeError if our packer trains a case inexactly."""
    python = str(venvs.python("trl", "peer", over_ours=True))
    variables = {"PYTHONPATH": str(importable()), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables["TRL_EXPERIMENTAL_SILENCE"] = "1"
    command = [python, "-m", "coppice.research.packers", *PACKERS, "--json", f"--rounds={rounds}"]
    environment = os.environ | variables
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True)
    values = json.loads(done.stdout)
    cases = values["cases"]["ours"].items()
    if wrong := [title for title, row in cases if not row["gradient"] < BOUND]:
        raise RuntimeError(f"our packer trains {wrong} otherwise than path by path")
    ratio = min(
        row["tokens"] / batch["packers"]["ours"]["tokens"]
        for batch in values["batches"].values()
        for name, row in batch["packers"].items()
        if name != "ours"
    )
    return result("packers: tokens of the best peer / ours (worst batch)", ratio, 1.0, **values)
