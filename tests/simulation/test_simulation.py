"""Every invariant holds for every seed, and a seed is one history."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.simulation.world import simulate

ROOT = Path(__file__).parent.parent.parent
SLOW_SECONDS = 25.0


@pytest.mark.second
def test_every_invariant_holds_for_the_first_seeds() -> None:
    failures = {seed: failed for seed in range(15) if (failed := simulate(seed).failures)}
    assert failures == {}, "replay one with python -m tests.simulation SEED"


@pytest.mark.slow
def test_every_invariant_holds_for_as_many_seeds_as_the_time_allows() -> None:
    end, seed = time.monotonic() + SLOW_SECONDS, 1000
    while time.monotonic() < end and seed < 1300:
        assert simulate(seed).failures == [], f"replay it with python -m tests.simulation {seed}"
        seed += 1
    assert seed > 1020, "the simulation has become too slow to find anything"


@pytest.mark.slow
def test_a_seed_has_one_history_in_every_process_and_the_command_prints_it() -> None:
    command = [sys.executable, "-m", "tests.simulation", "7"]
    seeded = (os.environ | {"PYTHONHASHSEED": number} for number in ("1", "2"))
    first, again = (subprocess.check_output(command, cwd=ROOT, env=e, text=True) for e in seeded)
    assert first == again
    assert first.splitlines()[:-1] == simulate(7).lines() != simulate(8).lines()
    assert first.endswith("seed 7: every invariant holds\n")
