"""Trees as text for a terminal, as plain values for JSON, and as one HTML file, which needs no
network: ``page.html`` and ``page_*.js`` with the trees' data inside (docs/dump.md)."""

import string
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

from coppice.common import vision
from coppice.common.support import decode
from coppice.scheduler.growth.tree import FATES, Node, Tree
from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.tools.evaluating import marks
from coppice.tools.inspecting import frames, replay

Newest = Mapping[tuple[int, int], np.ndarray]
"""Log-probabilities of an action's tokens under the newest policy (``replay.newest``)."""


def as_json(journal: Journal, row: TreeRow) -> dict[str, Any]:
    return {
        "tree": row.id,
        "task": row.task,
        "split": row.split,
        "status": row.status,
        "reason": row.reason,
        "admitted_at_version": row.version,
        "groups": [{"id": g, "trained_by_version": v} for g, v in journal.groups(row.id)],
        "nodes": [_plain(node) for node in journal.tree(row).nodes.values()],
    }


def _plain(node: Node) -> dict[str, Any]:
    support = decode(node.support, len(node.tokens))
    own = "id parent kind step trajectory text scores invalid notes chosen forced finish".split()
    return {name: getattr(node, name) for name in own} | {
        "tokens": node.tokens.tolist(),
        "logprobs": None if node.logprobs is None else [round(float(x), 6) for x in node.logprobs],
        "versions": None if node.versions is None else node.versions.tolist(),
        "left_to_sample": None if support is None else support.counts.tolist(),
        "cached_tokens": node.cached,
    }


SAME_TASK = 12
"""Other trees of the same task that a page has for its slider, at most."""
SCRIPTS = "tree node list marks versions keys".split()


