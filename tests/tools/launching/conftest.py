"""What the tests of coppice launch share."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from coppice.tools.launching.processes import PlannedProcess
from coppice.tools.launching.settings import Assets

COMMAND = "coppice.tools.launching.command"


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A launcher takes the signals of its process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def nothing_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is refused has set nothing up: the cache stays empty."""
    monkeypatch.setenv("COPPICE_CACHE", str(tmp_path / "cache"))
    yield
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def ends_at_once(monkeypatch: pytest.MonkeyPatch) -> PlannedProcess:
    """The one process of every launch, which needs no assets and fails."""
    process = PlannedProcess("scheduler", "no_such_module", "scheduler", 1, True)
    monkeypatch.setattr(f"{COMMAND}.prepare", lambda config, quiet: Assets("M", "T", "H", "I"))
    monkeypatch.setattr(f"{COMMAND}.processes.make", lambda config, found, run: [process])
    return process
