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
    """Print the first seed that finds each planted fault. Returns 1 if one is not found."""
    missed = 0
    print("| planted fault | like | first seed | what the simulation says |\n|---|---|---|---|")
    for fault in planted.FAULTS:
        finding = planted.first_violation(fault, most)
        missed += finding is None
        seed, words = finding or ("none", "")
        words = words.partition("\n")[0][:110]
        print(f"| {fault.name} | {fault.like} | {seed} | {words} |", flush=True)
    return bool(missed)


def failures(seed: int) -> list[str]:
    return simulate(seed).failures


def many(seeds: range, processes: int) -> bool:
    """Play ``seeds`` in several processes, and return whether one has a violation."""
    start, failed = time.perf_counter(), 0
    with ProcessPoolExecutor(processes, initializer=gc.freeze) as pool:
        for seed, found in zip(seeds, pool.map(failures, seeds, chunksize=20), strict=True):
            if found:
                failed += 1
                print(f"seed {seed}: {found[0][:300]}", flush=True)
    seconds = time.perf_counter() - start
    print(f"{len(seeds)} seeds in {seconds:.1f} s, {failed} with a violated invariant")
    return failed > 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Deterministic simulation of the scheduler.")
    parser.add_argument("seed", type=int, nargs="?", help="replay this seed, print its history")
    parser.add_argument("--seeds", type=int, default=0, help="the number of seeds to play")
    parser.add_argument("--first", type=int, default=0, help="the first of these seeds")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--planted", type=int, default=0, help="seeds to find each planted fault")
    given = parser.parse_args()
    if given.planted:
        return table(given.planted)
    if given.seed is None:
        return many(range(given.first, given.first + given.seeds), given.processes)
    history = simulate(given.seed)
    print("\n".join(history.lines()))
    print(f"seed {history.seed}: " + ("; ".join(history.failures) or "every invariant holds"))
    return bool(history.failures)


if __name__ == "__main__":
    sys.exit(main())
