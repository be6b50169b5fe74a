"""Send finished groups to the learner until they are trained, and receive its new versions. A group
is journaled before it is sent, and a tree is on the disk before it is told as closed, so no
checkpoint holds a group that the journal lost. Each node travels once per connection."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from coppice.common.shards import Shard
from coppice.scheduler.dispatch.dispatcher import Dispatcher, Worker
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.wire import arrays
from coppice.wire.faults import DataFault, InfrastructureFault, WireError
from coppice.wire.messages import Trained, TrainGroup, TreeClosed, TreeNode, Turn

log = logging.getLogger("scheduler.stream")

FOREVER_S = 7 * 24 * 3600.0
"""The deadline of a train call, which is answered when its update is done."""
_RESEND_WAIT_S = 1.0
LIMITS = arrays.Limits()


class Stream:
    """Owns the ``train`` and ``close`` calls until ``stop``. on_trained: awaited once per version
    that is not in ``announced``, in order. replaced: replaced trees of which no update has taken a
    group. failure: of a send."""

    failure: BaseException | None = None
    _learner: tuple[str, int] | None = None

    def __init__(
        self, dispatcher: Dispatcher, journal: Journal,
        on_trained: Callable[[Trained], Awaitable[None]], shard: Shard = Shard(),
    ):  # fmt: skip
        self.dispatcher, self.journal, self.on_trained = dispatcher, journal, on_trained
        self.version = 0
        self.announced: set[int] = set()
        self.replaced: set[int] = set()
        self._shard, self._next_group = shard, shard.after(journal.next_group() - 1)
        self._sent: dict[int, set[int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._order, self._syncing = asyncio.Lock(), asyncio.Lock()
        self._closings = self._synced = 0

    def learner_joined(self, worker: Worker) -> None:
        """Forget what was sent if ``worker`` is a learner, which has nothing. A second process,
        which lacks what the first was told, ends the run; a resume continues it."""
        if "train" not in worker.hello.services:
            return
        process = worker.hello.host, worker.hello.pid
        if self._learner not in (None, process):
            self.failure = InfrastructureFault(
                f"the learner was started anew (process {process[1]} on {process[0]}) while the"
                " scheduler went on: resume the run, and it waits for the learner's ranks again"
            )
        self._learner = process
        self._sent.clear()

    def emit(self, tree: Tree, turns: list[Turn]) -> None:
        """Journal a new group of ``tree``, then start to send it. Raises DataFault if it and its
        nodes exceed the limits of a message."""
        nodes = {node.id for turn in turns for node in tree.path(tree.nodes[turn.node])}
        try:
            body = TrainGroup(self._next_group, tree.id, self._travelling(tree, nodes), turns)
            arrays.check(arrays.encode_body(body), LIMITS)
        except WireError as error:
            raise DataFault(f"a group cannot be sent to the learner: {error}") from None
        group, self._next_group = self._next_group, self._shard.after(self._next_group)
        self.journal.save_group(tree, group, turns)
        tree.groups.append(group)
        self._spawn(self._send(tree, group, turns))

    def resend(self, tree: Tree, group: int) -> None:
        """Send a journaled group again on which no version was trained."""
        self._spawn(self._send(tree, group, self.journal.turns(group)))

    def close(self, tree: Tree, replaced: bool = False) -> None:
        """The tree emits no more. replaced: another question takes its place."""
        if replaced:
            self.replaced.add(tree.id)
        self._spawn(self._close(TreeClosed(tree.id, list(tree.groups), replaced)))

    async def settle(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until the learner has answered everything."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)

    async def stop(self) -> None:
        """Abandon the open calls. Their groups stay in the journal."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

        def ended(task: asyncio.Future[None]) -> None:
            self._tasks.discard(task)  # pyright: ignore[reportArgumentType]
            if not task.cancelled() and task.exception() is not None:
                self.failure = task.exception()

        task.add_done_callback(ended)

    async def _send(self, tree: Tree, group: int, turns: list[Turn]) -> None:
        await self.journal.written()
        trained: Trained = await self._delivered(
            "train", lambda anew: TrainGroup(group, tree.id, self._fresh(tree, turns, anew), turns)
        )
        self.replaced.discard(tree.id)
        # again, if the group was sent again after the tree's end was told
        self._sent.pop(tree.id, None)
        async with self._order:
            self.journal.mark_trained(group, trained.version)
            if trained.version not in self.announced:
                self.announced.add(trained.version)
                self.version = max(self.version, trained.version)
                await self.on_trained(trained)

    def _fresh(self, tree: Tree, turns: list[Turn], whole: bool) -> list:
        sent = self._sent.setdefault(tree.id, set())
        needed = {node.id for turn in turns for node in tree.path(tree.nodes[turn.node])}
        needed -= set() if whole else sent
        sent |= needed
        return self._travelling(tree, needed)

    def _travelling(self, tree: Tree, needed: set[int]) -> list[TreeNode]:
        nodes = [tree.nodes[id] for id in sorted(needed)]
        return [node.travels(self.journal.pictures(node.tokens)) for node in nodes]

    async def _close(self, closed: TreeClosed) -> None:
        number = self._closings = self._closings + 1
        # in order: a replaced tree reaches the learner before the tree that takes its place
        async with self._syncing:
            if self._synced < number:  # one sync serves all trees that have closed before it begins
                number = self._closings
                await self.journal.written()
                await asyncio.to_thread(self.journal.sync)
                self._synced = number
        await self._delivered("close", lambda again: closed)
        self._sent.pop(closed.tree, None)

    async def _delivered(self, service: str, body: Callable[[bool], msgspec.Struct]) -> Any:
        """Call the learner until it answers. body(again): what is sent, again after a fault."""
        again = False
        while True:
            try:
                return await self.dispatcher.call(service, body(again), deadline=FOREVER_S)
            except InfrastructureFault as fault:
                log.warning("a %s call is sent again: %s", service, fault)
                again = True
                await asyncio.sleep(_RESEND_WAIT_S)
