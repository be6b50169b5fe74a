"""The command coppice watch --audit: it reads a run folder from outside and says whether every task
was trained exactly once or is accounted for.

It believes the files alone (journal, metrics, checkpoints), and no process. A run that has not
ended may have trees in flight, and the records of its newest update may not be complete.
"""

import argparse
import contextlib
import itertools
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from coppice.common import frontier, shards
from coppice.common.jsonl import MALFORMED
from coppice.common.options import command_parser, gave_up
from coppice.scheduler.growth import tasks
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import REMOVED, Journal, JournalError, TreeRow
from coppice.scheduler.ledger.records import UPDATE
from coppice.scheduler.ledger.resume import edited
from coppice.tools.inspecting.replay import opened
from coppice.tools.launching.screen import RunScreen
from coppice.wire import digest

Trees = list[tuple[TreeRow, dict[int, int | None]]]
"""Training trees, each with its groups and the versions that trained them."""


class Violation(msgspec.Struct, frozen=True):
    """rule: the name of the broken invariant. what: where and how it is broken."""

    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}"


def audit(run: Path) -> list[Violation]:
    """Return what is wrong in a run folder; an empty list says that all invariants hold. The bound
    of staleness is the largest that the run had; without a config no versions are checked. Raises
    FileNotFoundError without a journal."""
    violations, configs = list[Violation](), dict[str, dict[str, Any]]()
    for path in run.glob("config*.json"):
        try:
            config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
            configs[path.name] = config["scheduler"]
        except (*MALFORMED, OSError, KeyError, TypeError) as error:
            violations.append(Violation("configs are whole", f"{path.name}: {error}: restore it"))
    bounds = [one["max_staleness"] for one in configs.values() if "max_staleness" in one]
    staleness = max(bounds, default=None)
    count = configs.get("config.json", {}).get("shards") or len(shards.homes(run))
    homes = [shards.folder(run, number) for number in range(count)]
    ended = all((home / "summary.json").exists() for home in homes)
    with contextlib.ExitStack() as opened:
        try:
            journals = [Journal(home / "journal.sqlite", readonly=True) for home in homes]
            for journal in journals:
                opened.enter_context(journal)
                journal.check_pages()
                violations += [Violation("journals are whole", row) for row in journal.damage()]
            shares: list[Trees] = [
                [(row, dict(one.groups(row.id))) for row in one.trees("split='train'")]
                for one in journals
            ]
        except (sqlite3.Error, JournalError, ValueError) as error:
            what = f"{error} (only a copy helps if the file was cut)"
            return [*violations, Violation("journals are whole", what)]
        every = [tree for own in shares for tree in own]
        # A live run goes on, so what is compared with the groups is read before the long check of
        # the trees.
        violations += _records(homes, every, ended)
        violations += _checkpoints(run, {g: v for _, groups in every for g, v in groups.items()})
        for number, (journal, own) in enumerate(zip(journals, shares, strict=True)):
            violations += _closed(shards.Shard(number, count), own, ended)
            violations += _drawn(journal, own)
            violations += _trees(journal, own, staleness)
        return violations


def _drawn(journal: Journal, trees: Trees) -> Iterator[Violation]:
    """Each tree's task is what its draw gave at the first start, where the task files of then are
    still there."""
    inputs = next((inputs for *_, inputs in journal.starts()), {})
    files = {path: sum for key, (path, sum) in inputs.items() if key.startswith("data.train")}
    if files and all(Path(one).is_file() and digest.file(Path(one)) == files[one] for one in files):
        flags = (inputs.get(key, ("",))[0] for key in ("verbatim", "hops_in_turn"))
        verbatim, in_turn = (flag == str(True) for flag in flags)
        drawn = tasks.Tasks([*files], int(inputs["seed"][0]), verbatim, in_turn)
        for row, _ in trees:
            if row.digest not in ("", now := drawn.at(row.position).digest):
                what = f"tree {row.id} is of task {row.digest}, and draw {row.position} gave {now}"
                yield Violation("the task that was drawn", what)