def html(
    journal: Journal, rows: Sequence[TreeRow], run: Path, version: int | None, newest: Newest,
    surprising: int | None,
) -> str:  # fmt: skip
    """Return the page of the trees ``rows``. version: of newest. surprising: if not None, a tree
    opens at its largest advantage."""
    words, trees, ids = replay.tokenizer(run), [], {row.id for row in rows}
    tasks = {row.task: list[TreeRow]() for row in rows}
    for row in journal.trees("status != 'growing'"):
        if row.task in tasks and row.id not in ids and not row.removed:
            tasks[row.task].append(row)
    of_tasks = [row for of in tasks.values() for row in of[:: -(-len(of) // SAME_TASK) or 1]]
    every = [*rows, *of_tasks]
    table = frames.trees(journal, every, frames.nodes(journal, every))
    for row, values in zip(every, table.iter_rows(named=True), strict=True):
        kept = ("outcome", "hops", "reward", "actions")
        said = [
            f"{name} {round(values[name], 2):g}" for name in kept if values.get(name) is not None
        ]
        said += [word for word in (row.split, row.status) if word not in ("train", "closed")]
        shown = {"said": " · ".join(said), "question": values["question"], "listed": row.id in ids}
        trees.append(as_json(journal, row) | shown)
        for node in trees[-1]["nodes"]:
            tokens = np.array(node["tokens"], np.int32)
            node["pictures"] = [vision.url(png) for png in journal.pictures(tokens).values()]
            if node["logprobs"]:
                node["pieces"] = replay.pieces(words, tokens)
                if (values_now := newest.get((row.id, node["id"]))) is not None:
                    node["newest"] = values_now.tolist()
    name, here = journal.path.parent.resolve().name, Path(__file__).parent
    data = {"title": f"{name}: {len(rows)} prefix trees", "newest": version, "trees": trees}
    data |= {"run": name, "marks": [*marks.read(journal.path.parent).values()]}
    # "<" cannot end the element that holds the data, whatever a policy wrote.
    encoded = msgspec.json.encode(data | {"surprising": bool(surprising)}).decode(errors="replace")
    return string.Template((here / "page.html").read_text()).substitute(
        data=encoded.replace("<", "\\u003c"),
        script="".join((here / f"page_{script}.js").read_text() for script in SCRIPTS),
    )


SHOWN = 4
"""The first and the last lines of a node's text that are shown; those between are folded."""


class Detail(msgspec.Struct, frozen=True):
    """How much of a tree is drawn. width: columns of the terminal. full: whole texts, with the
    judges' explanations. tokens: every token of an action, with its log-probability. words: the
    tokenizer, if there is one."""

    width: int
    full: bool = False
    tokens: bool = False
    words: Tokenizer | None = None
    newest: Newest = {}


def as_text(journal: Journal, row: TreeRow, detail: Detail) -> str:
    tree = journal.tree(row)
    groups = [
        f"{group} ({'not yet' if version is None else f'version {version}'})"
        for group, version in journal.groups(row.id)
    ]
    head = f"tree {row.id}  task {row.task}  {row.split}, {row.status}"
    head += f"  admitted at version {row.version}"
    head += f"  reason: {row.reason}" if row.reason else ""
    lines = [head, f"groups trained: {', '.join(groups) or 'none'}"]
    if root := tree.nodes.get(0):
        lines += _folded(f"prompt, {len(root.tokens)} tokens: {root.text}", "", detail)
        lines += _below(tree, root, "", detail)
    return "\n".join(lines)


def _below(tree: Tree, node: Node, indent: str, detail: Detail) -> list[str]:
    lines: list[str] = []
    children = tree.children(node)
    for child in children:
        branch, rest = ("└─ ", "   ") if child is children[-1] else ("├─ ", "│  ")
        text = _wrapped(title(child), indent + rest, detail.width)
        text[0] = indent + branch + text[0].removeprefix(indent + rest)
        text += _folded(child.text.strip(), indent + rest + "  ", detail)
        for name, note in child.notes.items():
            if detail.full or name in FATES:
                text += _folded(f"{name}: {note}", indent + rest + "  # ", detail)
        if detail.tokens and child.logprobs is not None and len(child.logprobs):
            now = detail.newest.get((tree.id, child.id))
            lines_of = _token_lines(detail.words, child.tokens, child.logprobs, now)
            text += [indent + rest + "  " + line for line in lines_of]
        lines += text + _below(tree, child, indent + rest, detail)
    return lines


def title(node: Node) -> str:
    """Return what a node is, and all its scores, in one line; * marks a continued action."""
    mark = "*" if node.chosen and node.kind == "action" else " "
    parts = [f"{mark} {node.kind} {node.id}, {len(node.tokens)} tokens"]
    parts += [f"{node.cached} cached"] if node.cached else []
    parts += ["forced, not trained"] if node.forced else []
    parts += [f"ended by {node.finish}"] if node.finish not in ("", "stop") else []
    if node.versions is not None and len(node.versions):
        low, high = int(node.versions.min()), int(node.versions.max())
        parts.append(f"version {low}" if low == high else f"versions {low}-{high}")
    if node.kind == "action" and not node.scores.get("valid", 1.0):
        parts.append("INVALID")
    scores = {k: value for k, value in node.scores.items() if k not in ("valid", "judge_valid")}
    parts += [f"{name} {value:+.3f}" for name, value in scores.items()]
    parts += [f"judge invalid: {', '.join(node.invalid)}"] if node.invalid else []
    return "  ".join(parts)


def _token_lines(
    words: Tokenizer | None, tokens: np.ndarray, sampled: np.ndarray, newest: np.ndarray | None
) -> list[str]:
    columns = [sampled] if newest is None else [sampled, newest]
    values = ["".join(f"{value:9.4f}" for value in row) for row in zip(*columns, strict=True)]
    texts = replay.pieces(words, tokens)
    head = "  sampled" + ("   newest" if newest is not None else "") + "  token"
    return [head, *(f"{row}  {text!r}" for row, text in zip(values, texts, strict=True))]


def _folded(text: str, indent: str, detail: Detail) -> list[str]:
    lines = _wrapped(text, indent, detail.width)
    if detail.full or len(lines) <= 2 * SHOWN + 1:
        return lines
    folded = f"{indent}... {len(lines) - 2 * SHOWN} lines (--full) ..."
    return [*lines[:SHOWN], folded, *lines[-SHOWN:]]


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    size = max(20, width - len(indent))
    parts = [textwrap.wrap(part, size) or [""] for part in text.splitlines() or [""]]
    return [indent + line for lines in parts for line in lines]


def candidates(rows: Iterable[Mapping[str, Any]], columns: Sequence[str], width: int) -> list[str]:
    """Return the values and the beginning of the text of each candidate, equal ones once. rows: of
    ``frames.nodes``."""
    told = Counter[tuple[str, str]]()
    for row in rows:
        values = ["-" if row[name] is None else f"{row[name]:+.2f}" for name in columns]
        head = "".join([" *"[bool(row["chosen"])], *(f"{value:>7}" for value in values), "  "])
        told[head, " ".join(row["text"].split())] += 1
    lines = []
    for (head, text), times in told.items():
        text = textwrap.shorten(text, 160, placeholder=" ...")
        text += f" ({times} times)" if times > 1 else ""
        lines += textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head))
    return lines
