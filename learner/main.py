"""The learner process. Rank 0 is the service worker (train, close), and all ranks train.

``coppice launch`` starts the ranks of one machine (COPPICE_RANKS names a file where they meet);
torchrun those of several (docs/learner.md). Every rank needs the run folder under the same path.
States of rank 0: waiting for a complete batch -> updating (in a thread, so heartbeats go on) ->
publishing -> checkpointing -> waiting.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import msgspec
import torch

from coppice.common import loop, shards
from coppice.common.process import begin
from coppice.common.turns import Turns
from coppice.learner.config import LearnerProcess
from coppice.learner.model import checkpoint
from coppice.learner.model.model import TreeModel
from coppice.learner.model.publish import Publisher, announce
from coppice.learner.model.ranks import Ranks
from coppice.learner.model.weight_server import WeightServer
from coppice.learner.update.batches import Inbox
from coppice.learner.update.trainer import Batch, Trainer
from coppice.wire import arrays
from coppice.wire.keys import connection
from coppice.wire.messages import Closed, Result, Trained, TrainGroup, TreeClosed
from coppice.wire.published import Weights
from coppice.wire.service import UNBOUNDED, Call, Handler, Service

log = logging.getLogger("learner.main")

_STOP = b"\x01"
_KEEPALIVE = b"\x00"
"""Rank 0 sends this to idle ranks, so that they time out only if rank 0 is dead."""
_CHECKPOINT = b"\x02"
"""Rank 0 sends this to sharded ranks, each of which writes its part of the checkpoint."""
_REST = b"\x03"
"""Rank 0 sends this at the end of a turn on shared GPUs."""
REMEMBERED = 64
"""The number of updates whose answers are kept for groups that are sent again, and whose metrics a
checkpoint holds beyond those since the one before. The scheduler lacks only the last few: it admits
at most max_staleness + 1 updates' trees beyond those that it knows."""


def pack_batch(batch: Batch) -> bytes:
    """Return a batch as bytes for the other ranks."""
    return msgspec.msgpack.encode(arrays.encode(Result(0), batch))


def unpack_batch(payload: bytes) -> Batch:
    return arrays.decode_body(msgspec.msgpack.decode(payload, type=list[bytes]), Batch)


def rest(ranks: Ranks) -> None:
    """Return to the GPUs what the allocator keeps, on all ranks before one goes on."""
    if ranks.device.startswith("cuda"):
        torch.cuda.empty_cache()
    ranks.barrier()