def starts(run: Path) -> Iterator[str]:
    """Yield what differs between one start of a run and the next, where the journal says it, and
    how many trees retention has removed."""
    unread = contextlib.suppress(sqlite3.Error, OSError, ValueError)
    with unread, opened(run) as journal:
        for (*_, old), (number, at, new) in itertools.pairwise(journal.starts()):
            for _, how in edited(old, new):
                yield f"start {number}, {time.ctime(at)}: {how}"
        if removed := len(journal.trees("reason=?", REMOVED)):
            yield f"{removed} trees were {REMOVED}: their draws and updates hold, not their tokens"


def _closed(shard: shards.Shard, trees: Trees, ended: bool) -> Iterator[Violation]:
    """Tasks drawn = trained + quarantined + in flight; each of the shard's draws was made once, and
    each tree trained in one update."""
    drawn = Counter(row.position for row, _ in trees)
    own = {shard.position(draw) for draw in range(shard.draws(max(drawn, default=-1) + 1))}
    for position in sorted({*own, *drawn}):
        if drawn[position] != (position in own):
            yield Violation("drawn once", f"draw {position} was made {drawn[position]} times")
    for row, groups in trees:
        name = f"tree {row.id}"
        if foreign := [one for one in (row.id, *groups) if not shard.owns(one)]:
            what = f"{name} of shard {shard.number} has the id {foreign[0]}"
            yield Violation("ids of one shard", what)
        if row.status == "quarantined" and not row.reason:
            yield Violation("quarantined with a reason", f"{name} has none")
        versions = {version for version in groups.values() if version is not None}
        if len(versions) > 1:
            what = f"{name} was trained into versions {sorted(versions)}"
            yield Violation("a tree in one update", what)
        if versions and row.status == "growing":
            what = f"{name} grows and was trained into {min(versions)}"
            yield Violation("trained after it closed", what)
        open_ends = [f"{name} still grows"] if row.status == "growing" else []
        untrained = [group for group, version in groups.items() if version is None]
        open_ends += [f"group {group} of {name} is not trained" for group in untrained[:1]]
        if ended:
            yield from (Violation("nothing in flight at the end", what) for what in open_ends)


def _records(homes: list[Path], trees: Trees, ended: bool) -> Iterator[Violation]:
    """Every scheduler has one record per update, which counts as many groups as all journals have
    of its version."""
    counts: list[dict[int, int]] = []
    for path in (home / "metrics.jsonl" for home in homes):
        counts.append(counted := {})
        for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
            try:
                record = msgspec.json.decode(line, type=dict[str, float | None])
            except MALFORMED as error:
                if ended:
                    yield Violation("records are whole", f"{path.name}:{number}: {error}")
                continue
            if UPDATE in record:
                if (version := int(record["version"])) in counted:
                    yield Violation("one record per update", f"version {version} has two")
                counted[version] = int(record[UPDATE])
    groups = Counter(
        version
        for row, own in trees
        for version in own.values()
        if row.status != "replaced" and version is not None
    )
    # of a live run, which goes on between the two readings
    settled = min(max(groups, default=0), *(max(counted, default=0) for counted in counts))
    for counted in counts:
        last = max([0, *counted, *(groups if ended else ())])
        for version in range(1, last + 1):
            if version not in counted:
                yield Violation("one record per update", f"version {version} has none")
            elif counted[version] != groups[version] and (ended or version < settled):
                what = f"version {version}: the learner counted {counted[version]} groups"
                what += f", the journals {groups[version]}"
                yield Violation("journal and learner agree", what)


