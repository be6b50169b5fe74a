"""Keep the weights that did best on the held-out tasks (methods.md 2.4) as hard links in the only
folder RUN/best/vNNNNNN, beside best.json. Version 0 has no weights of its own."""

import logging
import os
import shutil
from pathlib import Path

import msgspec

from coppice.common.atomic import drafted
from coppice.common.jsonl import MALFORMED
from coppice.wire import published
from coppice.wire.faults import InfrastructureFault
from coppice.wire.published import Weights

log = logging.getLogger("scheduler.best")


class Best(msgspec.Struct, frozen=True):
    """The best version. value: the mean of the headline ``measure`` on held-out tasks. how: what
    else values must agree in to be compared."""

    version: int
    measure: str
    value: float
    how: str = ""


def read(run: Path) -> tuple[Best, Path] | None:
    """The best version so far and its folder, or None. A torn record is ignored."""
    records = []
    for path in sorted((run / "best").glob("v??????/best.json")):
        try:
            records.append((msgspec.json.decode(path.read_bytes(), type=Best), path.parent))
        except MALFORMED as error:
            log.warning("%s is damaged and is ignored: %s", path, error)
    return max(records, key=lambda pair: pair[0].value, default=None)


def keep(run: Path, weights: Weights, measure: str, value: float, how: str = "") -> bool:
    """Keep ``weights`` if they are the best so far of those measured alike; a full disk ends no
    run."""
    before, record = read(run), Best(weights.version, measure, value, how)
    alike = before is not None and before[0].measure == measure and before[0].how in ("", how)
    if before is not None and alike and before[0].value >= value:
        return False
    folder = run / "best" / f"v{weights.version:06d}"
    try:
        # a folder that exists already has a torn record, or weights that a crash has undone
        with drafted(folder, replace=True, alone=True) as draft:
            source = Path(weights.path)
            if weights.version:
                links = published.chain(source)
                if not all(link.file for _, link in links):
                    raise FileNotFoundError(f"{source} was given out of memory, without a file")
                for folder, _ in links:
                    into = draft if folder == source else draft / folder.name
                    into.mkdir(exist_ok=True)
                    for path in filter(Path.is_file, folder.iterdir()):
                        _link(path, into / path.name)
            (draft / "best.json").write_bytes(msgspec.json.encode(record))
    except (OSError, InfrastructureFault) as error:
        log.warning("version %d did best so far and could not be kept: %s", weights.version, error)
        return False
    if before is not None and not alike:
        was = f"{before[0].version} ({before[0].measure} {before[0].value:.3f})"
        log.warning("best is version %d after %s: evaluated otherwise", weights.version, was)
    if before is not None and before[0].version != weights.version:
        shutil.rmtree(before[1], ignore_errors=True)
    return True


def _link(path: Path, place: Path) -> None:
    try:
        os.link(path, place)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(path, place)
