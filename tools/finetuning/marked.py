"""Training rows from the candidates that a person marked in the page of coppice trees."""

import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from coppice.common import shards
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.evaluating import marks
from coppice.tools.finetuning.labels import TrainingRow


def marked_rows(
    folders: Sequence[Path], kinds: Sequence[str]
) -> tuple[list[TrainingRow], Counter[str]]:
    """Return a row for each candidate that has a mark of ``kinds``, continued or not, and the
    counts of the other marks. The prompt is all text before the candidate, the group its task.
    Raises ValueError for a bad mark, or if there is no row."""
    rows, left_out = [], Counter[str]()
    for folder in folders:
        first, others = shards.journals(folder)
        try:
            with Journal(first, readonly=True, others=others) as journal:
                trees = {row.id: journal.tree(row) for row in journal.trees() if not row.removed}
        except sqlite3.Error as error:
            raise ValueError(f"{first} is no journal of a run ({error}): leave it out") from None
        for (tree, node), mark in marks.read(folder, trees.values()).items():
            if mark.mark in kinds and tree in trees:
                *before, last = trees[tree].path(trees[tree].nodes[node])
                prompt = "".join(above.text for above in before)
                rows.append(TrainingRow(last.text, prompt, group=mark.task, rendered=True))
            else:
                left_out[f"marked {mark.mark}" if tree in trees else "not in the journal"] += 1
    if not rows:
        raise ValueError(f"no candidate is marked {' or '.join(kinds)}: mark some (docs/dump.md)")
    return rows, left_out
