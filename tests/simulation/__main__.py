"""``python -m tests.simulation SEED`` prints the history of a seed; ``--seeds 5000 [--first N]``
plays many; ``--planted 500`` finds the planted faults."""

import argparse
import gc
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tests.simulation import planted
from tests.simulation.world import simulate


def table(most: int) -> int:
    """Print the table of docs/reliability.md: each planted fault with the first seed that finds it.
    Returns 1 if one is not found."""
    missed = 0
    print("| planted fault | like | first seed | what the simulation says |\n|---|---|---|---|")
    for fault in planted.FAULTS:
        finding = planted.first_violation(fault, most)
        missed += finding is None
        seed, words = finding or ("none", "")
        words = words.partition("\n")[0][:110]
        print(f"| {fault.name} | {fault.like} | {seed} | {words} |", flush=True)
    return bool(missed)


def ready() -> None:
    """Import everything by playing a seed, and spare what is imported the collections of the seeds
    to come."""
    simulate(0)
    gc.freeze()


def failures(seed: int) -> list[str]:
    """The violated invariants of a seed."""
    return simulate(seed).failures


def many(seeds: range, processes: int) -> int:
    """Play ``seeds`` in several processes. Returns the number of seeds with a violation."""
    start, failed = time.perf_counter(), 0
    with ProcessPoolExecutor(processes, initializer=ready) as pool:
        for seed, found in zip(seeds, pool.map(failures, seeds, chunksize=20), strict=True):
            if found:
                failed += 1
                print(f"seed {seed}: {found[0][:300]}", flush=True)
    seconds, used = time.perf_counter() - start, os.times()
    processor = used.children_user + used.children_system
    rate = f"{len(seeds) / max(processor, 1e-9):.0f} seeds per second of processor time"
    print(f"{len(seeds)} seeds in {seconds:.1f} s ({rate}), {failed} with a violated invariant")
    return failed


def main() -> int:
    """Returns 1 if an invariant was violated."""
    parser = argparse.ArgumentParser(description="Deterministic simulation of the scheduler.")
    parser.add_argument("seed", type=int, nargs="?", help="replay this seed, print its history")
    parser.add_argument("--seeds", type=int, default=0, help="the number of seeds to play")
    parser.add_argument("--first", type=int, default=0, help="the first of these seeds")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--planted", type=int, default=0, help="seeds to find each planted fault")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        history = simulate(arguments.seed)
        print("\n".join(history.lines()))
        print(f"seed {history.seed}: " + ("; ".join(history.failures) or "every invariant holds"))
        return bool(history.failures)
    if arguments.planted:
        return table(arguments.planted)
    first = arguments.first
    return bool(many(range(first, first + arguments.seeds), arguments.processes))


if __name__ == "__main__":
    sys.exit(main())