def _checkpoints(run: Path, journaled: dict[int, int | None]) -> Iterator[Violation]:
    """Every checkpoint is what was written; the newest one's frontier and the journal agree on
    every group."""
    newest = frontier.Frontier()
    for folder in sorted((run / "checkpoints").glob("v??????")):
        newest = frontier.Frontier()
        try:
            newest = frontier.read(run, int(folder.name[1:]))
            for name, expected in digest.sums(folder).items():
                if digest.file(folder / name) != expected:
                    what = f"{folder.name}/{name} differs from its digest"
                    yield Violation("checkpoints are whole", what)
        except (OSError, ValueError) as error:
            if folder.exists():  # a live run has not removed it
                yield Violation("checkpoints are whole", f"{folder.name}: {error}")
    trained = newest.groups()
    for group, version in trained.items():
        if group not in journaled:
            what = f"group {group} was trained and is not in the journal"
            yield Violation("journal and checkpoint agree", what)
        elif (said := journaled[group]) not in (version, None):
            what = f"group {group} was trained into version {version}, and the journal says {said}"
            yield Violation("journal and checkpoint agree", what)
    for group, version in journaled.items():
        if version is not None and version <= newest.version and group not in trained:
            what = f"group {group} is marked with version {version}"
            what += f", and the checkpoint of version {newest.version} lacks it"
            yield Violation("journal and checkpoint agree", what)


def _trees(journal: Journal, trees: Trees, staleness: int | None) -> Iterator[Violation]:
    """Trees are well formed, and tokens are as old as the staleness bound allows, or older if later
    trees overtook theirs."""
    overtaken: dict[int, int] = {}  # the earliest version among the trees that were admitted later
    earliest = sys.maxsize
    for row, groups in reversed(trees):
        overtaken[row.id] = earliest
        earliest = min([earliest, *(v for v in groups.values() if v is not None)])
    for row, groups in trees:
        if row.removed:
            if row.status == "growing" or None in groups.values():
                yield Violation("removed after training", f"tree {row.id} was not trained before")
            continue
        try:
            tree, turns = journal.tree(row), {group: journal.turns(group) for group in groups}
        except ValueError:
            continue  # its damage was named
        faults = list(_faults(tree))
        actions = {node.id: node for node in tree.nodes.values() if node.kind == "action"}
        for group, version in groups.items():
            nodes = [turn.node for turn in turns[group]]
            if strange := [node for node in nodes if node not in actions]:
                faults.append(f"group {group} trains node {strange[0]}, which is no action")
            elif version is not None and staleness is not None:
                versions = [actions[node].versions for node in nodes]
                sampled = np.concatenate([one for one in versions if one is not None])
                oldest, newest = int(sampled.min()), int(sampled.max())
                late = version - 1 - oldest > staleness and overtaken[tree.id] >= version
                if late or (staleness == 0 and not oldest == newest == version - 1):
                    what = f"group {group} was sampled by versions {oldest} to {newest}"
                    what += f" and trained into {version}"
                    yield Violation("within the staleness bound", what)
        for fault in faults:
            yield Violation("well-formed trees", f"tree {tree.id}: {fault}")


def _faults(tree: Tree) -> Iterator[str]:
    for node in tree.nodes.values():
        rooted = (node.parent < 0) == (node.id == 0)
        if node.parent >= node.id or not rooted or (node.id and node.parent not in tree.nodes):
            yield f"node {node.id} hangs below node {node.parent}"
        for name in ("logprobs", "versions", "sampled"):
            values = getattr(node, name)
            if values is not None and len(values) != len(node.tokens):
                yield f"node {node.id} has {len(node.tokens)} tokens and {len(values)} {name}"
        logprobs = node.logprobs if node.logprobs is not None else np.zeros(0)
        if not (np.isfinite(logprobs).all() and (logprobs <= 1e-3).all()):
            yield f"node {node.id} has log-probabilities that are no logarithms of probabilities"


def parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "coppice watch --audit",
        "Check from a run's files that every task was trained exactly once.",
        "  coppice watch --audit RUN && echo sound  status 1: a rule is broken\n"
        "docs/troubleshooting.md says what each rule means",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, also of a live run")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if an invariant is broken."""
    run = parser().parse_args(arguments).run
    try:
        violations = audit(run)
    except OSError as error:
        return gave_up("coppice watch --audit", error)
    said = [*map(str, violations)] or [f"{run}: every invariant holds"]
    RunScreen(0).say("\n".join([*starts(run), *said]), "summary")  # less may close the pipe
    return 1 if violations else 0
