"""OpenEnv's classes in this process. COPPICE_OPENENV_PYTHON names a Python with openenv, in which
these tests and the contract's run over the library."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from coppice.actors.environments.others.openenv import OpenEnv
from coppice.wire.faults import DataFault

pytest.importorskip("pydantic")
ROOT = Path(__file__).parents[2]
THERE = """
import sys
sys.path.append(sys.argv[1])  # after its own packages, so that the library keeps its versions
import pytest
from openenv.core.env_server.interfaces import Environment
options = ["-v", "-p", "no:cacheprovider", "-p", "no:xdist"]
sys.exit(pytest.main([*options, "-k", "(OpenEnv or openenv) and not itself", *sys.argv[2:]]))
"""
NO_TOOLS: Any = None


def counting(name: str = "Counting") -> Any:
    return OpenEnv(
        f"tests.openenv_shape:{name}", "tests.openenv_shape:Add", "You add.", field="number"
    )


async def played(environment: Any, *actions: Any, seed: int = 7) -> Any:
    """Play actions from the beginning. Returns the last transition."""
    transition, state = None, environment.initial(environment.task(seed))
    for action in actions:
        read = environment.read(state, f"<action>{action}</action>")
        transition = await environment.step(state, read, NO_TOOLS)
        state = transition.state
    return transition


async def test_the_policy_sees_the_fields_and_earns_the_rewards() -> None:
    environment = counting()
    assert json.loads(environment.initial(environment.task(7)).seen) == {"total": 7, "drawn": 0}
    two = await played(environment, 1, '{"number": 2}')
    assert (json.loads(two.observation)["total"], two.reward, two.done) == (10, 0.2, False)
    last = await played(environment, 1, 2, 9)
    assert (last.done, last.outcome, last.measures) == (True, pytest.approx(1.2), {"success": 1.0})
    quiet = await played(counting("Unseeded"), 1, 9)
    # a reward of None earns nothing
    assert (quiet.done, quiet.outcome, quiet.measures) == (True, 0.0, {"success": 0.0})


async def test_two_seeds_of_an_environment_that_takes_none_differ() -> None:
    seen = [(await played(counting("Unseeded"), 1, seed=seed)).observation for seed in (1, 1, 2)]
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.parametrize("action", ['{"number": "many"}', '{"number": 1, "more": 2}', "many"])
async def test_an_action_that_is_refused_ends_the_episode_with_what_it_earned(action: str) -> None:
    last = await played(counting(), 5, action)
    assert (last.done, last.outcome, last.measures) == (True, 0.5, {"success": 0.0})


async def test_what_an_environment_raises_is_a_fault_of_its_task() -> None:
    said = "Counting: the episode of seed 13 cannot begin: RuntimeError: no episode of"
    with pytest.raises(DataFault, match=said):
        await played(counting(), 1, seed=13)
    said = r'Counting: the action {"number": -1} fails: RuntimeError: only upwards'
    with pytest.raises(DataFault, match=said):
        await played(counting(), 1, -1)


def test_a_class_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"tests\.openenv_shape:Missing.*expected module:Class"):
        counting("Missing")


@pytest.mark.slow
def test_the_library_itself_passes_in_its_own_python() -> None:
    """openenv needs an older mcp than this Python has, so it is in one of its own, which finds this
    project's packages after its own."""
    python = os.environ.get("COPPICE_OPENENV_PYTHON") or pytest.skip("no COPPICE_OPENENV_PYTHON")
    code = "import sys; print(sys.version_info[:2])"
    version = subprocess.run([python, "-c", code], stdout=-1, text=True, check=True).stdout.strip()
    if version != str(sys.version_info[:2]):
        pytest.skip("COPPICE_OPENENV_PYTHON of another version cannot load this project's packages")
    folder, own = Path(__file__).parent, Path(__file__).name
    files = [str(folder / name) for name in ("test_other_environments.py", own)]
    command = [python, "-c", THERE, sysconfig.get_paths()["purelib"], *files]
    environment = os.environ | {"COPPICE_OPENENV_REAL": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_ADDOPTS", None)
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=-1, stderr=-2, text=True)
    passed = run.returncode == 0 and " passed" in run.stdout and "skipped" not in run.stdout
    assert passed, run.stdout[-4000:]
