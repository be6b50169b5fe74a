"""Trees as text for a terminal, as plain values for JSON, and as a graph for Graphviz."""

import difflib
import json
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from coppice.common.support import decode
from coppice.scheduler.growth.tree import FATES, Node, Tree
from coppice.scheduler.ledger.journal import Journal, TreeRow

SHOWN = 4
"""The first and the last lines of a node's text that are shown; those between are folded."""
_IN_WORDS = ("valid", "judge_valid")
"""Scores that a node's title says in words."""
_AS_IT_IS = "kind step trajectory text scores invalid notes chosen forced finish".split()
"""Fields of a node that are plain values."""


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
        "groups": [{"id": g, "trained_by_version": v} for g, v in journal.groups(row.id)],
        "nodes": [_plain(node) for node in tree.nodes.values()],
    }


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


def as_dot(journal: Journal, row: TreeRow) -> str:
    """Return a tree as a graph in the language of Graphviz; continued candidates are bold."""
    lines = [f"digraph tree_{row.id} {{", '  node [shape=box, fontname="monospace"];']
    for node in journal.tree(row).nodes.values():
        text = textwrap.shorten(node.text, 60, placeholder="...")
        label = json.dumps("\n".join([title(node), *([text] if text else [])]), ensure_ascii=False)
        lines.append(f"  n{node.id} [label={label}{', style=bold' if node.chosen else ''}];")
        if node.parent >= 0:
            lines.append(f"  n{node.parent} -> n{node.id};")
    return "\n".join([*lines, "}"])


class Detail(msgspec.Struct, frozen=True):
    """How much of a tree is drawn. width: columns of the terminal. full: whole texts, with the
    judges' explanations. tokens: the lines that are drawn below an action, given its tree's
    number."""

    width: int
    full: bool = False
    tokens: Callable[[int, Node], list[str]] = lambda tree, node: []


def as_text(journal: Journal, row: TreeRow, detail: Detail, calls: Sequence[str] = ()) -> str:
    """Return a tree as text for a terminal. calls: what is said of its calls."""
    tree = journal.tree(row)
    groups = [
        f"{group} ({'not yet' if version is None else f'version {version}'})"
        for group, version in journal.groups(row.id)
    ]
    head = f"tree {row.id}  task {row.task}  {row.split}, {row.status}  admitted at version {row.version}"
    head += f"  reason: {row.reason}" if row.reason else ""
    lines = [head, f"groups trained: {', '.join(groups) or 'none'}"]
    lines += [f"calls: {', '.join(calls)}"] if calls else []
    root = tree.nodes.get(0)
    if root is not None:
        lines += _folded(f"prompt, {len(root.tokens)} tokens: {root.text}", "", detail)
        lines += _below(tree, root, "", detail)
    return "\n".join(lines)


def _below(tree: Tree, node: Node, indent: str, detail: Detail) -> list[str]:
    lines: list[str] = []
    children = tree.children(node)
    for place, child in enumerate(children):
        last = place == len(children) - 1
        branch, rest = ("└─ ", "   ") if last else ("├─ ", "│  ")
        text = _wrapped(title(child), indent + rest, detail.width)
        text[0] = indent + branch + text[0].removeprefix(indent + rest)
        text += _folded(child.text.strip(), indent + rest + "  ", detail)
        for name, note in child.notes.items():
            if detail.full or name in FATES:
                text += _folded(f"{name}: {note}", indent + rest + "  # ", detail)
        text += [indent + rest + "  " + line for line in detail.tokens(tree.id, child)]
        lines += text + _below(tree, child, indent + rest, detail)
    return lines


def title(node: Node) -> str:
    """Return what a node is, and all its scores, in one line. * marks an action that was continued."""
    mark = "*" if node.chosen and node.kind == "action" else " "
    parts = [f"{mark} {node.kind} {node.id}, {len(node.tokens)} tokens"]
    if node.cached:
        parts.append(f"{node.cached} cached")
    if node.forced:
        parts.append("forced, not trained")
    if node.finish not in ("", "stop"):
        parts.append(f"ended by {node.finish}")
    if node.versions is not None and len(node.versions):
        low, high = int(node.versions.min()), int(node.versions.max())
        parts.append(f"version {low}" if low == high else f"versions {low}-{high}")
    if node.kind == "action" and not node.scores.get("valid", 1.0):
        parts.append("INVALID")
    parts += [
        f"{name} {value:+.3f}" for name, value in node.scores.items() if name not in _IN_WORDS
    ]
    if node.invalid:
        parts.append(f"judge invalid: {', '.join(node.invalid)}")
    return "  ".join(parts)


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


def difference(first: list[Node], second: list[Node], width: int) -> str:
    """Return how two paths from the root differ: the nodes that they share, then the texts line by
    line, then every score of the last nodes."""
    shared = 0
    for one, other in zip(first, second, strict=False):
        if one.kind != other.kind or one.tokens.tolist() != other.tokens.tolist():
            break
        shared += 1
    tokens = sum(len(node.tokens) for node in first[:shared])
    lines = [f"the first {shared} nodes are equal ({tokens} tokens)"]

    def told(path: list[Node]) -> list[str]:
        nodes = [(title(node), *_wrapped(node.text.strip(), "  ", width)) for node in path[shared:]]
        return [line for node in nodes for line in node]

    compared = difflib.ndiff(told(first), told(second))
    lines += [line for line in compared if not line.startswith("?")]
    a, b = first[-1].scores, second[-1].scores
    lines += [f"{name:<20} {_number(a, name):>10} {_number(b, name):>10}" for name in {**a, **b}]
    return "\n".join(lines)


def _number(scores: dict[str, float], name: str) -> str:
    return f"{scores[name]:+.3f}" if name in scores else "-"
