"""The command coppice watch --audit: it reads a run folder from outside and says whether every task was
trained exactly once or is accounted for.

It believes the files alone (journal, metrics, checkpoints), and no process. A run that has not
ended may have trees in flight, and the records of its newest update may not be complete.
"""

import argparse
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from coppice.common import frontier, shards
from coppice.common.options import command_parser
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.scheduler.ledger.records import UPDATE
from coppice.tools.launching import changes
from coppice.wire import digest


class Violation(msgspec.Struct, frozen=True):
    """rule: the name of the broken invariant. what: where and how it is broken."""

    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}"


class _Known(msgspec.Struct, frozen=True):
    """A training tree and its groups with the versions that trained them."""

    row: TreeRow
    groups: dict[int, int | None]


def audit(run: Path, staleness: int | None = None) -> list[Violation]:
    """Return what is wrong in a run folder; an empty list says that all invariants hold. Raises
    FileNotFoundError without a journal.

    staleness: the run's scheduler.max_staleness; None reads it from its config.json (the largest
    one that the run had, if a resume changed it), and checks no versions if there is none.
    """
    known = run / "config.json"
    settings = msgspec.json.decode(known.read_bytes())["scheduler"] if known.exists() else {}
    former = [config["scheduler"] for config in changes.former(run)]
    bounds = [one["max_staleness"] for one in (settings, *former) if "max_staleness" in one]
    staleness = max(bounds, default=None) if staleness is None else staleness
    count = settings.get("shards", 1)
    homes = [shards.folder(run, number) for number in range(count)]
    ended = all((home / "summary.json").exists() for home in homes)
    with contextlib.ExitStack() as opened:
        journals = [
            opened.enter_context(
                contextlib.closing(Journal(home / "journal.sqlite", readonly=True))
            )
            for home in homes
        ]
        shares = [
            [_Known(row, dict(one.groups(row.id))) for row in one.trees("split='train'")]
            for one in journals
        ]
        every = [tree for own in shares for tree in own]
        journaled = {group: version for tree in every for group, version in tree.groups.items()}
        # A live run goes on: what is compared with the groups is read before the long check of
        # the trees.
        violations = [*_one_update_each(every), *_records(homes, every, ended)]
        violations += _checkpoints(run, journaled)
        for number, (journal, own) in enumerate(zip(journals, shares, strict=True)):
            violations += _draws(shards.Shard(number, count), own, ended)
            violations += _trees(journal, own, staleness)
        return violations


def _draws(shard: shards.Shard, trees: list[_Known], ended: bool) -> Iterator[Violation]:
    """Tasks drawn = trained + quarantined + in flight, and no draw of the shard is skipped or made
    twice, or is another shard's."""
    drawn = Counter(tree.row.position for tree in trees)
    own = {shard.position(draw) for draw in range(shard.draws(max(drawn, default=-1) + 1))}
    for position in sorted({*own, *drawn}):
        if drawn[position] != (position in own):
            yield Violation("drawn once", f"draw {position} was made {drawn[position]} times")
    for tree in trees:
        row, name = tree.row, f"tree {tree.row.id}"
        if foreign := [one for one in (row.id, *tree.groups) if not shard.owns(one)]:
            what = f"{name} of shard {shard.number} has the id {foreign[0]}"
            yield Violation("ids of one shard", what)
        if row.status == "quarantined" and not row.reason:
            yield Violation("quarantined with a reason", f"{name} has none")
        if ended and row.status == "growing":
            yield Violation("nothing in flight at the end", f"{name} still grows")
        untrained = [group for group, version in tree.groups.items() if version is None]
        if ended and untrained:
            yield Violation(
                "nothing in flight at the end", f"group {untrained[0]} of {name} is not trained"
            )


def _one_update_each(trees: list[_Known]) -> Iterator[Violation]:
    for tree in trees:
        versions = {version for version in tree.groups.values() if version is not None}
        if len(versions) > 1:
            what = f"tree {tree.row.id} was trained into versions {sorted(versions)}"
            yield Violation("a tree in one update", what)
        if versions and tree.row.status == "growing":
            what = f"tree {tree.row.id} grows and was trained into {min(versions)}"
            yield Violation("trained after it closed", what)


