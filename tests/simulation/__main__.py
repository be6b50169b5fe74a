"""``python -m tests.simulation SEED`` prints the history of a seed; ``python -m tests.simulation --seeds 5000 [--first N]`` plays many."""

import argparse
import gc
import sys
import time

from tests.simulation.world import simulate


def main() -> int:
    """Returns 1 if an invariant was violated."""
    parser = argparse.ArgumentParser(description="Deterministic simulation of the scheduler.")
    parser.add_argument("seed", type=int, nargs="?", help="the seed to replay; its history is printed")
    parser.add_argument("--seeds", type=int, default=0, help="how many seeds to play")
    parser.add_argument("--first", type=int, default=0, help="the first of these seeds")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        history = simulate(arguments.seed)
        print("\n".join(history.lines()))
        print(f"seed {history.seed}: " + ("; ".join(history.failures) or "every invariant holds"))
        return bool(history.failures)
    simulate(0)  # everything is imported
    gc.freeze()
    start, failed = time.perf_counter(), 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        history = simulate(seed)
        if history.failures:
            failed += 1
            print(f"seed {seed}: {history.failures[0][:300]}", flush=True)
    seconds = time.perf_counter() - start
    rate = arguments.seeds / max(seconds, 1e-9)
    print(f"{arguments.seeds} seeds in {seconds:.1f} s ({rate:.0f} a second), {failed} with a violated invariant")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
