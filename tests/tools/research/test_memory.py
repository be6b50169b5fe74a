"""What a run takes of the machine's memory; processes that compute nothing hold no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from coppice.research.benches import memory
from tests.forks import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "module",
    ["tools.launching.command", "scheduler.main", "judges.serve", "judges.retriever.worker"],
)
def test_what_computes_nothing_imports_no_torch(module: str) -> None:
    code = f"import sys, coppice.{module}; print({{'torch', 'transformers', 'faiss'}} & {{*sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout == "set()\n"


def test_every_process_of_a_run_is_counted_and_the_launcher_stays_small(searching: Path) -> None:
    small = {"actors.count": 2, "learner.count": 2, "scheduler.updates": 1}
    peaks = memory.measure(searching, small)
    single = dict.fromkeys(("launcher", "scheduler", "judges", "retriever"), 1)
    assert peaks.counts | {"set-up": 0} == single | {"actor": 2, "learner": 2, "set-up": 0}
    assert peaks.each["launcher"] < 0.15 > peaks.each["judges"]  # with torch it is above 0.25
    assert peaks.total == pytest.approx(sum(peaks.at.values()))
    assert peaks.total > 0.2
