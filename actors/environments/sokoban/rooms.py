"""Sokoban rooms: boards, pushes, exact distances to the solution, and a generator whose rooms are
always solvable.

A board is ``size * size`` characters row by row, with walls around. Sets of cells are bit masks.
The distances come from reverse play: from every solved position the player walks and pulls, breadth
first. A room starts only where reverse play has been, and the oracle reads the same table.
"""

import hashlib
import random
from collections.abc import Callable
from functools import lru_cache
from math import isqrt
from typing import NamedTuple

import numpy as np

from coppice.wire.faults import DataFault

WALL, FLOOR, TARGET, PLACED, BOX, PLAYER, PLAYER_ON_TARGET = GLYPHS = "#_O√XPS"
"""Wall, floor, target, box on a target, box, player, player on a target."""
SIZES, BOXES = range(5, 9), range(1, 4)
"""The sizes and numbers of boxes for which the table of distances stays small: at most some 100,000
positions for three boxes in 8x8."""
CELL_BITS = 6
"""The bits of a position that hold the player's cell, which is below 64."""
TURNING, SIDEWAYS = 0.35, 0.6
"""Of each step of the walk that opens a room: the chance that it turns, and the chance that it
opens a cell beside its way as well."""
ROOMS_CACHED, TRIES = 64, 4096


class Room(NamedTuple):
    """A parsed board. floor: all cells that are not walls. targets, boxes: sets of cells. key: the
    position among those of its room. placed: the number of boxes on targets."""

    size: int
    floor: int
    targets: int
    boxes: int
    player: int

    @property
    def key(self) -> int:
        return self.boxes << CELL_BITS | self.player

    @property
    def placed(self) -> int:
        return (self.boxes & self.targets).bit_count()

    @property
    def solved(self) -> bool:
        return self.boxes == self.targets


def directions(size: int) -> tuple[int, int, int, int]:
    """Return what up, down, left and right add to a cell."""
    return -size, size, -1, 1


def parse(board: str) -> Room:
    """Return the position of a board. Raises ValueError unless it is a walled square with one
    player and as many boxes as targets."""
    size = isqrt(len(board))
    cells = dict.fromkeys(GLYPHS, 0)
    for cell, glyph in enumerate(board):
        cells[glyph] = cells.get(glyph, 0) | 1 << cell
    border = (1 << size * size) - 1 & ~inside_of(size)
    targets = cells[TARGET] | cells[PLACED] | cells[PLAYER_ON_TARGET]
    boxes, players = cells[PLACED] | cells[BOX], cells[PLAYER] | cells[PLAYER_ON_TARGET]
    square = size * size == len(board) and size in SIZES
    if not square or set(board) - set(GLYPHS) or border & ~cells[WALL]:
        raise ValueError(
            f"board {board!r}: expected a square of size {SIZES[0]} to {SIZES[-1]} of {GLYPHS!r}"
            " inside walls"
        )
    count = boxes.bit_count()
    if players.bit_count() != 1 or count != targets.bit_count() or count not in BOXES:
        raise ValueError(
            f"board {board!r}: expected one player, and as many boxes as targets,"
            f" {BOXES[0]} to {BOXES[-1]}"
        )
    floor = ~cells[WALL] & (1 << size * size) - 1
    return Room(size, floor, targets, boxes, players.bit_length() - 1)


def inside_of(size: int) -> int:
    """Return the cells inside the outer walls."""
    inner = range(1, size - 1)
    return sum(1 << row * size + column for row in inner for column in inner)


def written(position: Room) -> str:
    size, floor, targets, boxes, player = position
    kinds = ((1 << player, PLAYER, PLAYER_ON_TARGET), (boxes, BOX, PLACED), (floor, FLOOR, TARGET))

    def glyph(cell: int) -> str:
        on_target = targets >> cell & 1
        held = (marks[on_target] for cells, *marks in kinds if cells >> cell & 1)
        return next(held, WALL)

    return "".join(map(glyph, range(size * size)))


def pushed(position: Room, direction: int) -> Room:
    """Return the position after a move (0 up, 1 down, 2 left, 3 right). A move against a wall, or
    against a box that is stuck, changes nothing."""
    step = directions(position.size)[direction]
    ahead, beyond = position.player + step, position.player + 2 * step
    if not position.floor >> ahead & 1:
        return position
    if not position.boxes >> ahead & 1:
        return position._replace(player=ahead)
    if not (position.floor & ~position.boxes) >> beyond & 1:
        return position
    return position._replace(player=ahead, boxes=position.boxes ^ (1 << ahead | 1 << beyond))


