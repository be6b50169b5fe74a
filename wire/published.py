"""The manifest of a version folder. The folder also holds the weights, unless they are only in the
learner's memory: ``model.safetensors`` (kind "full"), or ``adapter_model.safetensors`` with
``adapter_config.json`` (kind "lora", the PEFT format)."""

import hashlib
import hmac
from pathlib import Path
from typing import Literal

import msgspec

from coppice.wire.faults import InfrastructureFault

FILES = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}
NAME = "manifest.json"


class Memory(msgspec.Struct, frozen=True):
    """Where the learner offers the same weights from its memory (``learner.weight_server``).

    store: host:port of the learner's rendezvous store. device: "cuda" or "cpu". token: the secret
    that seals what is said there, known only to those who may read the run folder.
    """

    store: str
    device: str
    token: str = ""


def prefix(token: str) -> str:
    """Return the beginning of a run's keys in the rendezvous store, which is no secret."""
    return hashlib.sha256(token.encode()).hexdigest()[:32]


def sealed(token: str, key: str, text: str) -> str:
    """Return what is stored under ``key``: a proof that its author has the token, then the text."""
    return hmac.new(token.encode(), f"{key}\n{text}".encode(), hashlib.sha256).hexdigest() + text


def opened(token: str, key: str, stored: bytes) -> str:
    """Return the text that was stored under ``key``. Raises ValueError if somebody without the
    token wrote it."""
    text = stored[64:].decode()
    if not hmac.compare_digest(sealed(token, key, text).encode(), stored):
        raise ValueError(f"{key} in the rendezvous was not written by this run")
    return text


def inside(run: Path, path: str) -> str:
    """Return ``path``, a version's folder that came in a message. Raises InfrastructureFault when
    it is not inside RUN/weights, even by a link."""
    weights = (run / "weights").resolve()
    if weights not in Path(path).resolve().parents:
        raise InfrastructureFault(
            f"weights at {path!r} are refused: expected a folder inside {weights}"
        )
    return path


class Manifest(msgspec.Struct, frozen=True):
    """One version. file: whether the folder holds its weights. digest: ``wire.digest.tensors`` of
    the weights if there is a file, otherwise ``learner.publish.fingerprint``."""

    version: int
    kind: Literal["full", "lora"]
    digest: str
    file: bool = True
    memory: Memory | None = None

    def write(self, folder: Path) -> None:
        """Write the manifest into a version folder, readable only by the folder's owner."""
        path = folder / NAME
        path.touch(0o600)
        path.write_bytes(msgspec.json.encode(self))


def read(folder: Path, expected: str) -> Manifest:
    """Return the manifest of a version folder. Raises InfrastructureFault when it is missing,
    malformed or has another digest."""
    try:
        manifest = msgspec.json.decode((folder / NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise InfrastructureFault(
            f"weights {folder} cannot be read: {type(error).__name__}: {error}"
        ) from None
    if manifest.digest != expected:
        raise InfrastructureFault(
            f"weights {folder}: digest {manifest.digest[:16]}, expected {expected[:16]}; the old"
            " weights stay in force"
        )
    return manifest
