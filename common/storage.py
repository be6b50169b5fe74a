"""Versions of the weights in object storage, for actors that do not see the run folder: any URL
that fsspec knows (s3://, gs://, file://).

A version is the folder ``URL/vNNNNNN``. Its manifest is written last, so a version with a manifest
is whole.
"""

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec

from coppice.common.atomic import drafted
from coppice.wire.faults import InfrastructureFault
from coppice.wire.published import NAME

log = logging.getLogger("common.storage")

KEPT = 2
"""Versions that an actor keeps on its node: the one in force and the one before."""
_TRIES, _PAUSE_S = 4, 1.0
"""Attempts at an upload, and the pause after the first failure, which doubles."""


def check(url: str) -> None:
    """Refuse a URL whose kind of storage cannot be reached from here. Raises ValueError with the
    remedy."""
    try:
        _called(fsspec.url_to_fs, url)
    except OSError as error:
        raise ValueError(
            f"learner.publish_url = {url!r}: {error}; expected such as 's3://bucket/folder'"
        ) from None


def put(folder: Path, url: str, keep: int) -> None:
    """Copy a version's folder to ``url`` and remove all but the ``keep`` newest versions there.
    Raises OSError after several tries."""
    for attempt in range(_TRIES):
        try:
            store, root = _called(fsspec.url_to_fs, url)
            place = f"{root}/{folder.name}"
            _called(store.makedirs, place, exist_ok=True)
            for file in sorted(folder.iterdir(), key=lambda file: file.name == NAME):
                _called(store.put_file, str(file), f"{place}/{file.name}")
            names = _names(store, root)
            versions = [name for name in names if name.rpartition("/")[2].startswith("v")]
            for old in versions[:-keep]:
                _called(store.rm, old, recursive=True)
            return
        except OSError as error:
            if attempt == _TRIES - 1:
                raise OSError(
                    f"learner.publish_url: {folder.name} could not be written to {url}: {error}"
                ) from error
            log.warning("%s could not be written to %s, once more: %s", folder.name, url, error)
            time.sleep(_PAUSE_S * 2**attempt)


def fetched(path: str, url: str, weights: Path) -> str:
    """Return a version's folder on this node: ``path`` if it is seen here, otherwise a copy in
    ``weights``. Raises InfrastructureFault."""
    folder, here = Path(path), weights / Path(path).name
    if folder.is_dir():
        return path
    if not here.is_dir():
        try:
            store, root = _called(fsspec.url_to_fs, url)
            weights.mkdir(parents=True, exist_ok=True)
            with drafted(here) as draft:
                for file in _names(store, f"{root}/{folder.name}"):
                    _called(store.get_file, file, str(draft / file.rpartition("/")[2]))
                if not (draft / NAME).is_file():
                    raise FileNotFoundError(f"{NAME} is not there")
        except OSError as error:
            raise InfrastructureFault(
                f"weights {folder.name} cannot be read from {url}: {error}"
            ) from None
        for old in sorted(weights.glob("v??????"))[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    return str(here)


def _names(store: Any, place: str) -> list[str]:
    """Return the paths in a folder. An earlier listing of this process is not believed, and FTP
    gives paths only in its details."""
    store.invalidate_cache()
    return sorted(entry["name"] for entry in _called(store.ls, place, detail=True))


def _called(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return what a call into a kind of storage returns. Raises OSError with the text of whatever
    the call raises."""
    try:
        return call(*arguments, **options)
    except Exception as error:
        # The errors of ftplib, botocore, gcsfs and azure are no OSErrors, and most of these
        # packages are not here to be named.
        raise OSError(str(error) or repr(error)) from error
