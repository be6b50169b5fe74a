"""A person's marks on candidates, in the file RUN/marks.jsonl: the page of coppice trees writes
them, and every tool reads them (docs/dump.md)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from coppice.common import jsonl

NAME = "marks.jsonl"
KINDS = ("good", "bad", "unsure")


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the file. node: an action of the tree. task: that of the tree."""

    tree: int
    node: int
    mark: Literal["good", "bad", "unsure"]
    task: str
    note: str = ""


def read(folder: Path, candidates: Mapping[tuple[int, int], str]) -> dict[tuple[int, int], Mark]:
    """Return the marks of a run by tree and node; of two for one node, the later line counts.

    candidates: the task of every candidate in the trees that are read; marks of other trees are not
    checked. Raises ValueError that names the line, for a bad one and for a mark of another run.
    """
    path, trees = folder / NAME, {tree for tree, _ in candidates}
    if not path.exists():
        return {}
    marks = {}
    lines = jsonl.lines(path, Mark, "a mark (docs/dump.md): mend the line or take it out")
    for number, mark in lines:
        place = mark.tree, mark.node
        if mark.tree in trees and candidates.get(place) != mark.task:
            lacking = f"the run has no candidate {mark.node} of task {mark.task!r} in tree "
            remedy = "the mark is of another run or of before a resume; take the line out"
            raise ValueError(f"{path}:{number}: {lacking}{mark.tree}: {remedy}")
        marks[place] = mark
    return marks
