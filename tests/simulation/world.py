"""One simulated run: the real ``scheduler.main.Run`` and journal on the virtual clock, its peers,
faults, crashes and resumes, from the start to the summary."""

import asyncio
import contextlib
import gc
import io
import itertools
import logging
import os
import random
import reprlib
import shutil
import signal
import sqlite3
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import tokenizers

from coppice.common import atomic
from coppice.common.shards import folder
from coppice.scheduler import main as scheduling
from coppice.scheduler.config import SchedulerProcess
from coppice.scheduler.growth.text import Text
from coppice.scheduler.ledger.journal import Journal, JournalError
from coppice.scheduler.telemetry import health
from coppice.wire.faults import Fault
from tests.simulation import invariants
from tests.simulation.network import Network, Socket
from tests.simulation.peers import Actor, Judge, Peer, Retriever
from tests.simulation.plan import LEARNER, Crash, Strike, plan
from tests.simulation.scripted_learner import Learner
from tests.simulation.virtual_time import Agenda, Stuck, VirtualLoop
from tests.simulation.watch import Disk, Watch

DEADLINE_S = 1000.0
"""Virtual seconds after which a run counts as stuck; a healthy one takes one or two hundred."""
TURNS = 50_000
"""The turns of the loop after which a run counts as stuck; a healthy one takes a few thousand."""
CPU_S, REAL_S = 10.0, 120.0
"""The same in seconds of the processor and of the clock: a turn may never end."""
MOST_LIVES = 12
BURIALS = 20
"""How often the tasks of a dead scheduler are cancelled until none is left."""
TEXTS = (
    "<think>a</think><search>b</search>",
    "<think>a</think><search>c</search>",
    "<think>d</think><answer>Lima</answer>",
    "no action",
)


class Killed(SystemExit):
    """The scheduler dies here. A SystemExit leaves the event loop at once."""


class Hung(SystemExit):
    """The real time is over. It leaves the event loop at once."""


class History:
    """What happened, in order. failures: the violated invariants."""

    def __init__(self, seed: int):
        self.seed = seed
        self.events: list[tuple[float, str, tuple[Any, ...]]] = []
        self.failures: list[str] = []

    def lines(self) -> list[str]:
        line = "{:10.3f}  {:<15} {}".format
        return [line(at, kind, " ".join(map(reprlib.repr, rest))) for at, kind, rest in self.events]


