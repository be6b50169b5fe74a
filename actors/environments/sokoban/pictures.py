"""Pictures of Sokoban rooms: sprites of 16x16 pixels, side by side in sprites.png.

The released code takes the sprites of a package. Ours show the same seven kinds of cell with other
pixels: a brick wall, a plain floor, a red frame and dot for a target, a crate, the same crate in
green on a target, and a round player, who stands on the frame of a target.
"""

import io
from functools import cache
from math import isqrt
from pathlib import Path

import numpy as np
from PIL import Image

from coppice.actors.environments.sokoban.rooms import GLYPHS

SIDE = 16
"""Pixels per cell in each direction."""


def picture(board: str, side: int = 0) -> bytes:
    """Return a board as a PNG of ``side`` x ``side`` RGB pixels, whose sprites repeat the nearest
    pixel. 0: ``SIDE`` times the room's size."""
    image = pixels(board)
    at = np.arange(side or len(image)) * len(image) // (side or len(image))
    file = io.BytesIO()
    Image.fromarray(image[at][:, at]).save(file, "PNG", compress_level=9)
    return file.getvalue()


def pixels(board: str) -> np.ndarray:
    """Return the colours of a board, uint8 [height, width, 3]."""
    size, sprites = isqrt(len(board)), _sprites()
    cells = [sprites[glyph] for glyph in board]
    return np.concatenate([np.hstack(cells[at : at + size]) for at in range(0, len(board), size)])


@cache
def _sprites() -> dict[str, np.ndarray]:
    """Return the sprite of every glyph, uint8 [SIDE, SIDE, 3]."""
    sheet = np.asarray(Image.open(Path(__file__).with_name("sprites.png")).convert("RGB"))
    return dict(zip(GLYPHS, np.split(sheet, len(GLYPHS), axis=1), strict=True))
