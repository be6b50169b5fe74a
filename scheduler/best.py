"""The weights that did best on the held-out tasks, kept when the learner lets go of their version (methods.md 2.4: best on validation).

RUN/best/vNNNNNN holds them (hard links where the file system has them, so no space twice) and best.json; there is one such folder. Version
0 is the model that the run started from and has no weights of its own.
"""

import logging
import os
import shutil
from pathlib import Path

import msgspec

from scheduler.spread import Weights
from wire import published
from wire.atomic import drafted

log = logging.getLogger("scheduler.best")


class Best(msgspec.Struct, frozen=True):
    """What a version reached. measure: the environment's headline; value: its mean over the held-out tasks."""

    version: int
    measure: str
    value: float


def read(run: Path) -> tuple[Best, Path] | None:
    """The best version so far and its folder, if anything was evaluated. A record that a power cut left torn counts for nothing."""
    found = []
    for path in sorted((run / "best").glob("v??????/best.json")):
        try:
            found.append((msgspec.json.decode(path.read_bytes(), type=Best), path.parent))
        except msgspec.DecodeError as error:
            log.warning("%s: %s; it is passed over", path, error)
    return max(found, key=lambda pair: pair[0].value, default=None)


def keep(run: Path, weights: Weights, measure: str, value: float) -> bool:
    """Keep ``weights`` if they are better than the best before; whether they are. A full disk costs the copy, not the run."""
    before = read(run)
    if before is not None and (before[0].value >= value or before[0].version == weights.version):
        return False
    folder = run / "best" / f"v{weights.version:06d}"
    try:
        with drafted(folder, replace=True, alone=True) as draft:  # a folder that is there has a torn record
            for path in _files(weights):
                _link(path, draft / path.name)
            (draft / "best.json").write_bytes(msgspec.json.encode(Best(weights.version, measure, value)))
    except OSError as error:
        log.warning("version %d did best so far and could not be kept: %s", weights.version, error)
        return False
    if before is not None:
        shutil.rmtree(before[1], ignore_errors=True)
    return True


def _files(weights: Weights) -> list[Path]:
    """Of a version; raises FileNotFoundError where it was given out of the learner's memory only."""
    if not weights.version:
        return []
    folder = Path(weights.path)
    if not msgspec.json.decode((folder / published.NAME).read_bytes(), type=published.Manifest).file:
        raise FileNotFoundError(f"{folder} has no file of weights: they were given out of memory")
    return sorted(folder.iterdir())


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
