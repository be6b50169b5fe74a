"""The Sokoban environment: rewards by hand, reading, the split, pictures, of which Pillow is the
independent reader, and rooms, whose distances an independent search gives."""

import io
import random
import statistics
from collections import deque

import numpy as np
import pytest
from PIL import Image

from coppice.actors.environments.base import SPLIT
from coppice.actors.environments.sokoban.environment import (
    Sokoban,
    SokobanState,
    is_held_out,
    picture,
    pixels,
    shown,
)
from coppice.actors.environments.sokoban.rooms import (
    GLYPHS,
    cells_of,
    generate,
    layout_digest,
    parse,
    shortest,
    written,
)
from coppice.scheduler.growth.tasks import GeneratedTasks
from coppice.tools.defaults.legal_play import FIRST_SEED
from coppice.wire.faults import DataFault
from tests.games import play

ROOM = "######" + "#P_O_#" + "#_X__#" + "#____#" * 2 + "######"
"""Solved by down, down, right, up (which pushes the box up into the first row), left, up, right
(which pushes it onto the target)."""
PAIR = "######" + "#PXO_#" + "#_XO_#" + "#____#" * 2 + "######"
SIDE = 16
"""Pixels of a cell in each direction."""


def lane(cells: str) -> str:
    return "######" + cells + "######" * 4


def test_the_rewards_of_a_solved_room_by_hand() -> None:
    made = play(Sokoban(), SokobanState(ROOM), "down", "down", "right", "up", "left", "up", "right")
    assert [t.reward for t in made] == pytest.approx([-0.1] * 6 + [10.9])
    assert [t.outcome for t in made] == [None] * 6 + [pytest.approx(11 - 0.1 * 7)]
    assert made[-1].measures == {"success": 1.0, "completion": 1.0}
    assert made[-1].state.board == "######" + "#_P√_#" + "#____#" * 3 + "######"
    assert made[-1].done and made[-1].state.over


def test_a_box_on_a_target_brings_1_and_a_box_off_it_costs_1() -> None:
    words = "right right left left down right".split()
    made = play(Sokoban(boxes=2), SokobanState(PAIR), *words)
    assert [t.reward for t in made] == pytest.approx([0.9, -1.1, -0.1, -0.1, -0.1, 0.9])
    assert made[-1].state.score == pytest.approx(0.4)
    assert made[1].state.board[6:12] == "#__SX#"


def test_a_step_against_a_wall_or_a_stuck_box_costs_the_turn_and_changes_nothing() -> None:
    stuck = SokobanState(lane("#PX#O#"))
    for state, word in ((SokobanState(ROOM), "up"), (stuck, "right")):
        (made,) = play(Sokoban(), state, word)
        assert (made.reward, made.done, made.outcome) == (pytest.approx(-0.1), False, None)
        assert made.state.board == state.board
        assert made.state.turn == 1


def test_an_invalid_reply_costs_the_turn_and_the_episode_goes_on() -> None:
    game = Sokoban(horizon=2)
    assert game.read(SokobanState(ROOM), "down").kind == "invalid"
    first, last = play(game, SokobanState(ROOM), "jump", "jump")
    assert (first.done, first.reward, first.state.board) == (False, pytest.approx(-0.1), ROOM)
    assert (last.done, last.outcome) == (True, pytest.approx(-0.2))
    assert last.measures == {"success": 0.0, "completion": 0.0}


def test_the_episode_ends_at_the_horizon_and_success_may_be_the_outcome() -> None:
    game = Sokoban(outcome="success", horizon=3)
    assert play(game, SokobanState(ROOM, turn=2), "up")[-1].outcome == 0.0
    assert play(game, SokobanState(lane("#PXO_#")), "right")[-1].outcome == 1.0
    assert game.moves(play(game, SokobanState(ROOM, turn=2), "up")[-1].state) == []


def test_an_action_is_one_direction() -> None:
    read = {" Right ": (3,), "up": (0,), "upset": None, "right, then up": None, "": None}
    assert {text: Sokoban().move(text) for text in read} == read


