"""The exact probability of a mine in every hidden cell of a Minesweeper board, from what the player sees (methods.md 3.4).

All layouts that fit the numbers are equally likely. Cells that lie beside the same numbers are alike and form a group of which only
the count of mines matters; groups that share no number, not even through others, form separate components. Each component is solved by
dynamic programming over its groups: a state is what the numbers still lack, its value a polynomial whose coefficient m counts the
layouts so far with m mines. A last sum over all components weights the counts with C(free cells, remaining mines). Everything is an
integer.

Two packings make this fast. A polynomial is one integer of fixed-width coefficients, so that adding and multiplying polynomials is
adding and multiplying integers. A state is one integer of four bits a number.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import comb

import msgspec

from actors.environments.minesweeper import neighbours

BUDGET = 50_000
"""Nodes of a position, one node a state and a count of mines tried in it (methods.md 3.4); less than half a second on 30x16."""
_SLOT = 4
"""Bits of a number's lack in a state: it is at most 8."""
_GRAIN = 840 * 840
"""Divides into every estimate of the fallback: a mean of at most 8 ratios whose denominators are at most 8."""


class Contradiction(ValueError):
    """No layout fits the numbers."""


class Posterior(msgspec.Struct, frozen=True):
    """``mined[cell] / layouts`` is the probability of a mine in each hidden cell, ascending.

    layouts: how many layouts fit, or a multiple of it. exact: the budget was enough for all components.
    """

    mined: dict[int, int]
    layouts: int
    exact: bool
    nodes: int

    def risks(self) -> dict[int, float]:
        """The probabilities, correctly rounded; whether a mine is certain is what ``certain`` says, without rounding."""
        return {cell: count / self.layouts for cell, count in self.mined.items()}

    def certain(self, cell: int) -> bool:
        """Is there a mine in ``cell`` in every layout?"""
        return self.mined[cell] == self.layouts


class _Component(msgspec.Struct, frozen=True):
    """groups: their cells. near: by group, the numbers beside it. lacks: mines that each number lacks."""

    groups: list[list[int]]
    near: list[tuple[int, ...]]
    lacks: dict[int, int]


class _Counts(msgspec.Struct, frozen=True):
    """layouts[m]: layouts of a component with m mines. mined[group][m]: mines in the group, summed over those layouts."""

    layouts: dict[int, int]
    mined: list[dict[int, int]]
    nodes: int


