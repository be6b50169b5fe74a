"""A person's marks on candidates, in the file RUN/marks.jsonl: the page of coppice trees writes
them, and every tool reads them (docs/dump.md)."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from coppice.common import jsonl
from coppice.scheduler.growth.tree import Tree

KINDS = ("good", "bad", "unsure")


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the file. node: an action of the tree. task: that of the tree."""

    tree: int
    node: int
    mark: Literal["good", "bad", "unsure"]
    task: str
    note: str = ""


def read(folder: Path, trees: Iterable[Tree] = ()) -> dict[tuple[int, int], Mark]:
    """Return the marks of a run by tree and node; of two for one node, the later line counts.
    Raises ValueError that names the line, for a bad one and for one that ``trees`` refute."""
    path, marks, of = folder / "marks.jsonl", {}, {tree.id: tree for tree in trees if tree.nodes}
    if not path.exists():
        return marks
    lines = jsonl.lines(path, Mark, "a mark (docs/dump.md): mend the line or take it out")
    for number, mark in lines:
        if tree := of.get(mark.tree):
            node = tree.nodes.get(mark.node)
            if node is None or node.kind != "action" or tree.task != mark.task:
                lacking = f"tree {tree.id} has no candidate {mark.node} of task {mark.task!r}"
                remedy = "the mark is of another run or of before a resume; take the line out"
                raise ValueError(f"{path}:{number}: {lacking}: {remedy}")
        marks[mark.tree, mark.node] = mark
    return marks
