"""Planted faults: each changes a line of the real code as a bug of the past did, or as one might,
and the simulation must find it."""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec

from coppice.scheduler.dispatch import dispatcher
from coppice.scheduler.dispatch.dispatcher import Dispatcher
from coppice.scheduler.dispatch.pool import Pool
from coppice.scheduler.dispatch.roster import Roster
from coppice.scheduler.growth import answers
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.open_trees import OpenTrees
from coppice.scheduler.growth.strategies import chain
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.ledger.pacing import Pacing
from coppice.scheduler.ledger.stream import Stream
from coppice.scheduler.main import Run
from tests.simulation.world import simulate


class Planted(msgspec.Struct, frozen=True):
    """hint: the seed with which the tests begin. owner, function: what is changed. lines: pairs of
    a part of its source and what stands there instead."""

    name: str
    hint: int
    owner: Any
    function: str
    lines: list[str]

    @contextmanager
    def active(self) -> Iterator[None]:
        """The real code has the fault meanwhile."""
        function, place = getattr(self.owner, self.function), dict[str, Any]()
        source = textwrap.dedent(inspect.getsource(function))
        for old, new in zip(self.lines[::2], self.lines[1::2], strict=True):
            if source.count(old) != 1:
                raise ValueError(f"{self.function} has {source.count(old)} times: {old}")
            source = source.replace(old, new)
        exec(compile(source, self.name, "exec"), function.__globals__, place)
        with patch.object(self.owner, self.function, place[self.function]):
            yield


