"""The exact probability of a mine in every hidden cell of a Minesweeper board, given what the
player sees (methods.md 3.4).

All layouts that fit the numbers are equally likely. Cells beside the same numbers form a group, of
which only the count of mines matters. Groups that are not connected through numbers form separate
components. Each component is solved by dynamic programming over its groups: a state says how many
mines each number still lacks (one integer with four bits per number), and its value is a polynomial
whose coefficient m counts the layouts so far with m mines (one integer with coefficients of fixed
width). A final sum over all components weights the counts with C(free cells, remaining mines).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import comb

import msgspec

from coppice.actors.environments.minesweeper.environment import neighbours

BUDGET = 50_000
"""The most nodes of a position; a node is a state and a count of mines tried in it (methods.md
3.4). 30x16 takes under half a second."""
_SLOT = 4
"""The bits of a state for each number: a number lacks at most 8 mines."""
_GRAIN = 840 * 840
"""A multiple of the denominator of every fallback estimate, which is a mean of at most 8 ratios
with denominators of at most 8."""


Near = tuple[int, ...]
"""The numbers beside a group of cells, by which the group is known."""


class Posterior(msgspec.Struct, frozen=True):
    """For each hidden cell, ascending, ``mined[cell] / layouts`` is the probability of a mine.

    layouts: the number of layouts that fit, or a multiple. exact: whether the budget was enough.
    """

    mined: dict[int, int]
    layouts: int
    exact: bool
    nodes: int

    def risks(self) -> dict[int, float]:
        """Return the probabilities, correctly rounded. ``certain`` says without rounding whether a
        mine is certain."""
        return {cell: count / self.layouts for cell, count in self.mined.items()}

    def certain(self, cell: int) -> bool:
        """Return whether ``cell`` has a mine in every layout."""
        return self.mined[cell] == self.layouts


class _Component(msgspec.Struct, frozen=True):
    """groups: the cells of each group by the numbers beside it, in the order of counting. lacks:
    the mines that each number lacks."""

    groups: dict[Near, list[int]]
    lacks: dict[int, int]


class _Counts(msgspec.Struct, frozen=True):
    """layouts[m]: the layouts of a component with m mines. mined[group][m]: the mines in the group,
    summed over those layouts."""

    layouts: dict[int, int]
    mined: list[dict[int, int]]
    nodes: int


def posterior(
    rows: int, columns: int, mines: int, numbers: Mapping[int, int], budget: int = BUDGET
) -> Posterior:
    """Return the probability of a mine in every cell that is not in ``numbers``. numbers: the
    revealed cells with their numbers.

    If the rest of the budget is not enough for a component, its cells get an estimate: the mean,
    over the numbers beside a cell, of lacking mines / hidden cells beside the number. The other
    components treat these cells as if no number stood beside them, so that certain cells stay
    certain. Raises ValueError when no layout fits.
    """
    hidden = [cell for cell in range(rows * columns) if cell not in numbers]
    settled, limits = _deduced(rows, columns, numbers)
    solved: list[tuple[_Component, _Counts]] = []
    skipped: list[_Component] = []
    nodes = 0
    for component in sorted(_components(limits), key=lambda c: len(c.groups)):
        counts = _count(component, budget - nodes)
        if counts is None:
            skipped.append(component)
            # the rest is skipped too, because every later component has at least as many groups
            nodes = budget
        else:
            solved.append((component, counts))
            nodes += counts.nodes
    counted = {
        cell for component, _ in solved for group in component.groups.values() for cell in group
    }
    free = [cell for cell in hidden if cell not in settled and cell not in counted]
    left = mines - sum(settled.values())
    parts = [counts.layouts for _, counts in solved]
    layouts, weights, free_mined = _combined(parts, len(free), left)
    if not layouts:
        raise ValueError(
            f"no layout of {mines} mines on {rows}x{columns} fits the numbers {dict(numbers)}"
        )
    mined = {cell: layouts if mine else 0 for cell, mine in settled.items()}
    mined |= dict.fromkeys(free, free_mined)
    for (component, counts), weight in zip(solved, weights, strict=True):
        for group, sums in zip(component.groups.values(), counts.mined, strict=True):
            total = sum(count * weight.get(m, 0) for m, count in sums.items())
            mined |= dict.fromkeys(group, total // len(group))
    if skipped:
        layouts *= _GRAIN
        mined = {cell: count * _GRAIN for cell, count in mined.items()}
        for component in skipped:
            mined |= _estimated(component, layouts)
    return Posterior({cell: mined[cell] for cell in hidden}, layouts, not skipped, nodes)


def _deduced(
    rows: int, columns: int, numbers: Mapping[int, int]
) -> tuple[dict[int, int], dict[frozenset[int], int]]:
    """Return the cells that single numbers (such as 0) prove, 1 for a mine, and the sets of the
    other cells with their numbers of mines."""
    near = neighbours(rows, columns)
    cells = [{other for other in near[cell] if other not in numbers} for cell in numbers]
    lacks = list(numbers.values())
    numbers_at: dict[int, list[int]] = defaultdict(list)
    for i, around in enumerate(cells):
        for cell in around:
            numbers_at[cell].append(i)
    settled: dict[int, int] = {}
    waiting = list(range(len(cells)))
    while waiting:
        i = waiting.pop()
        if not 0 <= lacks[i] <= len(cells[i]):
            cell, number = list(numbers.items())[i]
            raise ValueError(f"cell {cell} shows {number}: the cells around it do not fit")
        if lacks[i] in (0, len(cells[i])):
            mine = int(lacks[i] > 0)
            for cell in list(cells[i]):
                settled[cell] = mine
                for j in numbers_at[cell]:
                    cells[j].remove(cell)
                    lacks[j] -= mine
                waiting += numbers_at[cell]
    limits: dict[frozenset[int], int] = {}
    for around, lack in zip(cells, lacks, strict=True):
        if around and limits.setdefault(frozenset(around), lack) != lack:
            raise ValueError(f"the numbers disagree on the mines in the cells {sorted(around)}")
    return settled, limits


def _components(limits: Mapping[frozenset[int], int]) -> list[_Component]:
    """Return the components of the cells. The groups of each stand in breadth-first order from an
    end of the component, so that few numbers are open at once while they are counted."""
    numbers_at: dict[int, list[int]] = defaultdict(list)
    for i, around in enumerate(limits):
        for cell in around:
            numbers_at[cell].append(i)
    groups: dict[Near, list[int]] = defaultdict(list)
    for cell in sorted(numbers_at):
        groups[tuple(numbers_at[cell])].append(cell)
    touching: dict[int, set[Near]] = defaultdict(set)
    for near in groups:
        for i in near:
            touching[i].add(near)

    def reached(start: Near) -> list[Near]:
        order, seen = [start], {start}
        for near in order:
            new = set[Near]().union(*(touching[i] for i in near)) - seen
            seen |= new
            order += sorted(new)
        return order

    lacks, components, rest = list(limits.values()), list[_Component](), dict.fromkeys(groups)
    while rest:
        order = reached(next(iter(rest)))
        for _ in range(2):
            order = reached(order[-1])  # the last group reached is at an end
        inside = {i: lacks[i] for near in order for i in near}
        components.append(_Component({near: groups[near] for near in order}, inside))
        rest = {near: None for near in rest if near not in components[-1].groups}
    return components


def _count(component: _Component, budget: int) -> _Counts | None:
    """Count the layouts of a component. Return None when this takes more than ``budget`` nodes."""
    cells = sum(map(len, component.groups.values()))
    width = cells + cells.bit_length() + 1  # because a coefficient is at most cells * 2^cells
    slots = {i: _SLOT * place for place, i in enumerate(component.lacks)}
    full = (1 << _SLOT) - 1
    later = dict.fromkeys(component.lacks, 0)
    steps: list[tuple[int, int, list[tuple[int, int]]]] = []
    for near, group in reversed(component.groups.items()):
        taken = sum(1 << slots[i] for i in near)
        steps.insert(0, (len(group), taken, [(slots[i], later[i]) for i in near]))
        for i in near:
            later[i] += len(group)

    def choices(state: int, size: int, numbers: list[tuple[int, int]]) -> range:
        """Return the numbers of mines that the group may have, given the cells left for later."""
        lacks = [(state >> slot) & full for slot, _ in numbers]
        least = max(lack - room for lack, (_, room) in zip(lacks, numbers, strict=True))
        return range(max(0, least), min(size, *lacks) + 1)

    layer = {sum(lack << slots[i] for i, lack in component.lacks.items()): 1}
    layers: list[dict[int, int]] = []
    nodes = 0
    for size, taken, numbers in steps:
        layers.append(layer)
        layer = defaultdict[int, int](int)
        for state, ways in layers[-1].items():
            counts = choices(state, size, numbers)
            nodes += max(len(counts), 1)
            if nodes > budget:
                return None
            for count in counts:
                layer[state - count * taken] += (comb(size, count) * ways) << (count * width)
    onward = dict.fromkeys(layer, 1)  # the ways to go on from each state
    mined: list[dict[int, int]] = []
    for (size, taken, numbers), before in zip(reversed(steps), reversed(layers), strict=True):
        total, earlier = 0, dict[int, int]()
        for state, ways in before.items():
            rests = [
                (count, (comb(size, count) * rest) << (count * width))
                for count in choices(state, size, numbers)
                if (rest := onward.get(state - count * taken, 0))
            ]
            earlier[state] = sum(rest for _, rest in rests)
            total += ways * sum(count * rest for count, rest in rests)
        mined.append(_coefficients(total, width))
        onward = earlier
    return _Counts(_coefficients(sum(layer.values()), width), mined[::-1], nodes)


def _coefficients(polynomial: int, width: int) -> dict[int, int]:
    """Return the coefficients above 0 by power."""
    full, coefficients, power = (1 << width) - 1, {}, 0
    while polynomial:
        if polynomial & full:
            coefficients[power] = polynomial & full
        polynomial >>= width
        power += 1
    return coefficients


def _combined(
    parts: Sequence[Mapping[int, int]], free: int, mines: int
) -> tuple[int, list[dict[int, int]], int]:
    """Return the number of layouts of all components and the ``free`` cells with ``mines`` mines in
    total.

    Also return, for each component and each m, the layouts of everything else when the component
    has m mines, and the layouts in which a certain free cell has a mine."""

    def product(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
        """Return the layouts of two parts together, by their mines."""
        sums: dict[int, int] = defaultdict(int)
        for m, ways in one.items():
            for n, more in other.items():
                if m + n <= mines:
                    sums[m + n] += ways * more
        return sums

    before: list[dict[int, int]] = [{0: 1}]
    for part in parts:
        before.append(product(before[-1], part))
    behind = {m: comb(free, m) for m in range(mines + 1)}
    in_free = {m: comb(free - 1, m - 1) for m in range(1, mines + 1)} if free else {}
    layouts, free_mined = (product(before[-1], one).get(mines, 0) for one in (behind, in_free))
    weights: list[dict[int, int]] = []
    for part, earlier in zip(reversed(parts), reversed(before[:-1]), strict=True):
        others = product(earlier, behind)
        weights.append({m: others.get(mines - m, 0) for m in part})
        behind = product(behind, part)
    return layouts, weights[::-1], free_mined


def _estimated(component: _Component, layouts: int) -> dict[int, int]:
    """Return for each cell of a component that was not counted the mean of lacking mines / cells
    beside, times ``layouts``."""
    cells: dict[int, int] = defaultdict(int)
    for near, group in component.groups.items():
        for i in near:
            cells[i] += len(group)
    mined: dict[int, int] = {}
    for near, group in component.groups.items():
        total = sum(layouts * component.lacks[i] // cells[i] for i in near)
        mined |= dict.fromkeys(group, total // len(near))
    return mined
