"""Sokoban's rooms: boards, pushes, distances against an independent search, and the generator."""

import random
import statistics
from collections import deque

import pytest

from coppice.actors.environments.sokoban.rooms import (
    GLYPHS,
    cells_of,
    generate,
    layout_digest,
    parse,
    shortest,
    written,
)
from coppice.wire.faults import DataFault

CORRIDOR = "######" + "#PX_O#" + "######" * 4


def searched(board: str) -> int | None:
    """The length of a shortest solution by forward search over sets of cells, which shares no code
    with the table of distances."""
    at = {glyph: set[tuple[int, int]]() for glyph in GLYPHS}
    for cell, glyph in enumerate(board):
        at[glyph].add(divmod(cell, 6))
    walls, targets = at["#"], frozenset(at["O"] | at["√"] | at["S"])
    (player,) = at["P"] | at["S"]
    start = (player, frozenset(at["X"] | at["√"]))
    seen, queue = {start}, deque([(start, 0)])
    while queue:
        (here, boxes), depth = queue.popleft()
        if boxes == targets:
            return depth
        for down, across in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            there, beyond = ((here[0] + n * down, here[1] + n * across) for n in (1, 2))
            if there in walls or (there in boxes and (beyond in walls or beyond in boxes)):
                continue
            after = (there, boxes - {there} | {beyond} if there in boxes else boxes)
            if after not in seen:
                seen.add(after)
                queue.append((after, depth + 1))
    return None


@pytest.mark.parametrize(("boxes", "rooms", "positions"), [(1, 40, 25), (2, 12, 8), (3, 4, 4)])
def test_distances_equal_a_forward_search(boxes: int, rooms: int, positions: int) -> None:
    rng, unsolvable = random.Random(boxes), 0
    for seed in range(rooms):
        room = generate(6, boxes, seed, 15)
        for _ in range(positions):
            player, *others = rng.sample(cells_of(room.floor), boxes + 1)
            position = room._replace(player=player, boxes=sum(1 << cell for cell in others))
            steps = searched(written(position))
            assert shortest(position) == steps
            unsolvable += steps is None
    assert unsolvable > rooms * positions / 10


def test_two_thousand_rooms_are_solvable_within_the_horizon_and_of_the_stated_difficulty() -> None:
    rooms = [generate(6, 1, seed, 15) for seed in range(2000)]
    steps = [shortest(room) or 0 for room in rooms]
    assert all(1 <= count <= 15 for count in steps)
    assert all(room.placed == 0 and not (room.boxes >> room.player & 1) for room in rooms)
    assert statistics.mean(steps) == pytest.approx(4.5, abs=0.1)
    assert len({layout_digest(room) for room in rooms}) > 1000


@pytest.mark.parametrize(("size", "boxes"), [(5, 1), (6, 2), (6, 3), (8, 3)])
def test_other_sizes_and_more_boxes_are_solvable_too(size: int, boxes: int) -> None:
    for seed in range(20):
        room = generate(size, boxes, seed, 30)
        assert (room.size, room.boxes.bit_count(), room.targets.bit_count()) == (size, boxes, boxes)
        assert 1 <= (shortest(room) or 0) <= 30


def test_a_room_depends_on_its_seed_alone() -> None:
    assert generate(6, 1, 7, 15) == generate(6, 1, 7, 15)
    assert written(generate(6, 1, 7, 15)) == "#######____##PX__##_O_###_##########"


def test_a_generator_that_finds_no_room_says_what_to_do() -> None:
    said = "size 6 with 1 boxes and a solution of at most 15 steps from seed 3 in 4096 tries: ask"
    with pytest.raises(DataFault, match=said):
        generate(6, 1, 3, 15, wanted=lambda room: False)


def test_turned_and_mirrored_rooms_have_one_digest_and_others_another() -> None:
    rows = ["######", "#P_O_#", "#_X###", "#_####", "######", "######"]
    turned = ["".join(column) for column in zip(*rows[::-1], strict=True)]
    mirrored = [row[::-1] for row in rows]
    room = parse("".join(rows))
    for same in (turned, mirrored, turned[::-1], [row[::-1] for row in turned]):
        assert layout_digest(parse("".join(same))) == layout_digest(room)
    assert layout_digest(room._replace(boxes=room.targets, player=7)) == layout_digest(room)
    assert layout_digest(room._replace(targets=1 << 8)) != layout_digest(room)
    assert layout_digest(room._replace(floor=room.floor | 1 << 25)) != layout_digest(room)


@pytest.mark.parametrize(
    ("board", "said"),
    [
        ("#" * 35, "expected a square"),
        (CORRIDOR.replace("_", "."), "expected a square of size 5 to 8 of '#_O√XPS'"),
        ("_" + CORRIDOR[1:], "inside walls"),
    ],
)
def test_a_broken_board_is_refused(board: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(board)
