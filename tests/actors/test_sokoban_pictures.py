"""The pictures of Sokoban rooms. Pillow, which matplotlib brings, is the independent reader of the
PNG bytes."""

import io

import numpy as np
import pytest
from PIL import Image

from coppice.actors.environments.base import SPLIT
from coppice.actors.environments.sokoban.environment import SPRITE as SIDE
from coppice.actors.environments.sokoban.environment import Sokoban, picture, pixels
from coppice.actors.environments.sokoban.rooms import GLYPHS

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


@pytest.mark.parametrize("side", [96, 192, 256])
def test_a_side_enlarges_the_pixels(side: int) -> None:
    file = Image.open(io.BytesIO(picture(EVERY_KIND, side)))
    image = np.asarray(file)
    assert (file.format, image.shape) == ("PNG", (side, side, 3))
    assert side > 96 or np.array_equal(image, pixels(EVERY_KIND))
    cell = side // 6
    middle = image[cell // 2 :: cell, cell // 2 :: cell][:6, :6]
    expected = pixels(EVERY_KIND)[SIDE // 2 :: SIDE, SIDE // 2 :: SIDE]
    assert side == 256 or np.array_equal(middle, expected)
    drawn, small = (np.unique(one.reshape(-1, 3), axis=0) for one in (image, pixels(EVERY_KIND)))
    assert np.array_equal(drawn, small)


def test_the_prompt_shows_the_room_as_a_picture_and_no_board() -> None:
    game = Sokoban("sokoban_picture", history=0, side=256)
    task = game.task(3)
    state = game.initial(task)
    (message,) = game.prompt(task, state)
    before, shown, after = message["content"]
    assert game.pictures and not Sokoban().pictures
    assert shown == {"type": "image", "image": picture(state.board, 256)}
    assert "{" not in before["text"] + after["text"]
    assert SPLIT in before["text"]
    assert not set("√#_") & set(before["text"] + after["text"])
