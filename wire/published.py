"""What a version folder says of the weights in it: written by the learner, read by every engine.

The folder holds ``manifest.json`` and, unless the version is only in the learner's memory, ``model.safetensors`` (kind "full") or
``adapter_model.safetensors`` with ``adapter_config.json`` (kind "lora", the PEFT format).
"""

from pathlib import Path
from typing import Literal

import msgspec

from wire.faults import InfrastructureFault

FILES = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}
NAME = "manifest.json"


class Memory(msgspec.Struct, frozen=True):
    """Where the learner gives the same weights out of its memory (``learner.giver``).

    store: host:port of its rendezvous. token: what keys there begin with, known to who may read the run folder. host: its host's name.
    device: "cuda" or "cpu". gpu: which one, as CUDA_VISIBLE_DEVICES names it.
    """

    store: str
    host: str
    device: str
    gpu: str = ""
    token: str = ""


class Manifest(msgspec.Struct, frozen=True):
    """One version. digest: ``wire.digest.tensors`` of its weights, or where they are in no file, ``learner.publish.fingerprint``.

    file: whether the folder holds them.
    """

    version: int
    kind: Literal["full", "lora"]
    digest: str
    file: bool = True
    memory: Memory | None = None

    def write(self, folder: Path) -> None:
        """Into a version folder, for its owner alone."""
        path = folder / NAME
        path.touch(0o600)
        path.write_bytes(msgspec.json.encode(self))


def read(folder: Path, expected: str) -> Manifest:
    """The manifest of a version folder. Raises InfrastructureFault when it is missing, malformed or of another digest."""
    try:
        found = msgspec.json.decode((folder / NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise InfrastructureFault(f"weights {folder} cannot be read: {type(error).__name__}: {error}") from None
    if found.digest != expected:
        raise InfrastructureFault(
            f"weights {folder}: digest {found.digest[:16]}, expected {expected[:16]}; the old weights stay in force"
        )
    return found