class Leader:
    """Rank 0 collects groups, runs updates and answers every group with the version that contains
    it. ``work`` runs once, until ``stop``. records: metrics of earlier updates, by version.
    warnings: sent with the next update, besides its own. turns: on GPUs that engines share."""

    def __init__(
        self, trainer: Trainer, run: Path, inbox: Inbox, publisher: Publisher | None = None,
        records: Mapping[int, dict[str, float]] = {}, warnings: Sequence[str] = (),
        turns: Turns | None = None,
    ):  # fmt: skip
        self.turns = turns
        self.trainer, self.run, self.inbox = trainer, run, inbox
        self.publisher = publisher or Publisher(trainer.policy, run, trainer.config)
        self.config, self.durable, self.updates = trainer.config, trainer.version, 0
        self.records, self.warnings = dict(records), list(warnings)
        self.counts: defaultdict[str, float] = defaultdict(float)
        self._answers: dict[int, Trained] = {}
        self._waiting: dict[int, asyncio.Future[Trained]] = {}
        self._stopping = False
        self._changed = asyncio.Event()

    async def train(self, group: TrainGroup, call: Call) -> Trained:
        """Handle the service "train". The answer follows when an update contains the group."""
        # a group in training waits for the answer
        if not self.inbox.add(group) and group.id not in self._waiting:
            return self._trained(self.inbox.trained[group.id])
        self._changed.set()
        future = self._waiting.setdefault(group.id, asyncio.get_running_loop().create_future())
        return await asyncio.shield(future)

    async def close(self, closed: TreeClosed, call: Call) -> Closed:
        """Handle the service "close": a tree emits no more groups."""
        self.inbox.close(closed)
        self._changed.set()
        return Closed()

    def stop(self) -> None:
        """Let ``work`` end after the update that runs."""
        self._stopping = True
        self._changed.set()

    def _trained(self, version: int) -> Trained:
        """Return the answer to a group that ``version`` trained. One of an earlier start has no
        weights to load any more."""
        return self._answers.get(version) or Trained(version, "", "", self.records.get(version, {}))

    async def work(self) -> None:
        """Run an update for each complete batch until ``stop``. Then write a checkpoint if the
        newest version has none, and drop the calls that wait: their groups stay in the journal, and
        a resumed run sends them again."""
        quiet, heard = self.config.collective_timeout_s / 4, time.monotonic()
        while not self._stopping:
            trees = self.inbox.ready()
            if trees is None:
                self._changed.clear()
                try:
                    async with asyncio.timeout(max(0.0, heard + quiet - time.monotonic())):
                        await self._changed.wait()
                except TimeoutError:
                    await asyncio.to_thread(self.trainer.ranks.broadcast, _KEEPALIVE)
                    heard = time.monotonic()
                continue
            async with self._turn() as waited:
                batch = self.inbox.take(trees, self.trainer.version)
                metrics = await asyncio.to_thread(self._update, batch)
                metrics |= waited
                if self.trainer.version - self.durable >= self.config.checkpoint_every:
                    start = time.monotonic()
                    await asyncio.to_thread(self._checkpoint)
                    metrics["time/checkpoint"] = time.monotonic() - start
                self._answer(batch)
            heard = time.monotonic()
        if self.durable < self.trainer.version:
            async with self._turn():
                await asyncio.to_thread(self._checkpoint)
        for future in self._waiting.values():
            future.cancel()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[dict[str, float]]:
        """Have GPUs that engines share for the learner alone. Yields a metric, {} without them. An
        error ends the process, and so the turn."""
        if self.turns is None:
            yield {}
            return
        start = time.monotonic()
        await asyncio.to_thread(self.turns.take)
        yield {"time/turn": time.monotonic() - start}
        await asyncio.to_thread(self.trainer.ranks.broadcast, _REST)
        await asyncio.to_thread(rest, self.trainer.ranks)
        self.turns.give()

    def _update(self, batch: Batch) -> dict[str, float]:
        if self.trainer.ranks.count > 1:
            self.trainer.ranks.broadcast(pack_batch(batch))
        metrics = self.trainer.update(batch)
        start, durable = time.monotonic(), self.durable
        trained = dict(takewhile(lambda of: of[1] > durable, reversed(self.inbox.trained.items())))
        p = self.publisher.publish(self.trainer.version, trained)
        assert p is not None, "the leader is rank 0"
        metrics["time/publish"] = time.monotonic() - start
        self.updates += 1
        for name in ("learner/forwarded_tokens", "learner/trained_tokens"):
            self.counts[name] += metrics.get(name, 0.0)
        warnings, self.warnings = self.trainer.warnings + self.warnings, []
        self._answers[p.version] = Trained(p.version, p.path, p.digest, metrics, warnings)
        self._answers.pop(p.version - REMEMBERED, None)
        self.records[p.version] = metrics
        oldest = p.version - REMEMBERED - self.config.checkpoint_every
        self.records = {v: kept for v, kept in self.records.items() if v > oldest}
        return metrics

    def _checkpoint(self) -> None:
        if self.trainer.ranks.sharded:
            self.trainer.ranks.broadcast(_CHECKPOINT)
        checkpoint.save(self.trainer, self.run, self.inbox.runs, self.config.keep, self.records)
        self.durable = self.trainer.version

    def _answer(self, batch: Batch) -> None:
        version, groups, questions = self.trainer.version, len(batch.groups), batch.questions
        for group in [*(group.id for group in batch.groups), *batch.replaced]:
            future = self._waiting.pop(group, None)
            if future is not None and not future.done():
                future.set_result(self._trained(version))
        log.info("version %d: %d groups of %d questions", version, groups, questions)

    def stats(self) -> dict[str, float]:
        t, passes = self.trainer, TreeModel.passes
        own = {"busy_s": t.busy_s, "version": t.version, "updates": self.updates, "passes": passes}
        return own | self.counts


