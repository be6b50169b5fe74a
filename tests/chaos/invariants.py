"""What must hold of a run that was struck, read from outside: its files, and what stays of it."""

import time
from contextlib import closing
from pathlib import Path

import msgspec

from coppice.common import shards
from coppice.tools.inspecting import frames
from coppice.tools.inspecting.audit import audit
from tests.chaos.run import Struck


class Account(msgspec.Struct, frozen=True):
    """Tasks of a run: drawn = trained + quarantined. in_updates: those that one version trained."""

    drawn: int
    trained: int
    quarantined: int
    in_updates: int
    updates: int


def account(folder: Path) -> Account:
    with closing(frames.opened(folder)) as journal:
        rows = journal.trees("split='train'")
        versions = {row.id: {version for _, version in journal.groups(row.id)} for row in rows}
    counted = [row for row in rows if len(versions[row.id]) == 1 and None not in versions[row.id]]
    trained = sum(row.status == "closed" for row in counted)
    quarantined = sum(row.status == "quarantined" for row in rows)
    newest = max((version or 0 for row in counted for version in versions[row.id]), default=0)
    return Account(len(rows), trained, quarantined, len(counted), newest)


def of_the_files(folder: Path, questions: int) -> list[str]:
    """Return what is wrong in the folder of a run that has ended: what coppice watch --audit finds,
    and tasks that are not accounted for. questions: the tasks of an update."""
    faults = [str(violation) for violation in audit(folder)]
    for home in shards.homes(folder):
        if not (home / "summary.json").exists():
            faults.append(f"the run is over: there is no {home / 'summary.json'}")
    count = account(folder)
    if count.drawn != count.trained + count.quarantined:
        became = f"{count.trained} trained and {count.quarantined} quarantined"
        faults.append(f"nothing lost: {count.drawn} drawn, {became}")
    if count.in_updates != count.updates * questions:
        updates = f"{count.updates} updates of {questions} tasks each"
        faults.append(f"whole updates: {count.in_updates} tasks are in {updates}")
    return faults


def left_behind(run: Struck, patience_s: float = 60.0) -> list[str]:
    end = time.monotonic() + patience_s
    while (left := run.left(run.seen)) and time.monotonic() < end:
        time.sleep(0.1)
    return [f"nothing stays: {what}" for what in left]
