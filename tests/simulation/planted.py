"""Planted faults: each patches the real code as a bug of the past did, or as one might, and the
simulation must find it."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import msgspec

from coppice.scheduler.dispatch.calls import Attempt
from coppice.scheduler.dispatch.dispatcher import Dispatcher
from coppice.scheduler.dispatch.roster import Roster
from coppice.scheduler.growth import answers
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.open_trees import OpenTrees
from coppice.scheduler.growth.strategies import chain
from coppice.scheduler.growth.tree import Node
from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.scheduler.ledger.pacing import Pacing
from coppice.scheduler.ledger.stream import Stream
from coppice.scheduler.main import Run
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import TrainGroup
from tests.simulation.world import simulate

Change = Callable[[ExitStack], None]


class Planted(msgspec.Struct, frozen=True):
    """like: the commit that mended one like it. hint: the seed with which the tests begin."""

    name: str
    like: str
    hint: int
    change: Change


def _replace(owner: Any, name: str, value: Any) -> Change:
    return lambda stack: stack.enter_context(patch.object(owner, name, value))


def _nothing(*arguments: Any) -> None:
    """What the fault leaves out."""


def _deaf(self: Dispatcher, *arguments: Any, **options: Any) -> None:
    _original_dispatcher(self, *arguments, **options)
    self.roster._joined.set = lambda: None


_original_dispatcher = Dispatcher.__init__


def _leave_without_calls(self: Roster, worker: Any, reason: str) -> None:
    if self.by_identity.get(worker.identity) is worker:
        del self.by_identity[worker.identity], self.by_name[worker.name]
        worker.ready = False
        for service in worker.hello.services:
            self.pools[service].discard(worker)
        if self.on_leave is not None:
            self.on_leave(worker, reason)


_finish = Dispatcher._finish


def _finish_without_release(
    self: Dispatcher, attempt: Attempt, outcome: str, result: Any = None
) -> None:
    hello = attempt.worker.hello
    if outcome == "infrastructure":
        attempt.worker.hello = msgspec.structs.replace(hello, capacity=hello.capacity - 1)
    _finish(self, attempt, outcome, result)


def _finish_twice(self: Dispatcher, attempt: Attempt, outcome: str, result: Any = None) -> None:
    _finish(self, attempt, outcome, result)
    if outcome == "ok":
        calls, number = attempt.worker.in_flight, attempt.number
        calls[number] = attempt
        asyncio.get_running_loop().call_later(10.0, calls.pop, number, None)


def _abandon_in_silence(self: Dispatcher, pending: Any, outcome: str) -> None:
    if (attempt := pending.attempt) is not None:
        self._finish(attempt, outcome)


_untrained = Journal.untrained_trees


def _emit_first(self: Stream, tree: Any, turns: Any) -> None:
    group, self._next_group = self._next_group, self._next_group + 1
    tree.groups.append(group)
    self._spawn(self._send(tree, group, turns))
    asyncio.get_running_loop().call_later(1.0, self.journal.save_group, tree, group, turns)


async def _send_once(self: Stream, tree: Any, group: int, turns: Any) -> None:
    try:
        body = TrainGroup(group, tree.id, self._fresh(tree, turns, False), turns)
        trained = await self.dispatcher.call("train", body, deadline=1e6)
    except InfrastructureFault:
        return
    self.replaced.discard(tree.id)
    async with self._order:
        self.journal.mark_trained(group, trained.version)
        if trained.version > self.version:
            self.version = trained.version
            await self.on_trained(trained)


def _one_more(self: Pacing) -> bool:
    within = (self.max_staleness + self.version + 1) * self.questions + 1
    return self.admitted < min(within, self.updates * self.questions)


_quarantine = OpenTrees._quarantine


def _quarantine_without(part: str, step: str) -> Change:
    def quarantine(self: OpenTrees, tree: Any, reason: str) -> None:
        with patch.object(getattr(self, part), step, _nothing):
            _quarantine(self, tree, reason)

    return _replace(OpenTrees, "_quarantine", quarantine)


async def _grow_again(tree: Any, ctx: Any, bonus: float = 0.1) -> None:
    ctx.emit([await chain.episode(tree, ctx, bonus)])
    # in the same turn of the loop, the group and the end of the tree would be one transaction
    await asyncio.sleep(0)


def _count_without_groups(self: OpenTrees, tree: Any, reason: str) -> None:
    if tree.groups or not reason.startswith("no trajectory"):
        return _quarantine(self, tree, reason)
    self.journal.close_tree(tree, "closed")
    self.stream.close(tree)
    return None


async def _open_before_the_answer(self: Context, node: Node) -> Node:
    prefix, state = self.environment.forced_prefix, node.state
    tokens = self.runtime.text.encode(prefix)
    opening = self.tree.add(node, "observation", tokens, prefix, chosen=True, state=state)
    (sample,), _ = await self.services.sample(self.tree.prefix(opening), 1, ["</answer>"])
    answer = self._sampled(opening, sample, forced=True, chosen=True)
    self.save([opening, answer])
    return answer


async def _at_once(self: Stream, timeout: float) -> None:
    """The run ends without the last answers."""


def _resumed_without(status: str) -> Change:
    def rows(self: Journal) -> list[TreeRow]:
        return [row for row in _untrained(self) if row.status != status]

    return _replace(Journal, "untrained_trees", rows)


_waited = Run._wait_for_learner


async def _without_news(self: Run) -> dict[int, int]:
    await _waited(self)
    return {}


OURS = "this simulation"
FAULTS = [
    Planted(name, like, hint, change if callable(change) else _replace(*change))
    for name, like, hint, change in (
        ("lost wake-up: a worker joins and wakes nobody", "", 0, (Dispatcher, "__init__", _deaf)),
        ("a tree that crashed after its group emits it again", "608484b", 35,
         (chain, "grow", _grow_again)),
        ("the calls of a lost worker stay with it", "", 50,
         (Roster, "leave", _leave_without_calls)),
        ("a failed attempt keeps its place", "b351ee5", 45,
         (Dispatcher, "_finish", _finish_without_release)),
        ("a resume skips the trees that were growing", "", 0, _resumed_without("growing")),
        ("a resume skips what a quarantined tree emitted", "7f5fe36", 380,
         _resumed_without("quarantined")),
        ("a cancellation is lost", "", 0, (Dispatcher, "_abandon", _abandon_in_silence)),
        ("the admission bound is off by one", "", 0, (Pacing, "may_start", _one_more)),
        ("a quarantine is not written", "", 0, _quarantine_without("journal", "close_tree")),
        ("a quarantined tree keeps its admission", "", 0,
         _quarantine_without("pacing", "withdraw")),
        ("a duplicate answer is accepted", "", 0, (Dispatcher, "_finish", _finish_twice)),
        ("a group is sent before it is in the journal", "", 0, (Stream, "emit", _emit_first)),
        ("marks of lost updates survive a resume", "", 40,
         (Journal, "forget_training_after", _nothing)),
        ("what a living learner has trained is admitted again", OURS, 85,
         (Run, "_wait_for_learner", _without_news)),
        ("a group whose learner was lost is not sent again", "", 270,
         (Stream, "_send", _send_once)),
        ("a call lost with its connection is not noticed", OURS, 170,
         (Dispatcher, "_compare", _nothing)),
        ("the run ends before the last answers", OURS, 135, (Stream, "settle", _at_once)),
        ("an answer with too few parts ends its tree", OURS, 0, (answers, "complete", _nothing)),
        ("a tree without groups counts in an update", OURS, 75,
         (OpenTrees, "_quarantine", _count_without_groups)),
        ("a forced opening stays without its answer", OURS, 0,
         (Context, "force_answer", _open_before_the_answer)),
    )
]  # fmt: skip


def first_violation(fault: Planted, most: int, first: int = 0) -> tuple[int, str] | None:
    """The first of ``most`` seeds, beginning with ``first``, that finds the fault and nothing
    without it, with the violated invariant; None if none does."""
    for seed in range(first, first + most):
        with ExitStack() as stack:
            fault.change(stack)
            found = simulate(seed).failures
        if found:
            return None if simulate(seed).failures else (seed, found[0])
    return None
