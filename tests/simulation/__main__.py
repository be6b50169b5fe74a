"""``python -m tests.simulation SEED`` prints the history of a seed; ``--seeds 5000 [--first N]`` plays many; ``--planted 500`` finds the planted
faults."""

import argparse
import gc
import sys
import time

from tests.simulation import planted
from tests.simulation.world import simulate


def table(most: int) -> int:
    """Print the table of docs/reliability.md: each planted fault with the first seed that finds it. Returns 1 if one is not found."""
    missed = 0
    print("| planted fault | like | first seed | what the simulation says |\n|---|---|---|---|")
    for fault in planted.FAULTS:
        finding = planted.first_violation(fault, most)
        missed += finding is None
        seed, words = finding or ("none", "")
        print(f"| {fault.name} | {fault.like} | {seed} | {words.splitlines()[0][:110] if words else ''} |", flush=True)
    return bool(missed)


def main() -> int:
    """Returns 1 if an invariant was violated."""
    parser = argparse.ArgumentParser(description="Deterministic simulation of the scheduler.")
    parser.add_argument("seed", type=int, nargs="?", help="the seed to replay; its history is printed")
    parser.add_argument("--seeds", type=int, default=0, help="how many seeds to play")
    parser.add_argument("--first", type=int, default=0, help="the first of these seeds")
    parser.add_argument("--planted", type=int, default=0, help="find every planted fault within so many seeds")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        history = simulate(arguments.seed)
        print("\n".join(history.lines()))
        print(f"seed {history.seed}: " + ("; ".join(history.failures) or "every invariant holds"))
        return bool(history.failures)
    if arguments.planted:
        return table(arguments.planted)
    simulate(0)  # everything is imported
    gc.freeze()
    start, used, failed = time.perf_counter(), time.process_time(), 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        history = simulate(seed)
        if history.failures:
            failed += 1
            print(f"seed {seed}: {history.failures[0][:300]}", flush=True)
    seconds, processor = time.perf_counter() - start, time.process_time() - used
    print(
        f"{arguments.seeds} seeds in {seconds:.1f} s, of which {processor:.1f} s on the processor"
        f" ({arguments.seeds / max(processor, 1e-9):.0f} seeds per second of it), {failed} with a violated invariant"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