@cache
def materials() -> Path:
    """A folder with a tokenizer of bytes, a prompt, and task files, made once per process, which
    removes it at its end with what killed ones left."""
    folder = scratch("materials")
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=0)
    for left in folder.parent.glob("simulation-[0-9]*"):
        if not psutil.pid_exists(int(left.name.split("-")[1])):
            shutil.rmtree(left, ignore_errors=True)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: i for i, letter in enumerate(letters)}
    core: Any = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(f'{{"vocab_size": {len(ids)}}}')
    (folder / "prompt.txt").write_text("Question: {question}\n")
    row = '{{"id": "{0}{1}", "question": "q{1}?", "golden_answers": ["Lima"]}}\n'
    for name, count in (("train", 5), ("heldout", 2)):
        lines = [row.format(name, i) for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


@cache
def text() -> Text:
    return Text(str(materials()))


def scratch(name: str) -> Path:
    """A new folder, in memory where the machine has such a file system."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    return Path(tempfile.mkdtemp(prefix=f"simulation-{os.getpid()}-{name}-", dir=memory))


class Records:
    """``scheduler.metrics.Metrics`` without its files: nothing is kept."""

    def __init__(self, run: Path, whole: bool = False):
        self.run, self.newest = run, dict[str, float]()

    def last(self, names: Sequence[str]) -> dict[str, int]:
        return dict.fromkeys(names, 0)

    def look(self) -> bool:
        return True

    def resume(self, frontier: Any, version: int) -> set[int]:
        return set()

    def counters(self, workers: Sequence[Any]) -> dict[str, float]:
        return {}

    def ignore(self, *given: Any) -> None:
        """Nobody reads it."""

    record = event = close = rotate = ignore


class World:
    """One seed's run. ``play`` does everything."""

    def __init__(self, seed: int):
        self.seed, self.plan, self.history = seed, plan(seed), History(seed)
        self.agenda, self.disk, self.cut_off = Agenda(DEADLINE_S, TURNS), Disk(), False
        self.folder = scratch("run")
        rng = random.Random(f"world/{seed}")
        self.network = Network(self.agenda, rng, self.note, self.plan.slow, self.plan.spikes)
        self.rng = rng
        updates = self.plan.settings.questions_per_update, self.plan.checkpoint_every
        self.learner = Learner(self.network, self._rng("learner"), self.folder, *updates)
        self.peers = [*self._workers(), self.learner]
        for peer in self.peers:
            peer.manners, peer.violated = self.plan.manners, self.violated
            peer.faulty = lambda: self.agenda.now < self.plan.healthy_from
            peer.outside = self.plan.outside and isinstance(peer, Judge)
            if isinstance(peer, Actor):
                peer.newest = lambda: self.learner.version
        self.learner.outside = self.plan.alone
        self.lives = 0

    def note(self, kind: str, *rest: Any) -> None:
        self.history.events.append((self.agenda.now, kind, rest))

    def violated(self, *reasons: str) -> None:
        for reason in reasons:
            self.note("VIOLATED", reason)
            self.history.failures.append(reason)

    def _workers(self) -> list[Peer]:
        plan, texts = self.plan, [text().encode(one) for one in TEXTS]
        peers: list[Peer] = []
        for name in (f"actor-{i}" for i in range(plan.actors)):
            process = self.network, self._rng(name), name, ["generate", "load"], plan.capacity
            peers.append(Actor(*process, texts=texts, kv=plan.kv))
        rules, exact = "judge.slate_rules", "judge.exact_match"
        for i, services in enumerate([[rules], [rules, exact], [exact]]):
            peers.append(Judge(self.network, self._rng(f"judge-{i}"), f"judge-{i}", services, 4))
        peers.append(Retriever(self.network, self._rng("retriever"), "retriever", ["retrieve"], 2))
        return peers

    def _rng(self, name: str) -> random.Random:
        return random.Random(f"{name}/{self.seed}")

    def play(self) -> History:
        """Run until the scheduler has written its summary, then check everything."""
        try:
            for strike in self.plan.strikes:
                self.agenda.at(strike.at, lambda strike=strike: self._strike(strike))
            crashes = list(self.plan.crashes)
            while not self._live(crashes.pop(0) if crashes else None):
                self.lives += 1
                if self.lives > MOST_LIVES:
                    raise Stuck(f"the run died {self.lives} times")
                for peer in self.peers:
                    if not peer.outside:
                        peer.die()
                if self.cut_off:
                    self._lose_what_is_not_synced()
                self.agenda.after(1.0 + self.rng.random(), lambda: None)
        except Stuck as stuck:
            if not self.history.failures:
                self.violated(f"the run is stuck: {stuck}")
        else:
            with contextlib.closing(Journal(self.path, readonly=True)) as journal:
                known = self.plan, self.learner.record, self.lives
                self.violated(*invariants.of_the_journal(journal, *known))
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        return self.history

    @property
    def path(self) -> Path:
        return folder(self.folder, self.plan.shard.number) / "journal.sqlite"

    def synced(self, path: Path) -> None:
        """Stands for ``common.atomic.sync``: the disk has what the journal's file and log have."""
        if not path.name.endswith("-wal"):
            return
        with contextlib.closing(sqlite3.connect(self.path)) as db:
            ends = db.execute("SELECT id, status FROM trees WHERE status!='growing'")
            self.disk.ends = dict(ends.fetchall())
            self.disk.owners = dict(
                db.execute("SELECT id, tree FROM groups ORDER BY id").fetchall()
            )
            self.disk.image = db.serialize()

    def _lose_what_is_not_synced(self) -> None:
        self.note("power cut", f"{len(self.disk.ends)} trees are on the disk")
        for end in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + end).unlink(missing_ok=True)
        if self.disk.image:
            self.path.write_bytes(self.disk.image)
        self.cut_off = False

    def _held(self, identity: bytes) -> int | None:
        """The version that the actor with this connection holds, None if it is gone."""
        actors = (peer for peer in self.peers if isinstance(peer, Actor) and peer.alive)
        return next((a.version for a in actors if a.connection.identity == identity), None)

    def _strike(self, strike: Strike) -> None:
        peer = self.learner if strike.peer == LEARNER else self.peers[strike.peer % len(self.peers)]
        if not peer.alive:
            return
        if strike.kind == "freeze":
            peer.freeze(strike.seconds)
        elif strike.kind == "cut":
            self.note("cut", peer.name, f"{strike.seconds:.1f} s")
            self.network.cut(peer.connection, strike.seconds)
        elif isinstance(peer, Learner):
            peer.die()
            raise Killed("a learner's death ends the whole run")  # the launcher resumes it
        else:
            peer.die(restart_after=strike.seconds)

    def _live(self, crash: Crash | None) -> bool:
        """One life of the scheduler. Returns whether the run is over, and not to be resumed."""
        pause, watches = self._rng(f"threads/{self.lives}").random, list[Watch]()
        loop = VirtualLoop(self.agenda, lambda: 0.02 * pause(), lambda: self._at_rest(watches))
        socket = self.network.bind()
        run: scheduling.Run | None = None
        try:
            run = loop.run_until_complete(self._born(socket, watches))
            for peer in self.peers:
                self.agenda.after(self.rng.random() * 3, peer.start)
            if crash is not None:
                self._arm(run, socket, crash)
            loop.run_until_complete(run.main())
            loop.run_until_complete(run.close())
            return True
        except Killed as killed:
            self.note("CRASH", str(killed))
        except Fault as fault:
            self.note("run ended", repr(fault))
            if self.agenda.now > self.plan.healthy_from + 120.0:
                self.violated(f"the run ended although nothing was wrong any more: {fault}")
        except Stuck:
            raise
        except Exception as error:
            # it was killed, and its ``finally`` clauses met the dead socket or journal
            if not socket.alive:
                self.note("CRASH", "while it was unwinding")
                return False
            where = "".join(traceback.format_exception(error)[-3:])
            self.violated(f"the scheduler died of {error!r}: {where}")
            raise Stuck("the scheduler died of a fault of its own") from error
        finally:
            socket.close()
            self._bury(loop, run)
        return False

    def _at_rest(self, watches: list[Watch]) -> None:
        for watch in watches:
            self.violated(*watch.at_rest(self.agenda.now))
        if self.history.failures:
            raise Stuck("an invariant is violated")

    async def _born(self, socket: Any, watches: list[Watch]) -> scheduling.Run:
        p, place = self.plan, materials()
        files = [str(place / f"{name}.jsonl") for name in ("train", "heldout")]
        options = {"prompt": str(place / "prompt.txt")}
        more: dict[str, Any] = {"reward": "reward", "shard": p.shard, "batch": p.batch}
        more["deterministic"] = p.deterministic
        process = SchedulerProcess(
            "scheduler", str(self.folder), self.seed, str(place), "search_qa", options,
            files[0], files[1], p.actors, ["retrieve"], 4, p.settings, **more,
        )  # fmt: skip
        run = scheduling.Run(process, socket, lambda: self.agenda.now)
        run.dispatcher.roster.numbers = itertools.count(1_000_000 * (self.lives + 1))
        self.note("scheduler", f"life {self.lives + 1}")
        records = self.learner, self.disk, self._held
        watches.append(Watch(run, socket, *records, self.violated))
        dismiss = run.dismiss

        async def checked() -> None:
            self.violated(*invariants.at_the_end(run))
            watches.clear()
            await dismiss()

        run.dismiss = checked
        return run

    def _arm(self, run: scheduling.Run, socket: Socket, crash: Crash) -> None:
        left = itertools.count(int(crash.count), -1)

        def kill() -> None:
            socket.close()
            self.cut_off = self.plan.power
            run.journal._write = run.journal._commit = dead  # pyright: ignore
            raise Killed(f"{crash.place} {crash.count:.1f}")

        def dead(*statements: Any) -> None:
            raise JournalError("the scheduler is dead")

        def due() -> None:
            if next(left) == 1:
                kill()

        def hit() -> None:
            if socket.alive and (crash.place == "time" or next(left) == 1):
                kill()

        if crash.place == "time":
            self.agenda.after(crash.count, hit)
        elif crash.place == "send":
            socket.on_send = due
        elif crash.place == "update":
            self.learner.on_update = lambda: self.agenda.after(self.rng.random(), hit)
        else:
            write: Callable[..., None] = run.journal._commit

            def written(*statements: Any) -> None:
                if crash.place == "before commit":
                    due()
                write(*statements)
                if crash.place == "after commit":
                    due()

            run.journal._commit = written  # pyright: ignore

    def _bury(self, loop: VirtualLoop, run: scheduling.Run | None) -> None:
        """End a dead scheduler: nothing that it still does reaches the network or the journal."""
        if run is not None:
            with contextlib.suppress(Exception):
                run.journal._db.rollback()
            run.journal._db.close()
        loop.agenda = Agenda(deadline=-1.0)  # the time of the dead goes no further
        loop.at_rest = lambda: None
        for _ in range(BURIALS):
            tasks = asyncio.all_tasks(loop)
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            with contextlib.suppress(Stuck, Killed):
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


def simulate(seed: int) -> History:
    """Play the run of one seed, without what the scheduler prints, logs and reports."""
    logging.disable(logging.CRITICAL)
    gc.disable()
    world = World(seed)

    def late(*_: object) -> None:
        raise Hung("it computes without an end")

    timers = (signal.SIGPROF, signal.ITIMER_PROF), (signal.SIGALRM, signal.ITIMER_REAL)
    before = [signal.signal(number, late) for number, _ in timers]
    signal.setitimer(signal.ITIMER_PROF, CPU_S, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, REAL_S, REAL_S)
    try:
        with (
            patch.multiple(scheduling, Metrics=Records, Text=lambda *_: text()),
            patch.object(health, "write_whole", lambda path, value: None),
            patch.object(atomic, "sync", world.synced),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            world.play()
    except Hung as hung:
        world.violated(f"the run is stuck: {hung}")
    finally:
        for (number, timer), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0.0)
            signal.signal(number, handler)
        logging.disable(logging.NOTSET)
        gc.enable()
    return world.history
