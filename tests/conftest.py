"""Shared fixtures."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# at the top, because its pytest plugin imports it at the end of a session, where 3.11 may fail to
import hypothesis
import pytest
import torch

from coppice.actors.environments.bfcl.leaderboard import leaderboard
from tests import tiny, world
from tests.forks import ROOT, Server
from tests.runs import Launch, Run

# how long an example takes is the machine's business
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

SLOW = ("e2e", "faults", "gpu")
"""Folders of tests/ in which every test is slow: whole runs, processes that die, CUDA."""

LONG = ("tests/tools/research", "tests/actors/test_sglang_fleet.py")
"""Where slow tests run with tools/test --all only: measurements, and further ways to SGLang."""

COMPUTING = tuple(
    f"tests/{place}"
    for place in (
        "actors/test_local_engine.py actors/test_engine_contract.py documentation gpu judges"
        " learner simulation test_ tools/defaults tools/finetuning tools/planning"
        " tools/research/test_costs.py tools/research/test_theory"
    ).split()
)
"""Where slow tests compute, so that several may run at once."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow or long, where it is not marked where it stands, and what runs alone."""
    for item in items:
        names = getattr(item, "fixturenames", ())
        served = {"sglang_server", "vllm_server"}.intersection(names)
        served = served or "[sglang" in item.name or "[vllm" in item.name
        place = item.path.relative_to(config.rootpath).as_posix()
        if item.path.parent.name in SLOW or served or item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
        slow = item.get_closest_marker("slow") is not None
        if slow and place.startswith(LONG):
            item.add_marker(pytest.mark.long)
        if slow and (served or not place.startswith(COMPUTING)):
            item.add_marker(pytest.mark.alone)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    # SGLang's attention in Triton takes no heads below 16 on a GPU
    shape = {"head_dim": 64} if torch.cuda.is_available() else {}
    return tiny.save(tmp_path_factory.mktemp("llama"), "llama", **shape)


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny.save_vision(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="session")
def bfcl_wheel() -> None:
    """Fetches the wheel of the Berkeley Function Calling Leaderboard, without which tests skip."""
    try:
        leaderboard("")
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server whose forks the processes of whole runs are."""
    made = Server()
    yield made
    made.close()


@pytest.fixture(scope="session")
def searching(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a small run of SLATE."""
    return world.search(tmp_path_factory.mktemp("searching"))


@pytest.fixture
def launch(server: Server, tmp_path: Path) -> Iterator[Launch]:
    """Launch a run in the folder ``tmp_path / "run"`` with arguments of coppice launch. anew: it
    is started as a user's is, and is no fork."""
    with contextlib.ExitStack() as stack:

        def start(config: Path | None, *words: str, anew: bool = False, cwd: Path = ROOT) -> Run:
            run = Run(config, tmp_path / "run", None if anew else server, cwd=cwd)
            stack.callback(run.close)
            run.launch(*words)
            return run

        yield start


@pytest.fixture(scope="session")
def sglang_server(llama: Path) -> Iterator[Any]:
    """A real SGLang server of the tiny Llama, with adapters, for all tests that need one."""
    from tests.sglang_cpu.shared import LORA, Shared

    made = Shared(llama, LORA)
    yield made
    made.close()


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama folder for vLLM, which on a CPU takes no smaller heads, and no whole weights of
    an output layer that is tied to the embedding."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("wide")
    return tiny.save(folder, "llama", head_dim=32, tie_word_embeddings=False)


@pytest.fixture(scope="session")
def vllm_server(wide: Path) -> Iterator[Any]:
    """A real vLLM server, with adapters, for all tests that need one."""
    from tests.vllm_cpu.shared import SharedVLLM

    made = SharedVLLM(wide, {})
    yield made
    made.close()


@pytest.fixture(autouse=True)
def gradients():
    """An engine in the same process switches gradients off for good; tests start with them on."""
    torch.set_grad_enabled(True)
    yield
    torch.set_grad_enabled(True)
