"""Task files in the Search-R1 / FlashRAG format (methods.md 1.8), JSONL or Parquet, by path or by hub name.

A row without question or gold answer is rejected with its place and reason; a line that is not JSON likewise. Nothing is
dropped in silence.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from actors.environments.base import Rejected, Task


def load_tasks(source: str) -> tuple[list[Task], list[Rejected]]:
    """Tasks of a .jsonl or .parquet file, or of a hub dataset ``owner/name[:split]``; and the rows that cannot work.

    Raises FileNotFoundError or ValueError (with the remedy) when the source as a whole cannot be read or holds no task.
    """
    tasks: list[Task] = []
    rejected: list[Rejected] = []
    for number, row in enumerate(_rows(source), 1):
        where = f"{source}:{number}"
        made = row if isinstance(row, Rejected) else _task(row, where)
        if isinstance(made, Task):
            tasks.append(made)
        else:
            rejected.append(msgspec.structs.replace(made, where=where))
    if not tasks:
        first = f"; the first reason: {rejected[0].reason}" if rejected else ""
        raise ValueError(f"{source} holds no usable task ({len(rejected)} rejected{first})")
    return tasks, rejected


def _rows(source: str) -> Iterator[dict[str, Any] | Rejected]:
    path = Path(source)
    if path.suffix == ".parquet" and path.is_file():
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(path).to_pylist()
    elif path.is_dir():
        raise ValueError(f"{source} is a folder: give a .jsonl or .parquet file of it")
    elif path.is_file():
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    yield _json_row(line)
    elif path.suffix or not _is_hub_name(source):
        raise FileNotFoundError(
            f"task file {source!r} does not exist: give a .jsonl or .parquet path, or a hub dataset owner/name"
        )
    else:
        yield from _hub_rows(source)


def _json_row(line: bytes) -> dict[str, Any] | Rejected:
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        return Rejected("", f"not JSON: {error}")
    return row if isinstance(row, dict) else Rejected("", f"a {type(row).__name__}, expected an object")


def _is_hub_name(source: str) -> bool:
    return source.count("/") == 1 and not source.startswith((".", "/"))


def _hub_rows(source: str) -> Iterator[dict[str, Any]]:
    name, _, split = source.partition(":")
    yield from _datasets(source).load_dataset(name, split=split or "train")


def hub_splits(source: str) -> list[str]:
    """The splits of a hub dataset that is named without one; none for anything else. Raises FileNotFoundError with the remedy."""
    if ":" in source or Path(source).suffix or Path(source).exists() or not _is_hub_name(source):
        return []
    try:
        return _datasets(source).get_dataset_split_names(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(f"the hub did not say the splits of {source}: {reason}; give a path instead") from None


def _datasets(source: str) -> Any:
    try:
        import datasets  # pyright: ignore[reportMissingImports] (only hub names need it)
    except ImportError:
        raise FileNotFoundError(f"{source!r} is no file; as a hub dataset it needs `pip install datasets`") from None
    return datasets


def _task(row: dict[str, Any], where: str) -> Task | Rejected:
    question = row.get("question") or _prompt_question(row.get("prompt"))
    if not isinstance(question, str) or not question.strip():
        return Rejected(where, "no question: expected a field question, or prompt=[{role, content}]")
    golds = row.get("golden_answers")
    if golds is None:
        golds = _inside(_inside(row, "reward_model"), "ground_truth").get("target")
    golds = [golds] if isinstance(golds, str) else golds
    if not isinstance(golds, list) or not [g for g in golds if isinstance(g, str) and g.strip()]:
        return Rejected(where, "no gold answer: expected golden_answers or reward_model.ground_truth.target")
    question = question.strip()
    if question[-1] not in "?.!":
        question += "?"
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
    )


def _inside(row: dict[str, Any], key: str) -> dict[str, Any]:
    """The object under a key; an empty one where there is none."""
    found = row.get(key)
    return found if isinstance(found, dict) else {}


def _prompt_question(prompt: Any) -> str | None:
    """Search-R1 rows hold the rendered prompt only: the question stands after its last "Question:"."""
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[-1], dict):
        return None
    content = prompt[-1].get("content", "")
    return content.rsplit("Question:", 1)[-1].strip() if isinstance(content, str) else None
