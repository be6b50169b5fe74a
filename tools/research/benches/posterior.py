"""Minesweeper's exact posterior against the enumeration of every layout of the hidden cells on the same positions, and its cost by board size.

The positions come from the posterior's own play, which reveals one hidden cell of least risk per turn and breaks ties at random. CPU
seconds are measured. The ratio is that of 6x6 with 5 mines: smaller boards have few layouts, larger boards far too many.
"""

import random
import time
from collections.abc import Mapping
from itertools import combinations
from statistics import mean
from typing import Any

from actors.environments.minesweeper import HIDDEN, HIT, REVEAL, ZERO, Minesweeper, State, neighbours, played, solved
from judges.oracles.posterior import Posterior, posterior

ENUMERATED = {(4, 4, 3): 300, (5, 5, 5): 300, (6, 6, 5): 300, (6, 6, 8): 40}
"""The number of positions by rows, columns and mines, few enough that the enumeration takes seconds."""
SIZES = {(5, 5, 5): 400, (8, 8, 10): 400, (16, 16, 40): 400, (16, 30, 99): 400}
GOAL = 2.0


def numbers_of(state: State) -> dict[int, int]:
    """Return the revealed cells with their numbers."""
    return {cell: 0 if mark == ZERO else int(mark) for cell, mark in enumerate(state.board) if mark != HIDDEN}


def played_positions(size: tuple[int, int, int], count: int) -> list[tuple[State, Posterior, float]]:
    """Return at least ``count`` positions of whole games, each with its posterior and the posterior's CPU seconds."""
    rows, columns, mines = size
    game, rng = Minesweeper(rows=rows, columns=columns, mines=mines), random.Random(0)
    positions: list[tuple[State, Posterior, float]] = []
    seed = 0
    while len(positions) < count:
        state = game.initial(game.task(seed))
        seed += 1
        while not solved(state) and HIT not in state.board:
            start = time.process_time()
            exact = posterior(rows, columns, mines, numbers_of(state))
            positions.append((state, exact, time.process_time() - start))
            least = min(exact.mined.values())
            cell = rng.choice([cell for cell, mined in exact.mined.items() if mined == least])
            state = played(state, (REVEAL, *divmod(cell, columns)))
    return positions


def enumerated(rows: int, columns: int, mines: int, numbers: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Try every layout of the hidden cells. Return for each cell the fitting layouts with a mine in it, and all fitting layouts."""
    hidden = [cell for cell in range(rows * columns) if cell not in numbers]
    near = neighbours(rows, columns)
    checks = [(number, {cell for cell in near[at] if cell not in numbers}) for at, number in numbers.items()]
    mined, layouts = dict.fromkeys(hidden, 0), 0
    for layout in combinations(hidden, mines):
        if all(len(around.intersection(layout)) == number for number, around in checks):
            layouts += 1
            for cell in layout:
                mined[cell] += 1
    return mined, layouts


def against_enumeration(size: tuple[int, int, int], count: int) -> dict[str, Any]:
    """Return the CPU ms of both, the ratio of their sums, and the number of positions in which they disagree on a probability."""
    ours, theirs, disagreements = list[float](), list[float](), 0
    for state, exact, spent in random.Random(1).sample(played_positions(size, count), count):
        start = time.process_time()
        mined, layouts = enumerated(*size, numbers_of(state))
        theirs.append(1000 * (time.process_time() - start))
        ours.append(1000 * spent)
        disagreements += any(part * layouts != mined[cell] * exact.layouts for cell, part in exact.mined.items())
    result = {"positions": count, "ratio": sum(theirs) / sum(ours), "disagreements": disagreements}
    result |= {"mean_ms": mean(ours), "max_ms": max(ours)}
    return result | {"enumeration_mean_ms": mean(theirs), "enumeration_max_ms": max(theirs)}


def cost(size: tuple[int, int, int], count: int) -> dict[str, Any]:
    """Return the CPU ms per position, and the share of positions that were not solved exactly."""
    positions = played_positions(size, count)
    spent = sorted(1000 * seconds for _, _, seconds in positions)
    return {
        "positions": len(spent),
        "mean_ms": mean(spent),
        "p99_ms": spent[int(0.99 * (len(spent) - 1))],
        "max_ms": spent[-1],
        "most_nodes": max(exact.nodes for _, exact, _ in positions),
        "inexact": mean(not exact.exact for _, exact, _ in positions),
    }


def run(share: float = 1.0) -> dict[str, Any]:
    """Run the benchmark. share: the share of the positions to use, with at least two positions per board."""
    compared = {_name(s): against_enumeration(s, max(2, int(share * n))) for s, n in ENUMERATED.items()}
    grown = {_name(s): cost(s, max(2, int(share * n))) for s, n in SIZES.items()}
    row = {"name": "Minesweeper posterior: enumeration / ours, CPU s, 6x6/5", "ratio": compared["6x6/5"]["ratio"]}
    return row | {"goal": GOAL, "better": "higher", "enumeration": compared, "boards": grown}


def _name(size: tuple[int, int, int]) -> str:
    return f"{size[0]}x{size[1]}/{size[2]}"
