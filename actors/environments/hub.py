"""Data sets of the Hugging Face hub: ``owner/name[:split]``, or a folder of one, ``owner/name/folder[:split]``, with a file a split.

The hub is only reached for names without a file of this machine behind them. Every error is a FileNotFoundError or ValueError that
names the set and the remedy.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

_NAME = re.compile(r"([\w-]+/[\w.-]+)(?:/([\w-]+))?(?::(\w+))?")


class HubSet(msgspec.Struct, frozen=True):
    """A data set by its name. folder: "" for one whose splits are its own. split: "" where the name has none."""

    repository: str
    folder: str
    split: str


def named(source: str) -> HubSet | None:
    """The set that a source names by its form; None for what can only be a path."""
    found = _NAME.fullmatch(source)
    if found is None or (not found[2] and "." in found[1]):
        return None
    return HubSet(found[1], found[2] or "", found[3] or "")


def chosen(source: str, splits: Sequence[str]) -> str:
    """A set named without a split as the same with the first of ``splits`` that it has; any other source as it is."""
    there = None if Path(source).exists() else named(source)
    if there is None or there.split:
        return source
    if there.folder:
        return f"{source}:{_first(there, splits)[0]}"
    known = _asked(source, lambda hub: hub.get_dataset_split_names(there.repository))
    for split in splits:
        if split in known:
            return f"{source}:{split}"
    raise ValueError(f"it has the splits {sorted(known)}, none of {', '.join(splits)}: name one, owner/name:split")


def file_of(there: HubSet) -> Path:
    """The file of a folder's split (without one: train), from the hub or its cache."""
    return _first(there, (there.split or "train",))[1]


def rows_of(there: HubSet) -> Iterator[dict[str, Any]]:
    """The rows of a set without a folder, of its split (without one: train)."""
    yield from _asked(there.repository, lambda hub: hub.load_dataset(there.repository, split=there.split or "train"))


def _first(there: HubSet, splits: Sequence[str]) -> tuple[str, Path]:
    """The first split that the folder has, and its file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    folder = there.folder
    for split in splits:
        try:
            return split, Path(hf_hub_download(there.repository, f"{folder}/{split}.jsonl", repo_type="dataset"))
        except LocalEntryNotFoundError:  # no network: another split must not stand in for this one
            raise FileNotFoundError(
                f"the hub cannot be reached and {folder}/{split}.jsonl is not in its cache: give a path instead"
            ) from None
        except EntryNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise _failed(there.repository, error) from None
    raise FileNotFoundError(
        f"{there.repository} has no {folder}/{' or '.join(splits)}.jsonl: give a path, or owner/name/folder:split"
    )


def _asked(name: str, ask: Any) -> Any:
    """What the library ``datasets`` says of a set."""
    try:
        import datasets  # pyright: ignore[reportMissingImports] (only sets without a folder need it)
    except ImportError:
        raise FileNotFoundError(f"{name!r} is no file; as a hub dataset it needs `pip install datasets`") from None
    try:
        return ask(datasets)
    except (OSError, ValueError) as error:
        raise _failed(name, error) from None


def _failed(name: str, error: Exception) -> FileNotFoundError:
    reason = str(error).strip().split("\n")[0]
    return FileNotFoundError(
        f"the hub did not give {name}: {reason}; give a path instead, or owner/name/folder:split where it has a folder a set"
    )
