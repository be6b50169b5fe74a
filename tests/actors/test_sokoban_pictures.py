"""The pictures of Sokoban rooms. Pillow, which matplotlib brings, is the independent reader of the PNG bytes."""

import io

import numpy as np
import pytest
from PIL import Image

from actors.environments.sokoban import Sokoban, State
from actors.environments.sokoban_pictures import SIDE, picture, pixels
from actors.environments.sokoban_rooms import GLYPHS

EVERY_KIND = "######" + "#S√XO#" + "#____#" * 3 + "######"


def test_a_picture_is_a_png_of_96_pixels_with_the_pixels_of_the_room() -> None:
    state = State(EVERY_KIND)
    image = Image.open(io.BytesIO(picture(state)))
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (96, 96))
    assert np.array_equal(np.asarray(image), pixels(state))
    assert picture(state) == picture(State(EVERY_KIND, turn=3))


def test_every_kind_of_cell_has_its_own_sprite_wherever_it_lies() -> None:
    image = pixels(State(EVERY_KIND))
    tiles = {}
    for cell, glyph in enumerate(EVERY_KIND):
        row, column = divmod(cell, 6)
        tile = image[row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE].tobytes()
        assert tiles.setdefault(glyph, tile) == tile
    tiles["P"] = pixels(State(EVERY_KIND.replace("S", "P")))[SIDE : 2 * SIDE, SIDE : 2 * SIDE].tobytes()
    assert set(tiles) == set(GLYPHS)
    assert len(set(tiles.values())) == len(GLYPHS)


@pytest.mark.parametrize("size", [5, 8])
def test_other_sizes_have_other_pictures(size: int) -> None:
    game = Sokoban(size=size)
    image = Image.open(io.BytesIO(picture(game.initial(game.task(0)))))
    assert image.size == (size * SIDE, size * SIDE)