def test_equal_boards_are_one_situation_at_any_turn() -> None:
    game = Sokoban()
    back = play(game, SokobanState(ROOM), "down", "up")[-1].state
    assert back != SokobanState(ROOM)
    assert game.anchor(back) == game.anchor(SokobanState(ROOM)) == shown(ROOM)
    assert game.anchor(play(game, SokobanState(ROOM), "down")[-1].state) != shown(ROOM)


def test_training_and_held_out_rooms_share_no_layout_however_turned() -> None:
    game = Sokoban()
    tasks = GeneratedTasks(game.task, seed=0)
    train = [parse(game.initial(tasks.at(position)).board) for position in range(600)]
    heldout = [parse(game.initial(task).board) for task in tasks.held_out(128)]
    warm = [parse(game.initial(game.task(FIRST_SEED + count)).board) for count in range(100)]
    layouts = {layout_digest(room) for room in train + warm}
    assert layouts.isdisjoint(map(layout_digest, heldout))
    assert not any(map(is_held_out, train + warm)) and all(map(is_held_out, heldout))


def test_good_moves_begin_a_shortest_solution() -> None:
    game = Sokoban()
    assert game.good_moves(SokobanState(ROOM)) == [(1,)]
    assert game.good_moves(SokobanState(lane("#PXO_#"))) == [(3,)]
    assert game.good_moves(SokobanState(lane("#P_XO#"), over=True)) == []
    assert game.good_moves(SokobanState(lane("#X_PO#"))) == []


EVERY_KIND = "######" + "#S√XO#" + "#____#" * 3 + "######"


def test_every_kind_of_cell_has_its_own_sprite_wherever_it_lies() -> None:
    image = pixels(EVERY_KIND)
    tiles = {}
    for cell, glyph in enumerate(EVERY_KIND):
        row, column = divmod(cell, 6)
        tile = image[row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE].tobytes()
        assert tiles.setdefault(glyph, tile) == tile
    tiles["P"] = pixels(EVERY_KIND.replace("S", "P"))[SIDE : 2 * SIDE, SIDE : 2 * SIDE].tobytes()
    assert set(tiles) == set(GLYPHS)
    assert len(set(tiles.values())) == len(GLYPHS)


@pytest.mark.parametrize("side", [96, 192])
def test_a_side_enlarges_the_pixels(side: int) -> None:
    file = Image.open(io.BytesIO(picture(EVERY_KIND, side)))
    image = np.asarray(file)
    assert (file.format, image.shape) == ("PNG", (side, side, 3))
    assert np.array_equal(image[:: side // 96, :: side // 96], pixels(EVERY_KIND))


def test_the_prompt_shows_the_room_as_a_picture_and_no_board() -> None:
    game = Sokoban("sokoban_picture", history=0, side=256)
    task = game.task(3)
    state = game.initial(task)
    (message,) = game.prompt(task, state)
    before, seen, after = message["content"]
    assert game.pictures and not Sokoban().pictures
    assert seen == {"type": "image", "image": picture(state.board, 256)}
    assert "{" not in before["text"] + after["text"]
    assert SPLIT in before["text"]
    assert not set("√#_") & set(before["text"] + after["text"])


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


def test_turned_mirrored_and_shifted_rooms_have_one_digest_and_others_another() -> None:
    rows = ["######", "#P_O_#", "#_X###", "#_####", "######", "######"]
    turned = ["".join(column) for column in zip(*rows[::-1], strict=True)]
    mirrored = [row[::-1] for row in rows]
    room = parse("".join(rows))
    shifted = [rows[0], *rows[:-1]]
    for same in (turned, mirrored, shifted, turned[::-1], [row[::-1] for row in turned]):
        assert layout_digest(parse("".join(same))) == layout_digest(room)
    assert layout_digest(room._replace(boxes=room.targets, player=7)) == layout_digest(room)
    assert layout_digest(room._replace(targets=1 << 8)) != layout_digest(room)
    assert layout_digest(room._replace(floor=room.floor | 1 << 25)) != layout_digest(room)
