"""What changed in a tensor since the policy version before: new values and their places. After a
step of training few elements differ in bfloat16."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from coppice.wire import digest

SPAN = 2**16
"""At least one element in so many is stored, changed or not, so that a gap fits 16 bits."""
_PIECE = 2**26
"""Elements compared at a time, a multiple of SPAN, which bounds the memory that this takes."""
_GAPS = "#gaps"


def changed(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the places at which two flat tensors of one type differ in a bit, and every SPAN-th;
    none if they are equal. int64, on their device."""
    bits, found, any_ = {2: torch.int16, 4: torch.int32}[old.itemsize], [], False
    for first in range(0, len(old), _PIECE):
        pieces = [side[first : first + _PIECE].view(bits) for side in (old, new)]
        differs = pieces[0] != pieces[1]
        any_ |= bool(differs.any())
        differs[::SPAN] = True
        found.append(differs.nonzero().flatten() + first)
    return torch.cat(found) if any_ else torch.empty(0, dtype=torch.int64, device=old.device)


class Delta:
    """The changes of one rank's rows, which ``add`` collects and ``write`` writes."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._first: dict[str, int] = {}

    def add(self, name: str, old: torch.Tensor, new: torch.Tensor, first: int) -> None:
        """Compare flat rows, which begin at element ``first`` of their tensor."""
        places = changed(old, new)
        if not len(places):
            return
        self._first[name] = first
        if 2 * len(places) > len(new):  # all values are shorter than the changed with their gaps
            self._tensors[name] = new.cpu()
            return
        gaps = places.diff(prepend=places.new_tensor([-1])) - 1
        self._tensors |= {name: new[places].cpu(), name + _GAPS: gaps.to(torch.uint16).cpu()}

    def __len__(self) -> int:
        return len(self._first)

    def write(self, path: Path) -> None:
        save_file(self._tensors, path, metadata={"first": json.dumps(self._first)})


def apply(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file's values into tensors of any type, device and layout."""
    with safe_open(path, framework="pt") as file:
        held = set(file.keys())
        for name, first in json.loads(file.metadata()["first"]).items():
            whole = tensors[name]
            values, into = file.get_tensor(name), whole.reshape(-1)  # a copy in another layout
            values = values.to(into.device, into.dtype)
            if name + _GAPS in held:
                gaps = file.get_tensor(name + _GAPS).to(into.device, torch.int64)
                into[(gaps + 1).cumsum(0) + (first - 1)] = values
            else:
                into[first : first + len(values)] = values
            if not whole.is_contiguous():
                whole.copy_(into.view_as(whole))


def mapped(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, flat: what is written to them changes the file."""
    start, entries = digest.layout(path)
    size = path.stat().st_size
    content = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16}
    places = {name: slice(*entry.data_offsets) for name, entry in entries.items()}
    content = content[start:]
    return {name: content[at].view(kinds[entries[name].dtype]) for name, at in places.items()}
