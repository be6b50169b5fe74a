"""Keep the weights that did best on the held-out tasks, even after the learner deletes their
version (methods.md 2.4: best on validation).

The only folder RUN/best/vNNNNNN holds these weights and best.json. The weights are hard links where
the file system has them, and take no space twice. Version 0 is the model from which the run
started; it has no weights of its own.
"""

import logging
import os
import shutil
from pathlib import Path

import msgspec

from coppice.common.atomic import drafted
from coppice.scheduler.telemetry.spread import Weights
from coppice.wire import published

log = logging.getLogger("scheduler.best")


class Best(msgspec.Struct, frozen=True):
    """The result of the best version. measure: the environment's headline; value: its mean over the
    held-out tasks."""

    version: int
    measure: str
    value: float


def read(run: Path) -> tuple[Best, Path] | None:
    """The best version so far and its folder, or None before the first evaluation. A record that a
    power cut left torn is ignored."""
    records = []
    for path in sorted((run / "best").glob("v??????/best.json")):
        try:
            records.append((msgspec.json.decode(path.read_bytes(), type=Best), path.parent))
        except msgspec.DecodeError as error:
            log.warning("%s is damaged and is ignored: %s", path, error)
    return max(records, key=lambda pair: pair[0].value, default=None)


def keep(run: Path, weights: Weights, measure: str, value: float) -> bool:
    """Keep ``weights`` if they are better than the best so far. Returns whether they were kept; a
    full disk does not end the run."""
    before = read(run)
    if before is not None and (before[0].value >= value or before[0].version == weights.version):
        return False
    folder = run / "best" / f"v{weights.version:06d}"
    try:
        # a folder that exists already has a torn record
        with drafted(folder, replace=True, alone=True) as draft:
            for path in _files(weights):
                _link(path, draft / path.name)
            (draft / "best.json").write_bytes(
                msgspec.json.encode(Best(weights.version, measure, value))
            )
    except OSError as error:
        log.warning("version %d did best so far and could not be kept: %s", weights.version, error)
        return False
    if before is not None:
        shutil.rmtree(before[1], ignore_errors=True)
    return True


def _files(weights: Weights) -> list[Path]:
    """The files of a version's weights. Raises FileNotFoundError if the learner gave them out of
    its memory only."""
    if not weights.version:
        return []
    folder = Path(weights.path)
    if not msgspec.json.decode(
        (folder / published.NAME).read_bytes(), type=published.Manifest
    ).file:
        raise FileNotFoundError(f"{folder} has no file of weights: they were given out of memory")
    return sorted(folder.iterdir())


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # the target is on another file system, or the file system has no hard links
        shutil.copy2(source, target)
