"""Read tasks in the Search-R1 / FlashRAG format (methods.md 1.8) from JSONL or Parquet files, or
from a data set of the Hugging Face hub if no file has its name. Every row that cannot be used is
rejected with its place and the reason."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.environments.base import RejectedTask, Task
from coppice.common import jsonl

EXPECTED = (
    "a .jsonl or .parquet path, or a hub dataset owner/name[:split] or owner/name/folder[:split]"
)
_HUB_NAME = re.compile(r"([\w-]+/[\w.-]+)(?:/([\w-]+))?(?::(\w+))?")


def listed(setting: str | Sequence[str]) -> list[str]:
    """Return the sources of a setting that takes one or several. Raises ValueError when there is
    none or one is named twice."""
    sources = [setting] if isinstance(setting, str) else list(setting)
    if not sources:
        raise ValueError(f"[] names no source: expected {EXPECTED}, or several")
    if twice := sorted({source for source in sources if sources.count(source) > 1}):
        raise ValueError(f"{twice[0]!r} is named twice: name each source once")
    return sources


def check_form(source: str) -> None:
    """Raises ValueError for a text that cannot be a source. No file is read and no hub is asked."""
    path = Path(source)
    is_file = path.suffix in (".jsonl", ".parquet") or path.is_file()
    if not is_file and hub_set_of(source) is None:
        raise ValueError(f"{source!r}: expected {EXPECTED}")


def load_tasks(
    setting: str | Sequence[str], verbatim: bool = False
) -> tuple[list[Task], list[RejectedTask]]:
    """Return the tasks of one source or of several sources in turn, and the rejected rows.

    verbatim: questions are taken as they stand, and a row may lack a gold answer, or have an id
    instead of a question (``Environment.verbatim``). Tasks of several sources get ids
    ``source#id``, because each source may count from 0. Raises FileNotFoundError or ValueError
    (with the remedy) when a source cannot be read at all or has no usable task.
    """
    sources = listed(setting)
    tasks: list[Task] = []
    rejected: list[RejectedTask] = []
    for source in sources:
        before = len(tasks), len(rejected)
        for number, row in _rows(source):
            try:
                task = _task(row, f"{source}:{number}", verbatim)
            except (ValueError, TypeError, OverflowError) as error:
                rejected.append(RejectedTask(f"{source}:{number}", str(error)))
            else:
                if len(sources) > 1:
                    task = msgspec.structs.replace(task, id=f"{source}#{task.id}")
                tasks.append(task)
        if len(tasks) == before[0]:
            reason = "; ".join(unusable("its rows", rejected[before[1] :], 0)) or "it is empty"
            raise ValueError(f"{source} holds no usable task: {reason}")
    return tasks, rejected


def unusable(of: str, rejected: Sequence[RejectedTask], usable: int) -> list[str]:
    """Return a sentence on the rejected rows of a set named ``of``, with their number and the first
    one, or none if there are none."""
    if not rejected:
        return []
    count, first = len(rejected), f"{rejected[0].where}: {rejected[0].reason}"
    return [f"{of}: {count} of {count + usable} rows cannot be used; the first: {first}"]


def too_few(of: str, tasks: int, wanted: int) -> list[str]:
    """Return a sentence if a set has fewer than the ``wanted`` tasks, else none."""
    used = f"{of}: {wanted} questions are asked for and {tasks} are there, so all of them are used"
    return [used] * (tasks < wanted)


# ---------------------------------------------------------------------------------------- rows


def _rows(source: str) -> Iterator[tuple[int, Any]]:
    """Yield each row, or the bytes of its line, with its number, which counts lines from 1."""
    path, hub_set = Path(source), hub_set_of(source)
    if path.is_dir():
        raise ValueError(f"{source} is a folder: give a .jsonl or .parquet file of it")
    if path.is_file():
        yield from _file_rows(path)
    elif hub_set is None:
        raise FileNotFoundError(f"task file {source!r} does not exist: give {EXPECTED}")
    elif hub_set.folder:
        yield from _file_rows(_downloaded(hub_set, (hub_set.split or "train",))[1])
    else:
        name, split = hub_set.repository, hub_set.split or "train"
        yield from enumerate(_answer(name, lambda hub: hub.load_dataset(name, split=split)), 1)


def _file_rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        yield from enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1)
        return
    begin = jsonl.beginning(path)
    with path.open("rb") as file:
        file.seek(begin)
        yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())


def _task(row: Any, where: str, verbatim: bool) -> Task:
    """Return the task of a row. Raises ValueError with the reason why it cannot work."""
    if isinstance(row, bytes):
        try:
            row = msgspec.json.decode(row)
        except jsonl.MALFORMED as error:
            why = jsonl.fault(error)
            raise ValueError(why if why.startswith("not in") else f"not JSON: {why}") from None
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, expected an object")
    question, prompt = row.get("question"), row.get("prompt")
    if not question and isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        # a Search-R1 row has only the rendered prompt, with the question at its end
        text = prompt[-1].get("content")
        question = text.rsplit("Question:", 1)[-1].strip() if isinstance(text, str) else None
    if verbatim and question in (None, "") and row.get("id") not in (None, ""):
        question = ""
    elif not isinstance(question, str) or not question.strip():
        raise ValueError("no question: expected a field question, or prompt=[{role, content}]")
    if (golds := row.get("golden_answers")) is None:
        golds = _inside(_inside(row, "reward_model"), "ground_truth").get("target")
    golds = [golds] if isinstance(golds, str) else golds or []
    for gold in golds if isinstance(golds, list) else ():
        if not isinstance(gold, str):
            raise ValueError(f"a gold answer is {gold!r}, expected a text: write it in quotes")
    texts = isinstance(golds, list) and [gold for gold in golds if gold.strip()]
    if not texts and (golds or not verbatim):
        raise ValueError(
            "no gold answer: expected golden_answers or reward_model.ground_truth.target"
        )
    if not verbatim:
        question = question.strip()
        question += "" if question[-1] in "?.!" else "?"
    try:
        evidence = [_passage(**passage) for passage in row.get("evidence") or []]
        hops = int(row.get("hops") or max(1, len(evidence)))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"evidence or hops ({type(error).__name__}: {error}): expected"
            " [{title, text} or {title, field, value}] and a number"
        ) from None
    names = row.get("id"), _inside(row, "extra_info").get("index")
    return Task(
        id=next((str(name) for name in names if name not in (None, "")), where),
        question=question,
        golds=texts or [],
        evidence=evidence,
        hops=hops,
        source=str(row.get("data_source") or ""),
        row=msgspec.json.decode(msgspec.json.encode(row)) if verbatim else {},
    )


def _passage(title: str, text: str = "", field: str = "", value: str = "", **_: Any) -> str:
    if not (text or (field and value)):
        raise ValueError("neither text nor field and value")
    return f"{title}\n{text or f'{field}: {value}'}"


def _inside(row: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the object under a key, or an empty object if there is none."""
    value = row.get(key)
    return value if isinstance(value, dict) else {}


