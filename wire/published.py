"""The manifest of a version folder. The folder also holds the weights, unless they are only in the
learner's memory: ``model.safetensors`` (kind "full"), or ``adapter_model.safetensors`` with
``adapter_config.json`` (kind "lora", the PEFT format). Whole weights may also be the changes since
the version before (``common.deltas``), in a file of each rank; then several folders are a chain."""

import hashlib
import hmac
from pathlib import Path
from typing import Literal

import msgspec

from coppice.wire import digest
from coppice.wire.faults import InfrastructureFault

FILES = {"full": "model.safetensors", "lora": "adapter_model.safetensors"}
DELTAS = "delta-?????.safetensors"
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


class Weights(msgspec.Struct, frozen=True):
    """The newest weights, as ``RUN/learner.json`` names them; 0 is the model folder, with which
    actors start."""

    version: int = 0
    path: str = ""
    digest: str = ""


class Manifest(msgspec.Struct, frozen=True):
    """One version. file: whether the folder holds its weights. digest: ``wire.digest.total`` of
    the weights if there is a file, ``following`` of changes, otherwise
    that of ``learner.publish.sums``. previous: version and digest of those that changed."""

    version: int
    kind: Literal["full", "lora"]
    digest: str
    file: bool = True
    memory: Memory | None = None
    previous: tuple[int, str] | None = None

    def write(self, folder: Path) -> None:
        """Write the manifest into a version folder, readable only by the folder's owner."""
        path = folder / NAME
        path.touch(0o600)
        path.write_bytes(msgspec.json.encode(self))


def following(previous: str, folder: Path) -> str:
    """Return the digest of a version from that of the one before and the changes in its folder.
    Without a change the digest stays. Raises OSError."""
    parts = [digest.file(path, drop=False) for path in sorted(folder.glob(DELTAS))]
    return hashlib.sha256("".join([previous, *parts]).encode()).hexdigest() if parts else previous


def chain(folder: Path, expected: str = "") -> list[tuple[Path, Manifest]]:
    """Return the folders that a version's weights are made of, whole weights first. The others are
    beside it or, of a copy, in it. Raises InfrastructureFault for a link that is missing or other
    than expected ("": anything)."""
    wanted, links = folder, [(folder, read(folder, expected))]
    while previous := links[0][1].previous:
        version, expected = previous
        own = folder / f"v{version:06d}"
        folder = own if own.is_dir() else folder.parent / own.name
        try:
            manifest = read(folder, expected)
            if version >= links[0][1].version:
                raise InfrastructureFault(f"{folder} would follow itself")
        except InfrastructureFault as fault:
            raise InfrastructureFault(
                f"weights {wanted} are changes of version {version}, a missing link ({fault}): the"
                " next whole version mends it (learner.whole_every); a resume writes one at once"
            ) from None
        links.insert(0, (folder, manifest))
    return links


def read(folder: Path, expected: str) -> Manifest:
    """Return the manifest of a version folder. Raises InfrastructureFault when it is missing,
    malformed or has another digest than expected ("": any)."""
    try:
        manifest = msgspec.json.decode((folder / NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InfrastructureFault(
            f"weights {folder} cannot be read: {type(error).__name__}: {error}"
        ) from None
    if expected and manifest.digest != expected:
        raise InfrastructureFault(
            f"weights {folder}: digest {manifest.digest[:16]}, expected {expected[:16]}; the old"
            " weights stay in force"
        )
    return manifest