def _records(homes: list[Path], trees: list[_Known], ended: bool) -> Iterator[Violation]:
    """Every scheduler has one record per update, which counts as many groups as all journals have
    of its version."""
    counts: list[dict[int, int]] = []
    for path in (home / "metrics.jsonl" for home in homes):
        counts.append(counted := {})
        for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
            try:
                record = msgspec.json.decode(line, type=dict[str, float])
            except msgspec.DecodeError as error:
                if ended:
                    yield Violation("records are whole", f"{path.name}:{number}: {error}")
                continue
            if UPDATE in record:
                if (version := int(record["version"])) in counted:
                    yield Violation("one record per update", f"version {version} has two")
                counted[version] = int(record[UPDATE])
    groups = Counter[int]()
    for tree in trees:
        if tree.row.status != "replaced":
            groups.update(version for version in tree.groups.values() if version is not None)
    settled = min(max(counted, default=0) for counted in counts)
    for counted in counts:
        last = max([0, *counted, *(groups if ended else ())])
        for version in range(1, last + 1):
            if version not in counted:
                yield Violation("one record per update", f"version {version} has none")
            elif counted[version] != groups[version] and (ended or version < settled):
                what = f"version {version}: the learner counted {counted[version]} groups and the journals have {groups[version]}"
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
                    yield Violation(
                        "checkpoints are whole", f"{folder.name}/{name} differs from its digest"
                    )
        except (OSError, ValueError) as error:
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
            what = f"group {group} is marked with version {version}, and the checkpoint of version {newest.version} lacks it"
            yield Violation("journal and checkpoint agree", what)


def _trees(journal: Journal, trees: list[_Known], staleness: int | None) -> Iterator[Violation]:
    """Trees are well formed, and tokens are as old as the staleness bound allows, or older if later
    trees overtook theirs."""
    fastest: dict[int, int] = {}
    earliest = sys.maxsize
    for tree in reversed(trees):  # the earliest version among the trees that were admitted later
        fastest[tree.row.id] = earliest
        trained = [version for version in tree.groups.values() if version is not None]
        earliest = min([earliest, *trained])
    for known in trees:
        tree = journal.tree(known.row)
        for fault in _faults(tree):
            yield Violation("well-formed trees", f"tree {tree.id}: {fault}")
        actions = {node.id: node for node in tree.nodes.values() if node.kind == "action"}
        for group, version in known.groups.items():
            nodes = [turn.node for turn in journal.turns(group)]
            if strange := [node for node in nodes if node not in actions]:
                what = f"group {group} trains node {strange[0]}, which is no action"
                yield Violation("well-formed trees", f"tree {tree.id}: {what}")
            elif version is not None and staleness is not None:
                versions = [actions[node].versions for node in nodes]
                sampled = np.concatenate([one for one in versions if one is not None])
                oldest, newest = int(sampled.min()), int(sampled.max())
                late = version - 1 - oldest > staleness and fastest[tree.id] >= version
                synchronous = staleness > 0 or oldest == newest == version - 1
                if late or not synchronous:
                    what = f"group {group} was sampled by versions {oldest} to {newest} and trained into {version}"
                    yield Violation("within the staleness bound", what)


def _faults(tree: Tree) -> Iterator[str]:
    for node in tree.nodes.values():
        rooted = (node.parent < 0) == (node.id == 0)
        known = not node.id or node.parent in tree.nodes
        if node.parent >= node.id or not rooted or not known:
            yield f"node {node.id} hangs below node {node.parent}"
        for name in ("logprobs", "versions", "sampled"):
            values = getattr(node, name)
            if values is not None and len(values) != len(node.tokens):
                yield f"node {node.id} has {len(node.tokens)} tokens and {len(values)} {name}"
        logprobs = node.logprobs if node.logprobs is not None else np.zeros(0)
        if not (np.isfinite(logprobs).all() and (logprobs <= 1e-3).all()):
            yield f"node {node.id} has log-probabilities that are no logarithms of probabilities"


EXAMPLES = """\
  coppice watch --audit RUN && echo sound  status 1: a rule is broken
docs/troubleshooting.md says what each rule means"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice watch --audit."""
    parser = command_parser(
        "coppice watch --audit",
        "Check from a run's files that every task was trained exactly once.",
        EXAMPLES,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, also of a live run")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if an invariant is broken."""
    run = parser().parse_args(arguments).run
    try:
        violations = audit(run)
    except FileNotFoundError as error:
        print(f"coppice watch --audit: {error}", file=sys.stderr)
        return 2
    try:
        print("\n".join(map(str, violations)) or f"{run}: every invariant holds", flush=True)
    except BrokenPipeError:
        # the reader (head, less) has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if violations else 0
