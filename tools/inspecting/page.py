"""Trees as one HTML file, which needs no network: ``page.html`` and ``page.js`` with the trees'
data inside (docs/dump.md)."""

import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from tokenizers import Tokenizer

from coppice.common import vision
from coppice.scheduler.growth.tree import Node
from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.tools.inspecting import frames, replay

_AS_IT_IS = "id parent kind text invalid notes chosen forced finish cached".split()
DIGITS = 4
"""Digits after the point of what the page shows."""

Newest = tuple[int | None, Mapping[tuple[int, int], np.ndarray]]


def html(
    journal: Journal,
    rows: Sequence[TreeRow],
    table: pl.DataFrame,
    run: Path,
    newest: Newest = (None, {}),
) -> str:
    """Return the page of the trees ``rows``. table: their ``frames.trees``. newest: what
    ``replay.newest`` returns."""
    words = replay.tokenizer(run)
    trees = []
    for row, values in zip(rows, table.iter_rows(named=True), strict=True):
        nodes = [
            _node(node, words, newest[1].get((row.id, node.id)), journal)
            for node in journal.tree(row).nodes.values()
        ]
        tree = {"tree": row.id, "task": row.task, "version": row.version}
        trees.append({**tree, "said": _said(row, values), "nodes": nodes})
    name = (run if run.is_dir() else run.parent).resolve().name
    data = {"title": f"{name}: {len(trees)} prefix trees", "newest": newest[0], "trees": trees}
    here = Path(__file__).parent
    # "<" cannot end the element that holds the data, whatever a policy wrote.
    encoded = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    template = string.Template((here / "page.html").read_text())
    return template.substitute(data=encoded, script=(here / "page.js").read_text())


def _node(
    node: Node, words: Tokenizer | None, newest: np.ndarray | None, journal: Journal
) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(node, name) for name in _AS_IT_IS}
    finite = {name: value for name, value in node.scores.items() if np.isfinite(value)}
    scores = {name: round(value, DIGITS) for name, value in finite.items()}
    values |= {"size": len(node.tokens), "scores": scores}
    if pictures := [vision.url(png) for png in journal.pictures(node.tokens).values()]:
        values["pictures"] = pictures
    if node.versions is not None and len(node.versions):
        values["versions"] = [int(node.versions.min()), int(node.versions.max())]
    if node.logprobs is not None and len(node.logprobs):
        values["logprobs"] = [round(float(value), DIGITS) for value in node.logprobs]
        values["pieces"] = replay.pieces(words, node.tokens)
        if newest is not None:
            values["newest"] = [round(float(value), DIGITS) for value in newest]
    return values


def _said(row: TreeRow, values: Mapping[str, Any]) -> str:
    """The tree's line in the list, after its number, task and version."""
    means = [name for name in ("outcome", "reward") if values.get(name) is not None]
    shown = [row.status, *(f"{name} {values[name]:.2f}" for name in means)]
    return ", ".join([*shown, f"{values['actions'] or 0} actions", *frames.calls(values)])
