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


def table(most: int, processes: int) -> bool:
    """Print the first seed that finds each planted fault, and return whether one is not found."""
    missed, faults = 0, planted.FAULTS
    print("| planted fault | first seed | what the simulation says |\n|---|---|---|")
    with ProcessPoolExecutor(processes) as pool:
        findings = pool.map(finding, range(len(faults)), [most] * len(faults))
        for fault, (seed, words) in zip(faults, findings, strict=True):
            missed += not words
            print(f"| {fault.name} | {seed} | {words[:110].strip()} |", flush=True)
    return missed > 0


def finding(fault: int, most: int) -> tuple[int | str, str]:
    return planted.first_violation(planted.FAULTS[fault], most) or ("none", "")


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
        return table(given.planted, given.processes)
    if given.seed is None:
        return many(range(given.first, given.first + given.seeds), given.processes)
    history = simulate(given.seed)
    print("\n".join(history.lines()))
    print(f"seed {history.seed}: " + ("; ".join(history.failures) or "every invariant holds"))
    return bool(history.failures)


if __name__ == "__main__":
    sys.exit(main())