@lru_cache(maxsize=ROOMS_CACHED)
def distances(size: int, floor: int, targets: int) -> dict[int, int]:
    """Return the fewest steps to the solution by ``Room.key``, for every position of the room
    from which it can be solved."""
    frontier = [targets << CELL_BITS | player for player in cells_of(floor & ~targets)]
    table, steps = dict.fromkeys(frontier, 0), directions(size)
    depth = 0
    while frontier:
        depth += 1
        reached: list[int] = []
        for key in frontier:
            boxes, player = key >> CELL_BITS, key & (1 << CELL_BITS) - 1
            free = floor & ~boxes
            for step in steps:
                behind, ahead = player - step, player + step
                if not free >> behind & 1:
                    continue
                reached.append(boxes << CELL_BITS | behind)  # walk back
                if boxes >> ahead & 1:
                    # and pull the box along
                    reached.append((boxes ^ (1 << ahead | 1 << player)) << CELL_BITS | behind)
        frontier = [key for key in dict.fromkeys(reached) if key not in table]
        table.update(dict.fromkeys(frontier, depth))
    return table


def shortest(position: Room) -> int | None:
    """Return the steps of a shortest solution, None if the position cannot be solved any more."""
    return distances(position.size, position.floor, position.targets).get(position.key)


def optimal(position: Room) -> list[int]:
    """Return the directions with which a shortest solution begins, in ascending order, none if the
    position cannot be solved."""
    if (steps := shortest(position)) is None:
        return []
    return [way for way in range(4) if shortest(pushed(position, way)) == steps - 1]


def cells_of(mask: int) -> list[int]:
    """Return the cells of a set in ascending order."""
    return [cell for cell in range(mask.bit_length()) if mask >> cell & 1]


def layout_digest(position: Room) -> bytes:
    """Return a digest of the walls and targets, the same for all turned, mirrored and shifted forms
    of a room and for all positions in it."""
    size, floor, targets = position[:3]
    layout = [(floor >> cell & 1) + (targets >> cell & 1) for cell in range(size**2)]
    grid = np.array(layout, np.uint8).reshape(size, size)
    grid = grid[grid.any(1)][:, grid.any(0)]  # no row or column of a connected floor is empty
    forms = (np.rot90(side, turns) for side in (grid, grid.T) for turns in range(4))
    return hashlib.sha256(min(bytes([len(form)]) + form.tobytes() for form in forms)).digest()


def carved(size: int, rng: random.Random) -> int:
    """Return the cells that a random walk inside the outer walls opens."""
    inside = inside_of(size)
    cell, step = rng.choice(cells_of(inside)), rng.choice(directions(size))
    floor = 1 << cell
    for _ in range(int(1.7 * 2 * size)):
        if rng.random() < TURNING or not inside >> cell + step & 1:
            step = rng.choice(directions(size))
        if inside >> cell + step & 1:
            cell += step
        floor |= 1 << cell
        if rng.random() < SIDEWAYS:
            floor |= 1 << cell + rng.choice(directions(size)) & inside
    return floor


def generate(
    size: int, boxes: int, seed: int, longest: int,
    wanted: Callable[[Room], bool] = lambda room: True,
) -> Room:  # fmt: skip
    """Return the first room of ``seed`` that is ``wanted``. By construction it has a solution of
    ``longest`` steps or fewer.

    The start is drawn uniformly from the positions in which no box is on a target. Raises DataFault
    if no room of ``TRIES`` has a start.
    """
    rng = random.Random(f"sokoban/{size}/{boxes}/{seed}")
    for _ in range(TRIES):
        floor = carved(size, rng)
        cells = cells_of(floor)
        if len(cells) < 2 * boxes + 1:
            continue
        targets = sum(1 << cell for cell in rng.sample(cells, boxes))
        room = Room(size, floor, targets, targets, cells[0])
        if not wanted(room):
            continue
        table = distances(size, floor, targets)
        near = (key for key, steps in table.items() if steps <= longest)
        if starts := [key for key in near if not key >> CELL_BITS & targets]:
            key = rng.choice(starts)
            return room._replace(boxes=key >> CELL_BITS, player=key & (1 << CELL_BITS) - 1)
    raise DataFault(
        f"sokoban: no room of size {size} with {boxes} boxes and a solution of at most {longest}"
        f" steps from seed {seed} in {TRIES} tries: ask for fewer boxes or a longer horizon"
    )
