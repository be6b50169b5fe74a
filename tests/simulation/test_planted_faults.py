"""The simulation finds each fault that is planted into the real code."""

import pytest

from tests.simulation import world
from tests.simulation.planted import FAULTS, Planted, first_violation

QUICK, MOST = 20, 600


def test_a_frequent_fault_is_found_at_once() -> None:
    (fault,) = [fault for fault in FAULTS if fault.name == "a quarantine is not written"]
    assert first_violation(fault, QUICK) is not None


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_planted_fault_is_found(fault: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "CPU_S", 2.0)  # of the faults that hang
    assert first_violation(fault, MOST, fault.hint) is not None
