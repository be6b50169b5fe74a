"""Read tasks in the Search-R1 / FlashRAG format (methods.md 1.8), JSONL or Parquet, from one or
several paths or hub names.

A row without a question or a gold answer is rejected with its place and the reason, and so is a
line that is not JSON. No row is dropped silently.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.environments import hub
from coppice.actors.environments.base import Rejected, Task
from coppice.common import jsonl

EXPECTED = (
    "a .jsonl or .parquet path, or a hub dataset owner/name[:split] or owner/name/folder[:split]"
)


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
    if (
        path.suffix not in (".jsonl", ".parquet")
        and not path.is_file()
        and hub.named(source) is None
    ):
        raise ValueError(f"{source!r}: expected {EXPECTED}")


def load_tasks(
    setting: str | Sequence[str], verbatim: bool = False
) -> tuple[list[Task], list[Rejected]]:
    """Return the tasks of one source or of several sources in turn, and the rejected rows.

    A source is a .jsonl or .parquet file, a hub dataset ``owner/name[:split]``, or a folder of such
    a dataset, ``owner/name/folder[:split]``; the default split is train. verbatim: questions are
    taken as they stand, and a row may lack a gold answer, or have an id instead of a question
    (``Environment.verbatim``). Tasks of several sources get ids ``source#id``, because each source
    may count from 0. Raises FileNotFoundError or ValueError (with the remedy) when a source cannot
    be read at all or has no usable task.
    """
    sources = listed(setting)
    tasks: list[Task] = []
    rejected: list[Rejected] = []
    for source in sources:
        some, unusable = _load(source, verbatim)
        alone = len(sources) == 1
        tasks += (
            some
            if alone
            else [msgspec.structs.replace(task, id=f"{source}#{task.id}") for task in some]
        )
        rejected += unusable
    return tasks, rejected


def unusable(of: str, rejected: Sequence[Rejected], usable: int) -> list[str]:
    """Return a sentence on the rejected rows of a set named ``of``, with their number and the first
    one, or none if there are none."""
    if not rejected:
        return []
    first = rejected[0]
    return [
        f"{of}: {len(rejected)} of {len(rejected) + usable} rows cannot be used; the first: {first.where}: {first.reason}"
    ]


def too_few(of: str, tasks: int, asked: int) -> list[str]:
    """Return a sentence if a set has fewer than the ``asked`` tasks, else none."""
    return [
        f"{of}: {asked} questions are asked for and {tasks} are there, so all of them are used"
    ] * (tasks < asked)


def _load(source: str, verbatim: bool) -> tuple[list[Task], list[Rejected]]:
    tasks: list[Task] = []
    rejected: list[Rejected] = []
    for number, row in _rows(source):
        where = f"{source}:{number}"
        task = row if isinstance(row, Rejected) else _task(row, where, verbatim)
        if isinstance(task, Task):
            tasks.append(task)
        else:
            rejected.append(msgspec.structs.replace(task, where=where))
    if not tasks:
        counted = "; ".join(unusable("its rows", rejected, 0)) or "it is empty"
        raise ValueError(f"{source} holds no usable task: {counted}")
    return tasks, rejected


def _rows(source: str) -> Iterator[tuple[int, dict[str, Any] | Rejected]]:
    """Yield each row with its number, which is that of its line in a JSONL file."""
    path, hub_set = Path(source), hub.named(source)
    if path.is_dir():
        raise ValueError(f"{source} is a folder: give a .jsonl or .parquet file of it")
    if path.is_file():
        yield from _file_rows(path)
    elif hub_set is None:
        raise FileNotFoundError(f"task file {source!r} does not exist: give {EXPECTED}")
    elif hub_set.folder:
        yield from _file_rows(hub.file_of(hub_set))
    else:
        yield from enumerate(hub.rows_of(hub_set), 1)


def _file_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | Rejected]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        yield from enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1)
        return
    begin = jsonl.beginning(path)
    with path.open("rb") as file:
        file.seek(begin)
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _json_row(line)


def _json_row(line: bytes) -> dict[str, Any] | Rejected:
    try:
        row = msgspec.json.decode(line)
    except UnicodeDecodeError as error:
        return Rejected("", jsonl.fault(error))
    except jsonl.MALFORMED as error:
        return Rejected("", f"not JSON: {jsonl.fault(error)}")
    return (
        row
        if isinstance(row, dict)
        else Rejected("", f"a {type(row).__name__}, expected an object")
    )


def _task(row: dict[str, Any], where: str, verbatim: bool) -> Task | Rejected:
    question = row.get("question") or _prompt_question(row.get("prompt"))
    if verbatim and question in (None, "") and row.get("id") not in (None, ""):
        question = ""
    elif not isinstance(question, str) or not question.strip():
        return Rejected(
            where, "no question: expected a field question, or prompt=[{role, content}]"
        )
    golds = row.get("golden_answers")
    if golds is None:
        golds = _inside(_inside(row, "reward_model"), "ground_truth").get("target")
    golds = [golds] if isinstance(golds, str) else golds
    if verbatim and not golds:
        golds = []
    elif not isinstance(golds, list) or not [g for g in golds if isinstance(g, str) and g.strip()]:
        return Rejected(
            where, "no gold answer: expected golden_answers or reward_model.ground_truth.target"
        )
    if not verbatim:
        question = question.strip()
        question += "" if question[-1] in "?.!" else "?"
    try:
        evidence = [f"{e['title']}\n{e['field']}: {e['value']}" for e in row.get("evidence") or []]
        hops = int(row.get("hops") or max(1, len(evidence)))
    except (KeyError, TypeError, ValueError) as error:
        return Rejected(
            where,
            f"evidence or hops ({type(error).__name__}: {error}): expected [{{title, field, value}}] and a number",
        )
    identity = str(row.get("id") or _inside(row, "extra_info").get("index") or where)
    return Task(
        id=identity,
        question=question,
        golds=[g for g in golds if isinstance(g, str) and g.strip()],
        evidence=evidence,
        hops=hops,
        source=str(row.get("data_source") or ""),
        row=msgspec.json.decode(msgspec.json.encode(row)) if verbatim else {},
    )


def _inside(row: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the object under a key, or an empty object if there is none."""
    value = row.get(key)
    return value if isinstance(value, dict) else {}


def _prompt_question(prompt: Any) -> str | None:
    """Return the question in a Search-R1 row, which has only the rendered prompt: the text after
    its last "Question:"."""
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[-1], dict):
        return None
    content = prompt[-1].get("content", "")
    return content.rsplit("Question:", 1)[-1].strip() if isinstance(content, str) else None
