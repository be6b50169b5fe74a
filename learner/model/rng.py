"""The random states of a rank, for its checkpoint. The learner's own draws depend on seed and
version alone; schemes and corrections that users plug in, and layers with dropout, draw from the
generators of Python, NumPy and torch."""

import random
from typing import Any

import msgspec
import numpy as np
import torch


class RngState(msgspec.Struct, frozen=True):
    """The generators' states. cuda: one entry per device."""

    python: tuple[int, list[int], float | None]
    numpy: tuple[str, list[int], int, int, float]
    torch: bytes
    cuda: list[bytes]


def state() -> RngState:
    """Return the states now."""
    version, words, spare = random.getstate()
    name, key, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    numpy: Any = (name, np.asarray(key).tolist(), *rest)
    own, *devices = (one.numpy().tobytes() for one in (torch.get_rng_state(), *cuda))
    return RngState((version, list(words), spare), numpy, own, devices)


def restore(saved: RngState) -> None:
    """Put the generators into saved states. Devices without a saved state keep theirs."""
    version, words, spare = saved.python
    random.setstate((version, tuple(words), spare))
    name, key, *rest = saved.numpy
    state: Any = (name, np.array(key, np.uint32), *rest)
    np.random.set_state(state)
    torch.set_rng_state(_unpacked(saved.torch))
    for device, packed in enumerate(saved.cuda[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_unpacked(packed), device)


def _unpacked(packed: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)
