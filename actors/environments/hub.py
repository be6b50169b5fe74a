"""Data sets of the Hugging Face hub: ``owner/name[:split]``, or ``owner/name/folder[:split]`` for a
folder with one file per split.

The hub is asked only when no file of this machine has the name. Every error is a FileNotFoundError
or ValueError that names the data set and the remedy.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

_NAME = re.compile(r"([\w-]+/[\w.-]+)(?:/([\w-]+))?(?::(\w+))?")


class HubSet(msgspec.Struct, frozen=True):
    """The name of a data set. folder: "" if the data set itself has the splits. split: "" if the
    name has no split."""

    repository: str
    folder: str
    split: str


def named(source: str) -> HubSet | None:
    """Return the data set that a source names, None when the source can only be a path."""
    match = _NAME.fullmatch(source)
    if match is None or (not match[2] and "." in match[1]):
        return None
    return HubSet(match[1], match[2] or "", match[3] or "")


def chosen(source: str, splits: Sequence[str]) -> str:
    """Return a data set named without a split with the first of ``splits`` that it has. Any other
    source is returned unchanged."""
    hub_set = None if Path(source).exists() else named(source)
    if hub_set is None or hub_set.split:
        return source
    if hub_set.folder:
        return f"{source}:{_first(hub_set, splits)[0]}"
    known = _asked(source, lambda hub: hub.get_dataset_split_names(hub_set.repository))
    for split in splits:
        if split in known:
            return f"{source}:{split}"
    raise ValueError(
        f"it has the splits {sorted(known)}, none of {', '.join(splits)}: name one, owner/name:split"
    )


def file_of(hub_set: HubSet) -> Path:
    """Return the file of a folder's split (default: train), from the hub or its cache."""
    return _first(hub_set, (hub_set.split or "train",))[1]


def rows_of(hub_set: HubSet) -> Iterator[dict[str, Any]]:
    """Yield the rows of the split (default: train) of a data set without a folder."""
    split = hub_set.split or "train"
    yield from _asked(
        hub_set.repository, lambda hub: hub.load_dataset(hub_set.repository, split=split)
    )


def _first(hub_set: HubSet, splits: Sequence[str]) -> tuple[str, Path]:
    """Return the first split that the folder has, and its file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    folder = hub_set.folder
    for split in splits:
        try:
            return split, Path(
                hf_hub_download(hub_set.repository, f"{folder}/{split}.jsonl", repo_type="dataset")
            )
        # without a network, another split must not replace this one
        except LocalEntryNotFoundError:
            raise FileNotFoundError(
                f"the hub cannot be reached and {folder}/{split}.jsonl is not in its cache: give a path instead"
            ) from None
        except EntryNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise _failed(hub_set.repository, error) from None
    raise FileNotFoundError(
        f"{hub_set.repository} has no {folder}/{' or '.join(splits)}.jsonl: give a path, or owner/name/folder:split"
    )


def _asked(name: str, ask: Any) -> Any:
    """Return what the library ``datasets`` answers about a data set."""
    try:
        import datasets  # pyright: ignore[reportMissingImports] (only sets without a folder need it)
    except ImportError:
        raise FileNotFoundError(
            f"{name!r} is no file; as a hub dataset it needs `pip install datasets`"
        ) from None
    try:
        return ask(datasets)
    except (OSError, ValueError) as error:
        raise _failed(name, error) from None


def _failed(name: str, error: Exception) -> FileNotFoundError:
    reason = str(error).strip().split("\n")[0]
    return FileNotFoundError(
        f"the hub did not give {name}: {reason}; give a path, or owner/name/folder:split if it has one folder per data set"
    )