async def lead(
    trainer: Trainer, process: LearnerProcess, state: checkpoint.State, warnings: list[str],
    turns: Turns | None = None,
) -> None:  # fmt: skip
    """Run rank 0 until every scheduler has drained its service. Then tell the other ranks to stop.
    state, warnings: what ``restore_newest`` returned. turns: see ``Leader``."""
    run = Path(process.run)
    serves = trainer.config.publish != "file" and not trainer.policy.lora  # adapters are files
    server = WeightServer(trainer.config.publish_host) if serves else None
    publisher = Publisher(trainer.policy, run, trainer.config, server, process.max_staleness)
    if trainer.version:
        publisher.publish(trainer.version)
    else:
        announce(run, Weights())
    inbox = Inbox(process.questions_per_update, state.groups(), process.shards)
    leader = Leader(trainer, run, inbox, publisher, state.records, warnings, turns)
    handlers: dict[str, Handler] = {"train": leader.train, "close": leader.close}
    homes = [shards.folder(run, number) for number in range(process.shards)]
    services = [
        Service(process.name, handlers, UNBOUNDED, leader.stats, give_up_s=120.0) for _ in homes
    ]
    handle = asyncio.get_running_loop().add_signal_handler
    for number in (signal.SIGTERM, signal.SIGINT):
        handle(number, lambda: [service.drain() for service in services])
    working = asyncio.create_task(leader.work())
    # a task, because a bare gather that is cancelled says so after the error that ended the rank
    serving = asyncio.create_task(_serve(services, homes))
    drained = asyncio.ensure_future(asyncio.gather(*(s.draining.wait() for s in services)))
    try:
        await asyncio.wait([working, serving, drained], return_when=asyncio.FIRST_COMPLETED)
        leader.stop()
        await working
        await serving
        await asyncio.to_thread(trainer.ranks.broadcast, _STOP)
    except Exception:  # the other ranks get no stop: they end as soon as this process is gone
        log.exception("rank 0 failed")
        raise
    finally:
        serving.cancel()
        if server is not None:
            server.close()


async def _serve(services: list[Service], homes: list[Path]) -> None:
    """Serve the scheduler of each shard's folder until all have drained their service."""
    reached = [connection(folder, "learner") for folder in homes]
    pairs = zip(services, reached, strict=True)
    await asyncio.gather(*(service.run(*place, signals=False) for service, place in pairs))


def follow(trainer: Trainer) -> None:
    """Run one of the other ranks: train on every batch that rank 0 broadcasts, until rank 0 sends
    the stop."""
    publisher = Publisher(trainer.policy, Path(trainer.process.run), trainer.config)
    if trainer.version:
        publisher.publish(trainer.version)
    while (payload := trainer.ranks.broadcast(None)) != _STOP:
        if payload == _CHECKPOINT:
            checkpoint.save(trainer, Path(trainer.process.run), [], trainer.config.keep)
        elif payload == _REST:
            rest(trainer.ranks)
        elif payload != _KEEPALIVE:
            trainer.update(unpack_batch(payload))
            publisher.publish(trainer.version)


def run(process: LearnerProcess, ranks: Ranks) -> None:
    """Restore this rank and train until the stop."""
    if ranks.count != process.learner.count:
        raise ValueError(
            f"learner.count = {process.learner.count}, and {ranks.count} ranks were started: start"
            " as many"
        )
    turns = Turns(Path(process.turns)) if process.turns and not ranks.rank else None
    if turns is not None:
        turns.take()
    ranks.barrier()
    trainer = Trainer(process, ranks)
    state, warnings = checkpoint.restore_newest(trainer, Path(process.run))
    rest(ranks)
    if turns is not None:
        turns.give()
    version, compute = trainer.version, trainer.policy.compute
    log.info("rank %d of %d: version %d, %s", ranks.rank, ranks.count, version, compute)
    if ranks.rank == 0:
        loop.run(lead(trainer, process, state, warnings, turns))
    else:
        follow(trainer)


def main() -> None:
    begin()
    process = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=LearnerProcess)
    w = process.learner
    if w.publish != "file":  # as SGLang's servers do, or NCCL would hand memory over in two ways
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    ranks = Ranks(w.collective_timeout_s, w.sharding, w.shard_ranks, process.computing)
    try:
        run(process, ranks)
    except BaseException:
        if ranks.count == 1:
            raise
        sys.excepthook(*sys.exc_info())
        os._exit(1)  # gloo's threads would abort an interpreter that ends
    ranks.close()


if __name__ == "__main__":
    main()