def posterior(rows: int, columns: int, mines: int, numbers: Mapping[int, int], budget: int = BUDGET) -> Posterior:
    """The probability of a mine in every cell that is not in ``numbers``, the revealed cells with their numbers.

    A component for which the rest of the budget is not enough falls back on single numbers: the risk of a cell is the mean over the
    numbers beside it of lacking mines / cells beside. For all others its cells are as if no number stood beside them, so
    that what is certain there stays certain. Raises Contradiction when no layout fits.
    """
    hidden = [cell for cell in range(rows * columns) if cell not in numbers]
    known, limits = _deduced(rows, columns, numbers)
    solved: list[tuple[_Component, _Counts]] = []
    skipped: list[_Component] = []
    nodes = 0
    for component in sorted(_components(limits), key=lambda c: len(c.groups)):
        counts = _count(component, budget - nodes)
        if counts is None:
            skipped.append(component)
            nodes = budget  # spent; every component after it has as many groups or more
        else:
            solved.append((component, counts))
            nodes += counts.nodes
    inside = {cell for component, _ in solved for group in component.groups for cell in group}
    free = [cell for cell in hidden if cell not in known and cell not in inside]
    left = mines - sum(known.values())
    layouts, weights, free_mined = _combined([counts.layouts for _, counts in solved], len(free), left)
    if not layouts:
        raise Contradiction(f"no layout of {mines} mines on {rows}x{columns} fits the numbers {dict(numbers)}")
    mined = {cell: layouts if mine else 0 for cell, mine in known.items()}
    mined |= dict.fromkeys(free, free_mined)
    for (component, counts), weight in zip(solved, weights, strict=True):
        for group, sums in zip(component.groups, counts.mined, strict=True):
            total = sum(count * weight.get(m, 0) for m, count in sums.items())
            mined |= dict.fromkeys(group, total // len(group))
    if skipped:
        layouts *= _GRAIN
        mined = {cell: count * _GRAIN for cell, count in mined.items()}
        for component in skipped:
            mined |= _estimated(component, layouts)
    return Posterior({cell: mined[cell] for cell in hidden}, layouts, not skipped, nodes)


def _deduced(rows: int, columns: int, numbers: Mapping[int, int]) -> tuple[dict[int, int], dict[frozenset[int], int]]:
    """What single numbers prove, a number of 0 among them: 1 for a mine; and of the other cells, the sets with their mines."""
    near = neighbours(rows, columns)
    cells = [{other for other in near[cell] if other not in numbers} for cell in numbers]
    lacks = list(numbers.values())
    beside: dict[int, list[int]] = defaultdict(list)
    for i, around in enumerate(cells):
        for cell in around:
            beside[cell].append(i)
    known: dict[int, int] = {}
    waiting = list(range(len(cells)))
    while waiting:
        i = waiting.pop()
        if not 0 <= lacks[i] <= len(cells[i]):
            raise Contradiction(
                f"cell {list(numbers)[i]} shows {list(numbers.values())[i]}: the cells around it do not fit"
            )
        if lacks[i] in (0, len(cells[i])):
            mine = int(lacks[i] > 0)
            for cell in list(cells[i]):
                known[cell] = mine
                for j in beside[cell]:
                    cells[j].remove(cell)
                    lacks[j] -= mine
                waiting += beside[cell]
    limits: dict[frozenset[int], int] = {}
    for around, lack in zip(cells, lacks, strict=True):
        if around and limits.setdefault(frozenset(around), lack) != lack:
            raise Contradiction(f"the cells {sorted(around)} would hold {lack} mines by one number and not by another")
    return known, limits


def _components(limits: Mapping[frozenset[int], int]) -> list[_Component]:
    """The groups of cells, by component."""
    beside: dict[int, list[int]] = defaultdict(list)
    for i, around in enumerate(limits):
        for cell in around:
            beside[cell].append(i)
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for cell in sorted(beside):
        groups[tuple(beside[cell])].append(cell)
    touching = _touching(groups)
    lacks = list(limits.values())
    made, seen = [], set[tuple[int, ...]]()
    for start in groups:
        if start in seen:
            continue
        reached = _reached(start, touching)
        seen.update(reached)
        ordered = _ordered(reached)
        inside = {i: lacks[i] for near in reached for i in near}
        made.append(_Component([groups[near] for near in ordered], ordered, inside))
    return made


def _touching(groups: Iterable[tuple[int, ...]]) -> dict[int, set[tuple[int, ...]]]:
    """By number, the groups beside it."""
    made: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for near in groups:
        for i in near:
            made[i].add(near)
    return made


def _reached(start: tuple[int, ...], touching: Mapping[int, set[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """The groups of the component of ``start``, in breadth-first order."""
    made, seen = [start], {start}
    for near in made:
        new = set[tuple[int, ...]]().union(*(touching[i] for i in near)) - seen
        seen |= new
        made += sorted(new)
    return made


def _ordered(groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The groups in an order in which few numbers are open at once: from an end of the component, always closing what can be closed."""
    touching = _touching(groups)
    start = _reached(_reached(groups[0], touching)[-1], touching)[-1]  # the last one reached is at an end
    waiting = {i: len(found) for i, found in touching.items()}
    made: list[tuple[int, ...]] = []
    opened: set[int] = set()
    rest = {near: place for place, near in enumerate(_reached(start, touching))}
    while rest:
        reachable = {near for i in opened for near in touching[i]} or {start}

        def cost(near: tuple[int, ...]) -> tuple[int, int, int]:
            """Numbers opened less numbers closed; then the numbers that are nearest to being closed."""
            change = sum((i not in opened) - (waiting[i] == 1) for i in near)
            return change, min(waiting[i] for i in near), rest[near]

        chosen = min(reachable, key=cost)
        made.append(chosen)
        del rest[chosen]
        for i in chosen:
            waiting[i] -= 1
            touching[i].remove(chosen)
            opened.add(i)
            if not waiting[i]:
                opened.remove(i)
    return made


def _count(component: _Component, budget: int) -> _Counts | None:
    """The layouts of a component; None when that takes more than ``budget`` nodes."""
    sizes = [len(group) for group in component.groups]
    width = sum(sizes) + sum(sizes).bit_length() + 1  # a coefficient is at most cells * 2^cells
    slots = {i: _SLOT * place for place, i in enumerate(component.lacks)}
    full = (1 << _SLOT) - 1
    room = dict.fromkeys(component.lacks, 0)
    steps: list[tuple[int, int, list[tuple[int, int]]]] = []
    for size, near in zip(reversed(sizes), reversed(component.near), strict=True):
        steps.append((size, sum(1 << slots[i] for i in near), [(slots[i], room[i]) for i in near]))
        for i in near:
            room[i] += size
    layer = {sum(lack << slots[i] for i, lack in component.lacks.items()): 1}
    layers: list[dict[int, int]] = []
    moves: list[dict[int, list[tuple[int, int]]]] = []
    nodes = 0
    for size, taken, beside in reversed(steps):
        after: dict[int, int] = {}
        came: dict[int, list[tuple[int, int]]] = {}
        for state, ways in layer.items():
            lacks = [((state >> slot) & full, later) for slot, later in beside]
            least = max(0, max(lack - later for lack, later in lacks))
            most = min(size, min(lack for lack, _ in lacks))
            nodes += max(most - least + 1, 1)
            if nodes > budget:
                return None
            for count in range(least, most + 1):
                to = state - count * taken
                more = (comb(size, count) * ways) << (count * width)
                if to in after:
                    after[to] += more
                    came[to].append((state, count))
                else:
                    after[to] = more
                    came[to] = [(state, count)]
        layers.append(layer)
        moves.append(came)
        layer = after
    # backwards: how many ways there are to go on from each state
    onward = dict.fromkeys(layer, 1)
    mined: list[dict[int, int]] = []
    for size, ways, came in zip(reversed(sizes), reversed(layers), reversed(moves), strict=True):
        before: dict[int, int] = {}
        total = 0
        for to, rest in onward.items():
            here = 0
            for state, count in came[to]:
                choices = comb(size, count)
                before[state] = before.get(state, 0) + ((choices * rest) << (count * width))
                if count:
                    here += (count * choices * ways[state]) << (count * width)
            if here:
                total += here * rest
        mined.append(_coefficients(total, width))
        onward = before
    return _Counts(_coefficients(sum(layer.values()), width), mined[::-1], nodes)


def _coefficients(polynomial: int, width: int) -> dict[int, int]:
    """The coefficients above 0 by power."""
    full, made, power = (1 << width) - 1, {}, 0
    while polynomial:
        if polynomial & full:
            made[power] = polynomial & full
        polynomial >>= width
        power += 1
    return made


def _combined(parts: Sequence[Mapping[int, int]], free: int, mines: int) -> tuple[int, list[dict[int, int]], int]:
    """Layouts of all components and the ``free`` cells with ``mines`` mines in total.

    Also, by component, in how many layouts of everything else it has m mines, and in how many a given free cell holds one.
    """
    before: list[dict[int, int]] = [{0: 1}]
    for part in parts:
        sums: dict[int, int] = defaultdict(int)
        for used, ways in before[-1].items():
            for m, count in part.items():
                if used + m <= mines:
                    sums[used + m] += ways * count
        before.append(sums)
    left = {mines - used for used in before[-1]}
    rest = {r: comb(free, r) for r in left}
    layouts = sum(ways * rest[mines - used] for used, ways in before[-1].items())
    in_free = (
        sum(ways * comb(free - 1, mines - used - 1) for used, ways in before[-1].items() if mines > used) if free else 0
    )
    weights: list[dict[int, int]] = []
    for place in reversed(range(len(parts))):
        part, earlier = parts[place], before[place]
        weights.append(
            {
                m: sum(ways * rest[mines - used - m] for used, ways in earlier.items() if mines - used - m in rest)
                for m in part
            }
        )
        rest = {
            mines - used: sum(count * rest[mines - used - m] for m, count in part.items() if mines - used - m in rest)
            for used in earlier
        }
    return layouts, weights[::-1], in_free


def _estimated(component: _Component, layouts: int) -> dict[int, int]:
    """By cell of a component that was not counted: the mean of lacking mines / cells beside, times ``layouts``."""
    cells: dict[int, int] = defaultdict(int)
    for group, near in zip(component.groups, component.near, strict=True):
        for i in near:
            cells[i] += len(group)
    made: dict[int, int] = {}
    for group, near in zip(component.groups, component.near, strict=True):
        total = sum(layouts * component.lacks[i] // cells[i] for i in near)
        made |= dict.fromkeys(group, total // len(near))
    return made
