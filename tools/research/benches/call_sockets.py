"""The scheduler's processor time for a call and its loop's lag over real sockets, from one worker to 10,000 and from 64 callers to 100,000.

The peers are raw sockets of other processes that answer at once; every caller has one call open, without an end, so the loop is always full and a lag is
one turn of the loop. What heartbeats take without any call is measured before and subtracted, because it grows with the workers and not with the calls. The thread
of the event loop is measured alone, too: the rest is ZeroMQ's, which reads and writes many messages of one connection at once, and of many connections each alone.
"""

import asyncio
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from scheduler.dispatch import Dispatcher
from scheduler.fleet import Fleet
from scheduler.survivors import sparing
from tools.research.benches.call_cost import Callers
from tools.research.benches.call_lag import percentiles, served, watch
from tools.research.benches.overhead import SERVICE
from wire import loop
from wire.numbers import Count, Positive
from wire.process import many_files

SIZES = {
    "1/64": (1, 64, 64),
    "16/64": (16, 4, 64),
    "256/512": (256, 4, 512),
    "1024/2048": (1024, 4, 2048),
    "10000/64": (10_000, 4, 64),
    "10000/20000": (10_000, 4, 20_000),
    "16/1000": (16, 4, 1000),
    "16/10000": (16, 4, 10_000),
    "16/100000": (16, 4, 100_000),
    "1024/100000": (1024, 4, 100_000),
    "10000/100000": (10_000, 4, 100_000),
}
"""Workers, calls that each takes at once, callers."""
KINDS = {"": (False, False), "place": (True, False), "journal": (False, True)}
"""Whether calls have a place, and whether each answer is written to a journal."""


class _Writing(Callers):
    """Callers that write each answer."""

    def __init__(self, dispatcher: Dispatcher, fleet: Fleet | None, write: Callable[[], None]):
        super().__init__(dispatcher, fleet)
        self.write = write

    def answered(self) -> None:
        """Count an answer and write it."""
        super().answered()
        self.write()


def _spent() -> np.ndarray:
    """The seconds that have passed, and the processor time of this process and of this thread."""
    return np.array([time.perf_counter(), time.process_time(), time.thread_time()])


async def measure(
    workers: int, capacity: int, callers: int, placed: bool, journaled: bool, seconds: float
) -> dict[str, float]:
    """Return microseconds of a call in the process and in the loop's thread, the lag's percentiles in milliseconds, calls a second and the share of a core that heartbeats take."""
    async with served("generate" if placed else SERVICE, workers, capacity, journaled) as (dispatcher, write):
        gc.collect()
        began = _spent()
        await asyncio.sleep(min(4.0, seconds))
        wall, *idle = _spent() - began
        idle = np.array(idle) / wall
        calling = _Writing(dispatcher, Fleet() if placed else None, write)
        tasks = [asyncio.create_task(calling.call()) for _ in range(callers)]
        while calling.done < callers / 2:  # all have begun
            await asyncio.sleep(0.05)
        lags = list[float]()
        tasks.append(asyncio.create_task(watch(lags)))
        before, began = calling.done, _spent()
        await asyncio.sleep(seconds)
        done, (passed, *spent) = calling.done - before, _spent() - began
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    process, thread = 1e6 * (np.array(spent) - idle * passed) / max(done, 1)
    told = {"us": process, "loop_us": thread, "calls_s": done / passed, "heartbeats": idle[0]} | percentiles(lags)
    return {name: float(value) for name, value in told.items()}


def run(seconds: Positive = 4.0, rounds: Count = 3, sizes: tuple[str, ...] = tuple(SIZES)) -> dict[str, Any]:
    """Return the largest ratio of a call's cost in the loop's thread to that of the first of ``sizes``, over calls with a place, without one, and with a journal. Medians of rounds
    that alternate; each row is printed."""
    if unknown := set(sizes) - set(SIZES):
        raise ValueError(f"sizes = {sorted(unknown)}: expected of {list(SIZES)}")
    many_files()
    rows: dict[tuple[str, str], list[dict[str, float]]] = {(size, kind): [] for size in sizes for kind in KINDS}
    for _ in range(rounds):
        for (size, kind), measured in rows.items():
            with sparing():
                measured.append(loop.run(measure(*SIZES[size], *KINDS[kind], seconds)))
    table = {
        key: {name: statistics.median(one[name] for one in measured) for name in measured[0]}
        for key, measured in rows.items()
    }
    print(
        "| workers/callers | | us a call | of it the loop | lag p50, ms | p99 | calls a second | heartbeats, share of a core |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (size, kind), row in table.items():
        cells = f"{row['us']:.0f} | {row['loop_us']:.0f} | {row['lag_p50']:.1f} | {row['lag_p99']:.1f} | {row['calls_s']:.0f} | {row['heartbeats']:.3f}"
        print(f"| {size} | {kind} | {cells} |")
    ratio = max(row["loop_us"] / table[sizes[0], kind]["loop_us"] for (_, kind), row in table.items())
    return {
        "name": "the loop's time for a call over sockets, the dearest size / one worker",
        "ratio": ratio,
        "goal": 1.5,
        "better": "lower",
        "rows": {f"{size} {kind}".strip(): row for (size, kind), row in table.items()},
    }
