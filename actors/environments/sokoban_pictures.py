"""Pictures of Sokoban rooms: sprites of 16x16 pixels, drawn here by code, as a PNG of 96x96 pixels
for a room of size 6.

The released code takes the sprites of a package. Ours show the same seven kinds of cell with other
pixels: a brick wall, a plain floor, a red frame and dot for a target, a wooden crate, the same
crate in green on a target, and a round player, who stands on the frame of a target.
"""

import struct
import zlib
from functools import cache
from math import isqrt

import numpy as np

from coppice.actors.environments.sokoban_rooms import (
    BOX,
    GLYPHS,
    PLACED,
    PLAYER,
    PLAYER_ON_TARGET,
    TARGET,
    WALL,
)

SIDE = 16
"""Pixels per cell in each direction."""

_FLOOR, _MORTAR, _BRICK = (222, 214, 190), (70, 60, 60), (150, 82, 62)
_TARGET, _SKIN, _SHIRT = (205, 45, 45), (245, 200, 160), (40, 90, 190)
_WOOD, _EDGE = (
    {BOX: (196, 140, 66), PLACED: (96, 176, 84)},
    {BOX: (104, 66, 24), PLACED: (32, 88, 36)},
)


def picture(board: str, side: int = 0) -> bytes:
    """Return a board as a PNG of ``side`` x ``side`` RGB pixels, whose sprites repeat the nearest
    pixel. 0: ``SIDE`` times the room's size."""
    image = pixels(board)
    at = np.arange(side or len(image)) * len(image) // (side or len(image))
    return png(image[at][:, at])


def pixels(board: str) -> np.ndarray:
    """Return the colours of a board, uint8 [height, width, 3]."""
    size, sprites = isqrt(len(board)), _sprites()
    rows = [board[at : at + size] for at in range(0, len(board), size)]
    return np.concatenate(
        [np.concatenate([sprites[glyph] for glyph in row], axis=1) for row in rows]
    )


def png(image: np.ndarray) -> bytes:
    """Return uint8 colours [height, width, 3] as a PNG with 8 bits per channel and unfiltered
    lines."""
    height, width, _ = image.shape
    lines = np.concatenate(
        [np.zeros((height, 1), np.uint8), image.reshape(height, width * 3)], axis=1
    )
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


@cache
def _sprites() -> dict[str, np.ndarray]:
    """Return the sprite of every glyph, uint8 [SIDE, SIDE, 3]."""
    sprites = {glyph: _plain() for glyph in GLYPHS}
    sprites[WALL] = _wall()
    for glyph in (TARGET, PLAYER_ON_TARGET):
        _frame(sprites[glyph], 1, _TARGET)
    _disc(sprites[TARGET], 8, 8, 3, _TARGET)
    for glyph in (BOX, PLACED):
        _crate(sprites[glyph], _WOOD[glyph], _EDGE[glyph])
    for glyph in (PLAYER, PLAYER_ON_TARGET):
        _disc(sprites[glyph], 11, 8, 4, _SHIRT)
        _disc(sprites[glyph], 5, 8, 3, _SKIN)
    return sprites


def _plain() -> np.ndarray:
    """Return an empty floor with a faint edge, so that cells can be counted."""
    sprite = np.full((SIDE, SIDE, 3), _FLOOR, np.uint8)
    sprite[-1] = sprite[:, -1] = np.array(_FLOOR) - 14
    return sprite


def _wall() -> np.ndarray:
    """Return four courses of bricks, each shifted by half a brick."""
    sprite = np.full((SIDE, SIDE, 3), _BRICK, np.uint8)
    for course, top in enumerate(range(0, SIDE, 4)):
        sprite[top + 3] = _MORTAR
        sprite[top : top + 4, (3 if course % 2 else 7) :: 8] = _MORTAR
    return sprite


def _frame(sprite: np.ndarray, margin: int, colour: tuple[int, int, int]) -> None:
    """Draw a square frame of one pixel."""
    near, far = margin, SIDE - 1 - margin
    sprite[[near, far], near : far + 1] = colour
    sprite[near : far + 1, [near, far]] = colour


def _disc(
    sprite: np.ndarray, row: int, column: int, radius: int, colour: tuple[int, int, int]
) -> None:
    """Fill a disc."""
    down, across = np.ogrid[:SIDE, :SIDE]
    sprite[(down - row) ** 2 + (across - column) ** 2 <= radius**2] = colour


def _crate(sprite: np.ndarray, wood: tuple[int, int, int], edge: tuple[int, int, int]) -> None:
    """Draw a crate with a frame and two diagonal boards."""
    sprite[1 : SIDE - 1, 1 : SIDE - 1] = wood
    for margin in (1, 2):
        _frame(sprite, margin, edge)
    diagonal = np.arange(3, SIDE - 3)
    sprite[diagonal, diagonal] = sprite[diagonal, SIDE - 1 - diagonal] = edge