# ------------------------------------------------------------------------------------- the hub


class HubSet(msgspec.Struct, frozen=True):
    """The name of a data set. folder: "" if the data set itself has the splits. split: "" if the
    name has no split."""

    repository: str
    folder: str
    split: str


def hub_set_of(source: str) -> HubSet | None:
    """Return the data set that a source names, None when the source can only be a path."""
    match = _HUB_NAME.fullmatch(source)
    if match is None or (not match[2] and "." in match[1]):
        return None
    return HubSet(match[1], match[2] or "", match[3] or "")


def with_split(source: str, splits: Sequence[str]) -> str:
    """Return a data set named without a split with the first of ``splits`` that it has. Any other
    source is returned unchanged."""
    hub_set = None if Path(source).exists() else hub_set_of(source)
    if hub_set is None or hub_set.split:
        return source
    if hub_set.folder:
        return f"{source}:{_downloaded(hub_set, splits)[0]}"
    held = _answer(source, lambda hub: hub.get_dataset_split_names(hub_set.repository))
    for split in splits:
        if split in held:
            return f"{source}:{split}"
    raise ValueError(
        f"it has the splits {sorted(held)}, none of {', '.join(splits)}: name one, owner/name:split"
    )


def _downloaded(hub_set: HubSet, splits: Sequence[str]) -> tuple[str, Path]:
    """Return the first split that the folder has, and its file, from the hub or its cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repository, folder = hub_set.repository, hub_set.folder
    for split in splits:
        file = f"{folder}/{split}.jsonl"
        try:
            return split, Path(hf_hub_download(repository, file, repo_type="dataset"))
        # without a network, another split must not replace this one
        except LocalEntryNotFoundError:
            raise FileNotFoundError(
                f"the hub cannot be reached and {file} is not in its cache: give a path instead"
            ) from None
        except EntryNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise _failed(repository, error) from None
    names = " or ".join(splits)
    raise FileNotFoundError(
        f"{repository} has no {folder}/{names}.jsonl: give a path, or owner/name/folder:split"
    )


def _answer(name: str, ask: Callable[[Any], Any]) -> Any:
    """Return what the library ``datasets`` answers about a data set without a folder."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]

        return ask(datasets)
    except ImportError:
        raise FileNotFoundError(
            f"{name!r} is no file; as a hub dataset it needs `pip install datasets`"
        ) from None
    except (OSError, ValueError) as error:
        raise _failed(name, error) from None


def _failed(name: str, error: Exception) -> FileNotFoundError:
    reason = str(error).strip().split("\n")[0]
    return FileNotFoundError(
        f"the hub did not give {name}: {reason}; give a path, or owner/name/folder:split if it has"
        " one folder per data set"
    )
