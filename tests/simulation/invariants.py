"""What must hold after every run, by the journal and the learner's own record."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from coppice.common.shards import Shard
from coppice.scheduler.growth.tree import Node, Tree
from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.scheduler.main import Run
from tests.simulation.peers import first_logprob, mislabelled, score
from tests.simulation.plan import Plan
from tests.simulation.scripted_learner import Update


def of_the_journal(
    journal: Journal, plan: Plan, record: Sequence[Update], lives: int
) -> Iterator[str]:
    settings = plan.settings
    rows = journal.trees("split='train'")
    groups = {group: (row, version) for row in rows for group, version in journal.groups(row.id)}
    yield from _draws(rows, plan.shard)
    if foreign := [number for number in groups if not plan.shard.owns(number)]:
        yield f"the groups {foreign} have the ids of another shard"
    yield from _trained_once(groups, record)
    versions = [update.version for update in record]
    if versions != list(range(1, settings.updates + 1)):
        yield f"the learner made the versions {versions}, expected 1 to {settings.updates}"
    if any(len(update.trees) != settings.questions_per_update for update in record):
        sizes = [len(update.trees) for update in record]
        yield f"an update has not {settings.questions_per_update} questions: {sizes}"
    yield from _admission(rows, record, plan)
    if settings.max_staleness == 0 and not lives:
        for update in record:
            if update.sampled - {update.version - 1}:
                yield f"synchronous update {update.version} has tokens of versions {update.sampled}"
    for row in journal.trees():
        tree = journal.tree(row)
        yield from _well_formed(tree, journal)
        sampled = [node.versions for node in tree.nodes.values() if node.versions is not None]
        least, most = min(map(min, sampled), default=math.inf), max(map(max, sampled), default=0)
        if (not lives and least < row.version) or (row.split == "heldout" and most > row.version):
            yield f"tree {row.id}, of version {row.version}, has tokens of {least} to {most}"
    every, names = settings.evaluation.every, {name for _, name, _ in journal.evaluations()}
    between = range(every, settings.updates, every) if every and not lives else ()
    expected = {"start", "end", *(f"v{version}" for version in between)}
    if settings.evaluation.questions and not names >= expected:
        yield f"the evaluations are {names}, expected {expected}"
    for version, name, _ in journal.evaluations():
        expected = {"start": 0, "end": settings.updates}
        if version != (expected[name] if name in expected else int(name[1:])):
            yield f"the evaluation {name!r} is of version {version}"


def _draws(rows: Sequence[TreeRow], shard: Shard) -> Iterator[str]:
    """Every task that was drawn is trained or quarantined for a peer's fault, none twice."""
    drawn = sorted(row.position for row in rows)
    expected = [shard.position(draw) for draw in range(len(rows))]
    if drawn != expected:
        yield f"the draws are {drawn}, expected {expected}"
    for row in rows:
        if not shard.owns(row.id):
            yield f"tree {row.id} has the id of another shard"
        if row.status == "growing":
            yield f"tree {row.id} is still growing at the end"
        if row.status == "quarantined" and not row.reason:
            yield f"tree {row.id} is quarantined without a reason"
        if "Traceback" in (row.reason or ""):
            yield f"tree {row.id} is quarantined for a mistake of the program: {row.reason}"


def _trained_once(
    groups: dict[int, tuple[TreeRow, int | None]], record: Sequence[Update]
) -> Iterator[str]:
    """Every group is in exactly one update of the learner, and the journal says in which."""
    trained = Counter[int]()
    by_version: dict[int, int] = {}
    for update in record:
        for group in itertools.chain(update.replaced, *update.trees.values()):
            trained[group] += 1
            by_version[group] = update.version
    for group, count in trained.items():
        if count > 1:
            yield f"group {group} was trained {count} times"
        if group not in groups:
            yield f"group {group} was trained and is not in the journal"
    for group, (row, version) in groups.items():
        if group not in trained and row.status == "replaced":
            continue  # it has no gradient, and it came too late for the last update
        if group not in trained:
            yield f"group {group} of tree {row.id} ({row.status}) was never trained"
        elif version is None:
            yield f"group {group} was trained and the journal does not say so"
        elif version != by_version[group]:
            yield f"group {group} was trained into {by_version[group]}, journaled as {version}"


