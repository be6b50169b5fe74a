"""Shared fixtures."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# at the top, because its pytest plugin imports it at the end of a session, where 3.11 may fail to
import hypothesis
import pytest
import torch

from tests import tiny, world
from tests.forks import ROOT, Server
from tests.runs import Run

hypothesis.settings.register_profile(
    "any machine", deadline=None
)  # how long an example takes is the machine's business
hypothesis.settings.load_profile("any machine")

SLOW = ("e2e", "faults", "gpu")
"""Folders of tests/ in which every test is slow: whole runs, processes that die, CUDA."""

LONG = ("tests/tools/research", "tests/actors/test_sglang_fleet.py")
"""Where slow tests run with tools/test --all only: measurements, and further ways to SGLang."""

COMPUTING = (
    "tests/gpu",
    "tests/learner",
    "tests/simulation",
    "tests/judges",
    "tests/test_worlds.py",
    "tests/tools/defaults",
    "tests/tools/finetuning",
    "tests/tools/planning",
    "tests/tools/research/test_costs.py",
    "tests/tools/research/test_theory",
)
"""Where slow tests compute and do not depend on what else the machine does, so that several may run
at once."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what tools/test --quick leaves out, what tools/test without --all does (other tests are
    marked where they stand), and what must run alone."""
    for item in items:
        names = getattr(item, "fixturenames", ())
        served = {"sglang_server", "vllm_server"}.intersection(names)
        served = served or "[sglang" in item.name or "[vllm" in item.name
        place = item.path.relative_to(config.rootpath).as_posix()
        if item.path.parent.name in SLOW or served or item.get_closest_marker("long"):
            item.add_marker(pytest.mark.slow)
        if not item.get_closest_marker("slow"):
            continue
        if place.startswith(LONG):
            item.add_marker(pytest.mark.long)
        if served or not place.startswith(COMPUTING):
            item.add_marker(pytest.mark.alone)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama folder."""
    torch.set_num_threads(1)
    return tiny.save(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen2.5-VL."""
    torch.set_num_threads(1)
    return tiny.save_vision(tmp_path_factory.mktemp("seeing"))


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
def launch(server: Server, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Launch a run in the folder ``tmp_path / "run"`` with arguments of coppice launch. anew: its
    processes are started as a user's are, and are no forks."""
    runs: list[Run] = []

    def start(config: Path | None, *arguments: str, anew: bool = False, cwd: Path = ROOT) -> Run:
        run = Run(config, tmp_path / "run", None if anew else server, cwd=cwd)
        runs.append(run)
        run.launch(*arguments)
        return run

    yield start
    for run in runs:
        run.close()


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
    """An engine in the same process switches gradients off for good; each test starts with them on."""
    torch.set_grad_enabled(True)
    yield
    torch.set_grad_enabled(True)
