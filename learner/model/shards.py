"""Parameters and optimizer moments as safetensors: one file of rows per rank, whose header holds
each tensor's complete shape and first row. Any number of ranks reads only the rows that it needs.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from coppice.learner.model.optimizer import Stepper
from coppice.learner.model.ranks import Ranks, own_rows


def save(folder: Path, part: str, stepper: Stepper, ranks: Ranks) -> None:
    """Write this rank's rows of ``part`` (weights and moments) as FOLDER/PART-RANK.safetensors.
    Only the first copy of a row is written."""
    rows, where = {}, {}
    with stepper.moments():
        for name, value in _entries(stepper):
            if ranks.rank >= (ranks.shards if isinstance(value, DTensor) else 1):
                continue
            local, first = own_rows(value)
            if local.numel():
                rows[name] = local.cpu().contiguous().clone()
                where[name] = [list(value.shape), first]
    if rows:
        path = folder / f"{part}-{ranks.rank:05d}.safetensors"
        save_file(rows, path, metadata={"where": json.dumps(where)})


class OtherShape(ValueError):
    """A tensor has different shapes in checkpoint and model. Nothing is damaged, but they belong to
    different models."""


class StoredPart:
    """The tensors of one part in a checkpoint. entries: by KIND/PARAMETER, the tensor's shape and
    its rows. Raises ValueError if rows are missing and OtherShape if a shape is not the expected
    one."""

    def __init__(self, folder: Path, part: str):
        self.entries: dict[str, tuple[list[int], list[tuple[int, Any]]]] = {}
        for path in sorted(folder.glob(f"{part}-?????.safetensors")):
            file: Any = safe_open(path, framework="pt")
            for name, (shape, first) in json.loads(file.metadata()["where"]).items():
                self.entries.setdefault(name, (shape, []))[1].append((first, file))

    def rows(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return, on the CPU, the rows of ``name`` that this rank holds of the tensor ``like``."""
        shape, parts = self.entries[name]
        if shape != list(like.shape):
            raise OtherShape(f"{name} has shape {shape}, but the model's has {list(like.shape)}")
        if not shape:
            return parts[0][1].get_tensor(name)
        local, start = own_rows(like)
        stop, pieces, done = start + len(local), [], start
        for first, file in sorted(parts, key=lambda piece: piece[0]):
            piece = file.get_slice(name)
            begin, end = max(start, first), min(stop, first + piece.get_shape()[0])
            if begin < end:
                pieces.append(piece[begin - first : end - first])
                done = end
        if done != max(stop, start) or sum(map(len, pieces)) != len(local):
            raise ValueError(
                f"{name}: rows {start} to {stop} are incomplete; is a shard file missing?"
            )
        return torch.cat(pieces) if pieces else local.cpu()


@torch.no_grad()
def load(stored: StoredPart, stepper: Stepper) -> None:
    """Load weights and moments into a part's parameters and optimizer. Everything is read before
    anything changes. Uses no collectives."""
    read = []
    for name, parameter in stepper.parameters.items():
        state = {}
        for entry in stored.entries:
            kind, _, of = entry.partition("/")
            if of == name and kind != "weight":
                state[kind] = stored.rows(entry, torch.zeros(()) if kind == "step" else parameter)
        read.append((parameter, stored.rows(f"weight/{name}", parameter), state))
    with stepper.moments():
        for parameter, rows, state in read:
            own_rows(parameter)[0].copy_(rows)
            for kind, value in state.items():
                entry = value
                if kind != "step":
                    entry = torch.zeros_like(parameter.detach())
                    own_rows(entry)[0].copy_(value)
                stepper.adamw.state[parameter][kind] = entry


def _entries(stepper: Stepper) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in stepper.parameters.items():
        yield f"weight/{name}", parameter
        # equal states, equal files
        for kind, value in sorted(stepper.adamw.state.get(parameter, {}).items()):
            yield f"{kind}/{name}", torch.as_tensor(value)
