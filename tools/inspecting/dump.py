"""The command tools/dump: prefix trees of a run, from its journal (a live run may be read too)."""

import argparse
import json
import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from scheduler.journal import Journal, TreeRow
from scheduler.tree import Node, Tree
from wire.support import decode

_FIRST = (
    "reward", "advantage", "think", "query", "answer", "optimal", "graded", "risk", "mc_value", "mc_error", "outcome", "f1",
    "success", "completion",
)  # fmt: skip
"""Scores that are shown first, in this order. The other scores follow by name."""
_IN_WORDS = ("valid", "judge_valid")
"""Scores that a node's title says in words."""


def chosen_rows(journal: Journal, options: argparse.Namespace) -> list[TreeRow]:
    """Return the trees that the command line asks for. Raises ValueError if there are none."""
    split = "heldout" if options.heldout else "train"
    if options.tree is not None:
        rows = journal.trees("id=?", options.tree)
    else:
        rows = journal.trees("split=? AND status != 'growing'", split) or journal.trees("split=?", split)
        if not options.all:
            rows = rows[-1:]
    if not rows:
        last = journal.next_tree() - 1
        raise ValueError(
            f"no such tree: the journal holds trees 0 to {last}" if last >= 0 else "the journal holds no tree yet"
        )
    return rows


def as_json(journal: Journal, row: TreeRow) -> dict[str, Any]:
    """Return a tree as plain values that can be written as JSON."""
    tree = journal.tree(row)
    return {
        "tree": row.id,
        "task": row.task,
        "split": row.split,
        "status": row.status,
        "reason": row.reason,
        "admitted_at_version": row.version,
        "groups": [{"id": group, "trained_by_version": trained} for group, trained in journal.groups(row.id)],
        "nodes": [_plain(node) for node in tree.nodes.values()],
    }


_AS_IT_IS = ("kind", "step", "trajectory", "text", "scores", "invalid", "notes", "chosen", "forced", "finish")
"""Fields of a node that are plain values."""


def _plain(node: Node) -> dict[str, Any]:
    support = decode(node.support, len(node.tokens))
    return {
        "id": node.id,
        "parent": node.parent,
        **{name: getattr(node, name) for name in _AS_IT_IS},
        "tokens": node.tokens.tolist(),
        "logprobs": None if node.logprobs is None else [round(float(x), 6) for x in node.logprobs],
        "versions": None if node.versions is None else node.versions.tolist(),
        "left_to_sample": None if support is None else support.counts.tolist(),
        "cached_tokens": node.cached,
    }


def as_text(journal: Journal, row: TreeRow, width: int) -> str:
    """Return a tree as text for a terminal of ``width`` columns."""
    tree = journal.tree(row)
    trained = ", ".join(f"{g} (version {v})" if v is not None else f"{g} (not yet)" for g, v in journal.groups(row.id))
    head = f"tree {row.id}  task {row.task}  {row.split}, {row.status}  admitted at version {row.version}"
    lines = [head + (f"  reason: {row.reason}" if row.reason else ""), f"groups trained: {trained or 'none'}"]
    root = tree.nodes.get(0)
    if root is not None:
        lines += _wrapped(f"prompt, {len(root.tokens)} tokens: {root.text}", "", width)
        lines += _below(tree, root, "", width)
    return "\n".join(lines)


def _below(tree: Tree, node: Node, indent: str, width: int) -> list[str]:
    lines: list[str] = []
    children = tree.children(node)
    for place, child in enumerate(children):
        last = place == len(children) - 1
        branch, rest = ("└─ ", "   ") if last else ("├─ ", "│  ")
        text = _wrapped(_title(child), indent + rest, width)
        text[0] = indent + branch + text[0].removeprefix(indent + rest)
        text += _wrapped(child.text.strip(), indent + rest + "  ", width)
        lines += text + _below(tree, child, indent + rest, width)
    return lines


def _title(node: Node) -> str:
    parts = [
        f"{'*' if node.chosen and node.kind == 'action' else ' '} {node.kind} {node.id}, {len(node.tokens)} tokens"
    ]
    if node.forced:
        parts.append("forced, not trained")
    if node.versions is not None and len(node.versions):
        low, high = int(node.versions.min()), int(node.versions.max())
        parts.append(f"version {low}" if low == high else f"versions {low}-{high}")
    if node.kind == "action" and not node.scores.get("valid", 1.0):
        parts.append("INVALID")
    others = sorted(set(node.scores).difference(_FIRST, _IN_WORDS))
    parts += [f"{name} {node.scores[name]:+.3f}" for name in (*_FIRST, *others) if name in node.scores]
    if node.invalid:
        parts.append(f"judge invalid: {', '.join(node.invalid)}")
    return "  ".join(parts)


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    lines = [
        line for part in text.splitlines() or [""] for line in textwrap.wrap(part, max(20, width - len(indent))) or [""]
    ]
    return [indent + line for line in lines]


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="tools/dump", description="Print prefix trees; * marks the candidate that was continued."
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--tree", type=int, help="this tree (default: the last finished one)")
    parser.add_argument("--all", action="store_true", help="every tree")
    parser.add_argument("--heldout", action="store_true", help="trees of held-out evaluations")
    parser.add_argument("--json", action="store_true", help="JSON, one tree per line")
    options = parser.parse_args(arguments)
    try:
        journal = Journal(options.run / "journal.sqlite", readonly=True)
        rows = chosen_rows(journal, options)
    except (FileNotFoundError, ValueError) as error:
        print(f"tools/dump: {error}", file=sys.stderr)
        return 2
    width = shutil.get_terminal_size((120, 40)).columns
    try:
        for row in rows:
            print(
                json.dumps(as_json(journal, row), ensure_ascii=False)
                if options.json
                else as_text(journal, row, width) + "\n"
            )
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (head, less) has closed the pipe
    return 0