def _admission(rows: Sequence[TreeRow], record: Sequence[Update], plan: Plan) -> Iterator[str]:
    """At most (max_staleness + v + 1) questions are admitted up to version v; in the mean the
    trained ones are no older than max_staleness."""
    questions, staleness = plan.settings.questions_per_update, plan.settings.max_staleness
    counted = {tree for update in record for tree in update.trees}
    admitted = 0
    for row in rows:
        admitted += row.id in counted
        if row.id in counted and admitted > (staleness + row.version + 1) * questions:
            yield f"tree {row.id} was admitted at {row.version} as number {admitted}"
    admitted_at, ages = {row.id: row.version for row in rows}, list[int]()
    for update in record:
        ages += [update.version - 1 - admitted_at[tree] for tree in update.trees]
        if sum(ages) > staleness * len(ages):
            yield f"trees up to version {update.version} are {ages} versions old"
    for row in rows:
        if row.status == "closed" and row.id not in counted:
            yield f"tree {row.id} is closed, and no update has taken it"


def _well_formed(tree: Tree, journal: Journal) -> Iterator[str]:
    for node in tree.nodes.values():
        unknown = node.parent >= 0 and node.parent not in tree.nodes
        if (node.parent < 0) != (node.id == 0) or unknown:
            yield f"tree {tree.id}: node {node.id} has the parent {node.parent}"
        arrays = (node.logprobs, node.versions, node.sampled)
        lacking = any(array is None or len(array) != len(node.tokens) for array in arrays)
        if mislabelled(node):
            yield f"tree {tree.id}: tokens of node {node.id} have another version than their actor"
        if node.kind == "action" and lacking:
            yield f"tree {tree.id}: action {node.id} lacks log-probabilities or versions"
        yield from _answers_belong(tree, node)
    seen: dict[int, int] = {}
    for group in tree.groups:
        for turn in journal.turns(group):
            where = f"tree {tree.id}: group {group}"
            if seen.setdefault(turn.node, group) != group:
                yield f"{where} trains on node {turn.node}, as group {seen[turn.node]} does"
            if turn.node not in tree.nodes or tree.nodes[turn.node].kind != "action":
                yield f"{where} trains on node {turn.node}, which is no action of the tree"
            if not all(map(math.isfinite, turn.scores.values())):
                yield f"{where} has the scores {turn.scores}"


def _answers_belong(tree: Tree, node: Node) -> Iterator[str]:
    """A score is the one that the judge gave to this turn, and a sample continues this prefix."""
    for column in ("think", "query", "answer"):
        if column in node.scores and node.scores[column] != score(node.text, column):
            yield f"tree {tree.id}: node {node.id} has another turn's score of {column!r}"
    above = tree.parent(node)
    if node.logprobs is None or above is None or node.kept:
        return  # an action that was forked within has the first token of another one
    if int(node.logprobs[0]) != first_logprob(tree.prefix(above)):
        yield f"tree {tree.id}: node {node.id} was sampled from another prefix"


def at_the_end(run: Run) -> Iterator[str]:
    """What the scheduler still holds before it dismisses its workers: nothing, except for replaced
    trees that came too late for the last update, and new weights on their way."""
    late = run.stream.replaced
    untrained = [group for tree in late for group, _ in run.journal.groups(tree)]
    calls = Counter(call.service for call in run.dispatcher.open_calls())
    calls.subtract({"load": calls["load"], "train": len(untrained)})
    held = {
        "open calls": {service: count for service, count in calls.items() if count},
        "growing trees": run.open_trees.growing,
        "trees in the fleet": run.runtime.fleet.trees,
        "seats": [name for name, seats in run.runtime.fleet.seats.items() if seats],
        "nodes of sent trees": run.stream._sent.keys() - late,
    }
    for what, value in held.items():
        if value:
            yield f"{what} are left at the end: {value}"
