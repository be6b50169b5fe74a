"""Training rows from the candidates that a person marked in the page of coppice trees."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from coppice.scheduler.ledger.journal import Journal
from coppice.tools.evaluating import marks
from coppice.tools.finetuning.labels import TrainingRow


def marked_rows(
    folders: Sequence[Path], kinds: Sequence[str]
) -> tuple[list[TrainingRow], Counter[str]]:
    """Return a row for each candidate that has a mark of ``kinds``, continued or not, and the
    counts of the others. The prompt is all text before the candidate, the group its task.

    Raises ValueError for a bad mark, or if no mark is of these kinds.
    """
    rows, left_out = [], Counter[str]()
    for folder in folders:
        with contextlib.closing(Journal(folder / "journal.sqlite", readonly=True)) as journal:
            wanted = {tree for tree, _ in marks.read(folder, {})}
            trees = [journal.tree(row) for row in journal.trees() if row.id in wanted]
        nodes = {
            (tree.id, node.id): (tree, node)
            for tree in trees
            for node in tree.nodes.values()
            if node.kind == "action"
        }
        tasks = {place: tree.task for place, (tree, _) in nodes.items()}
        for place, mark in marks.read(folder, tasks).items():
            if mark.mark not in kinds or place not in nodes:
                left_out[f"marked {mark.mark}" if place in nodes else "not in the journal"] += 1
                continue
            tree, node = nodes[place]
            *before, last = tree.path(node)
            prompt = "".join(above.text for above in before)
            rows.append(TrainingRow(last.text, prompt=prompt, group=tree.task))
    if not rows:
        remedy = "mark candidates in the page of coppice trees RUN --html and save them as"
        raise ValueError(f"no candidate is marked {' or '.join(kinds)}: {remedy} RUN/{marks.NAME}")
    return rows, left_out
