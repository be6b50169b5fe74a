"""Which faults strike, where and in which order, as a seed decides."""

import random
from collections.abc import Collection, Iterable, Iterator

import msgspec

from coppice.common.shards import called

ACTORS = ("actor-0", "actor-1")
WORKERS = ("judges", "retriever", *ACTORS, "learner-0")
"""The processes that answer the scheduler's requests."""
PROCESSES = ("scheduler", *WORKERS, "learner-1")
EVERYWHERE = (*PROCESSES, "launcher")
OF_EACH = ("scheduler", "judges", "retriever")
"""The processes that every scheduler of a run has of its own."""
ALL = "schedulers"
"""The place of a fault that strikes all schedulers of a run at once."""
WRITERS = ("scheduler", "learner-0", "learner-1")


class Kind(msgspec.Struct, frozen=True):
    """share: of 100 faults. starts: whether processes start again after it."""

    share: int
    places: tuple[str, ...]
    text: str
    starts: bool = False


_ANSWERING = ("judges", "retriever", *ACTORS)
_SENDING = ("scheduler", *WORKERS)
KINDS: dict[str, Kind] = {
    "kill": Kind(4, EVERYWHERE, "SIGKILL", True),
    "exit": Kind(3, EVERYWHERE, "the process ends with status 1; the launcher by SIGTERM", True),
    "stop": Kind(2, PROCESSES, "SIGSTOP for ever", True),
    "hang": Kind(2, EVERYWHERE, "no thread runs any more (the launcher: for 5 s)", True),
    "diverge": Kind(1, ("learner-0", "learner-1"), "a gradient is NaN", True),
    "part": Kind(1, ("learner-1",), "the ranks lose their connections to each other", True),
    "full": Kind(1, ("disk",), "the disk is full for a moment", True),
    "read-only": Kind(1, ("disk",), "the run is resumed on a read-only disk", True),
    "unwritable": Kind(2, WRITERS, "no file can be written by the process", True),
    "journal": Kind(2, ("disk",), "all is killed, and a file of the journal cut short", True),
    "checkpoint": Kind(2, ("disk",), "all is killed, and the newest checkpoint damaged", True),
    "pause": Kind(7, EVERYWHERE, "SIGSTOP for a second"),
    "slow": Kind(7, EVERYWHERE, "for two seconds the process runs a sixth of the time"),
    "clock": Kind(6, EVERYWHERE, "the process's date jumps by up to 30 days"),
    "cut": Kind(10, _SENDING, "its TCP connections are shut down"),
    "lose": Kind(8, _SENDING, "its next message is lost"),
    "twice": Kind(8, _SENDING, "its next message is sent twice"),
    "reorder": Kind(8, _SENDING, "its next two messages to one peer change places"),
    "wrong": Kind(8, _ANSWERING, "an answer has too few parts, or parts that cannot be"),
    "stray": Kind(5, WORKERS, "an answer goes to a request that was never made"),
    "nan": Kind(5, _ANSWERING, "an answer has NaN for a number"),
    "huge": Kind(3, _ANSWERING, "an answer is longer than anything that is allowed"),
    "unloaded": Kind(4, ACTORS, "new weights are lost, or not taken though the answer says so"),
}


class Fault(msgspec.Struct, frozen=True):
    """variant: a number that decides what a kind leaves open."""

    number: int
    kind: str
    place: str
    variant: int


def places(of_one: Iterable[str], schedulers: int) -> tuple[str, ...]:
    """Return the places of a run with several schedulers. of_one: those of a run with one."""
    counts = {name: schedulers if name in OF_EACH else 1 for name in of_one}
    return tuple(called(name, n) for name, count in counts.items() for n in range(count))


def _struck(kind: str, schedulers: int) -> tuple[str, ...]:
    all_at_once = (ALL,) if schedulers > 1 and kind in ("kill", "stop", "pause") else ()
    return places(KINDS[kind].places, schedulers) + all_at_once


def plan(
    seed: int, count: int, kinds: Collection[str] = KINDS.keys(), schedulers: int = 1
) -> list[Fault]:
    rng = random.Random(seed)
    places = {kind: _turns(_struck(kind, schedulers), rng) for kind in sorted(kinds)}
    faults: list[Fault] = []
    while len(faults) < count:
        deck = [kind for kind in sorted(kinds) for _ in range(KINDS[kind].share)]
        rng.shuffle(deck)
        for kind in deck:
            place = next(places[kind])
            faults.append(Fault(len(faults) + 1, kind, place, rng.getrandbits(30)))
    return faults[:count]


def _turns(places: tuple[str, ...], rng: random.Random) -> Iterator[str]:
    while True:
        yield from rng.sample(places, len(places))