LATER = "__import__('asyncio').get_running_loop().call_later(1.0, "
SAMPLED, SHOWN = "(sample,), _ = await", "self.tree.add(node, 'observation', tokens, prefix"
FAULTS = [
    Planted(name, hint, owner, function, list(lines))
    for name, hint, owner, function, *lines in (
        ("lost wake-up: a worker joins and wakes nobody", 0,
         Roster, "_admit", "self._joined.set()", "pass"),
        ("a tree that crashed after its group emits it again", 158,
         chain, "grow", "if not tree.groups:", "if True:", "bonus)])",
         "bonus)]); await __import__('asyncio').sleep(0.5)"),
        ("the calls of a lost worker stay with it", 3,
         Roster, "leave", "self._gone(worker, reason)", "pass"),
        ("a failed attempt keeps its place", 3,
         Dispatcher, "_finish", "worker.in_flight.pop",
         "outcome == 'infrastructure' or worker.in_flight.pop"),
        ("a resume skips the trees that were growing", 10,
         Journal, "untrained_trees", "status='growing' OR", "status!='growing' AND"),
        ("a resume skips what a quarantined tree emitted", 1159,
         Journal, "untrained_trees", "split='train'", "split='train' AND status!='quarantined'"),
        ("a cancellation is lost", 77,
         Dispatcher, "_abandon", "self.roster.send", "wire.Cancel and (lambda *_: None)"),
        ("the admission bound is off by one", 4,
         Pacing, "may_start", "self.version + 1) * self.questions",
         "self.version + 1) * self.questions + 1"),
        ("a quarantine is not written", 10,
         OpenTrees, "_quarantine", 'self.journal.close_tree(tree, "quarantined", reason)', "pass"),
        ("a quarantined tree keeps its admission", 10,
         OpenTrees, "_quarantine", "self.pacing.withdraw()", "pass"),
        ("a duplicate answer is accepted", 0,
         Dispatcher, "_finish", "worker.in_flight.pop", "outcome == 'ok' or worker.in_flight.pop"),
        ("a group is sent before it is in the journal", 0,
         Stream, "emit", "self.journal.save_group(", LATER + "self.journal.save_group, "),
        ("marks of lost updates survive a resume", 41,
         Journal, "forget_training_after", "trained=NULL", "trained=trained"),
        ("what a living learner has trained is admitted again", 226,
         Run, "_wait_for_learner", "return checkpoint, newest", "return checkpoint, {}"),
        ("a group whose learner was lost is not sent again", 7,
         Stream, "_delivered", "again = True", "return await asyncio.sleep(1e9)"),
        ("a call lost with its connection is not noticed", 532,
         Dispatcher, "_compare", "attempt.number < echo and", "False and"),
        ("the run ends before the last answers", 98, Stream, "settle", "if self._tasks:", "if 0:"),
        ("an answer with too few parts ends its tree", 3,
         answers, "complete", "!= expected:", "!= expected and False:"),
        ("a tree without groups counts in an update", 52,
         OpenTrees, "_grow", "if not tree.groups:", "if False:"),
        ("a forced opening stays without its answer", 36,
         Context, "force_answer", SAMPLED, f"opening = {SHOWN}, chosen=True); {SAMPLED}",
         'self.tree.add(node, "observation"', 'opening or self.tree.add(node, "observation"'),
        ("the pool re-enters only empty workers", 0,
         Pool, "_push", "if worker.has_room:", "if not worker.in_flight:"),
        ("freed room wakes nobody", 1, Dispatcher, "_finish", "self._pump_all(worker)", "pass"),
        ("the credit of a failed attempt is kept", 3,
         Dispatcher, "_finish", "pending.place.ended", "result and pending.place.ended"),
        ("the credit of dynamic sampling is never returned", 1,
         Stream, "_send", "self.replaced.discard(tree.id)", "pass"),
        ("a tree's end is told before it is in the journal", 0,
         OpenTrees, "_grow", "self.journal.close_tree(", LATER + "self.journal.close_tree, "),
        ("a tree's end is told before it is on the disk", 0,
         Stream, "_close", "await asyncio.to_thread(self.journal.sync)", "pass"),
        ("admission opens before the weights arrive", 6,
         Run, "_trained", "await self.weight_sync",
         "self.pacing.trained(trained.version); await self.weight_sync"),
        ("tokens of one version too old are accepted", 7,
         answers, "_fault", "< oldest", "< oldest - 1"),
        ("tokens of a version that nobody has are accepted", 7,
         answers, "_fault", "> newest", "> newest + 1"),
        ("a failed call is queued twice", 3,
         Dispatcher, "_again", "self._queue(pending)",
         "self._queue(pending); self._queue(pending)"),
        ("the fleet's state survives its worker", 0,
         Run, "_left", "self.runtime.fleet.left(worker.name)", "pass"),
        ("a cancelled attempt keeps its room", 3,
         Dispatcher, "_abandon", "self._finish(attempt, outcome)", "pass"),
        ("a group travels without its nodes", 25,
         Stream, "_fresh", "set() if whole else sent", "sent"),
        ("tokens are labelled with the newest version", 18,
         Context, "_sampled", "versions=sample.versions",
         "versions=sample.versions * 0 + self.runtime.versions.newest"),
        ("the admission version is one too high", 0,
         OpenTrees, "_begin", "self.pacing.version", "self.pacing.version + 1"),
        ("the last call in is the first out", 25,
         dispatcher, "_order", "pending.arrival", "-pending.arrival"),
        ("group ids collide after a resume", 6,
         Stream, "__init__", "shard.after(journal.next_group() - 1)", "shard.after(-1)"),
        ("results of lost versions stay", 334,
         Journal, "forget_training_after", "version>?", "version>? AND 0"),
        ("a quarantine withdraws its admission twice", 10,
         OpenTrees, "_quarantine", "self.pacing.withdraw()",
         "self.pacing.withdraw(); self.pacing.withdraw()"),
        ("a waiting call never expires", 13,
         Dispatcher, "_expire", "if pending.done.done():",
         "if pending.done.done() or not pending.attempts:"),
        ("adopted groups get the newest version", 26,
         Journal, "adopt_frontier", "[(version, group,", "[(max(trained.values()), group,"),
        ("a resume takes the youngest tree first", 12,
         OpenTrees, "admit", "self.unfinished.popleft()", "self.unfinished.pop()"),
        ("a tree that grows anew keeps its groups", 214,
         Journal, "uproot", '("nodes", "groups")', '("nodes",)'),
        ("a joining actor gets no weights", 6,
         Run, "_joined", "await self.weight_sync.to(worker)", "pass"),
        ("an expired call stays open", 5, Dispatcher, "_expire", "pending.settle(fault)", "pass"),
        ("a call that must wait is looked at for ever", 7,
         Dispatcher, "look_again", "passed += 1", "pass"),
    )
]  # fmt: skip


def first_violation(fault: Planted, most: int, first: int = 0) -> tuple[int, str] | None:
    """The first of ``most`` seeds, beginning with ``first``, that finds the fault and nothing
    without it, with the violated invariant; None if none does."""
    for seed in range(first, first + most):
        with fault.active():
            violated = simulate(seed).failures
        if violated:
            return None if simulate(seed).failures else (seed, violated[0])
    return None
