"""The phases of an update: every moment counts once, and all of them are in the update's time."""

import time
from pathlib import Path

import pytest

from coppice.learner.update.stopwatch import PREFIX, Stopwatch
from tests.updates import episodes, trainer


def test_a_phase_inside_another_one_interrupts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 3.0, 6.0, 10.0, 15.0, 21.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(moments))
    timed = Stopwatch()
    with timed("score"), timed("pack"):
        pass
    with timed("pack"):
        pass
    assert timed.take() == {f"{PREFIX}score": 2.0 + 4.0, f"{PREFIX}pack": 3.0 + 6.0}
    assert timed.take() == {}


def test_an_update_tells_its_phases(tmp_path: Path, llama: Path) -> None:
    made = trainer(llama, tmp_path, scheme="gae", epochs=2)
    first, second = (made.update(episodes(version, version)) for version in range(2))
    for metrics, more in ((first, {"check"}), (second, set())):
        phases = {
            name.removeprefix(PREFIX): seconds
            for name, seconds in metrics.items()
            if name.startswith(PREFIX)
        }
        assert set(phases) == {"pack", "score", "forward", "backward", "step", "critic"} | more
        assert 0 < sum(phases.values()) <= metrics["learner/seconds"]
