"""Tokens, positions and pixel values of pictures, against the processor and the positions of
transformers."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from coppice.common import vision
from coppice.common.vision import Vision, ids, runs
from tests import tiny
from tests.pictures import png, squares

SIZES = [(28, 28), (100, 41), (41, 100), (17, 900), (256, 256), (1, 1), (111, 113)]


def vision_of(folder: Path) -> Vision:
    seen = Vision.of(folder)
    assert seen is not None
    return seen


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_vision(tmp_path_factory.mktemp(request.param), request.param)


def blank(height: int, width: int) -> bytes:
    return png(np.zeros((height, width, 3), np.uint8))


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_a_picture_has_the_tokens_of_transformers(folder: Path, height: int, width: int) -> None:
    seen = vision_of(folder)
    picture = blank(height, width)
    assert vision.size_of(picture) == (height, width)
    _, ((_, rows, columns),) = seen.pixels([picture])
    assert seen.grid(picture) == (rows // 2, columns // 2)


def test_a_picture_that_was_cut_short_is_refused() -> None:
    whole = png(np.zeros((40, 40, 3), np.uint8))
    vision.check(whole)
    for cut in (whole[:-20], whole[:40]):
        with pytest.raises((OSError, SyntaxError)):
            vision.check(cut)


def test_pixel_values_are_those_of_the_processor_of_the_folder(seeing: Path) -> None:
    from transformers import Qwen2VLImageProcessorPil

    seen = vision_of(seeing)
    pictures = [squares(1), squares(2, 3, 2)]
    patches, grids = seen.pixels(pictures)
    opened: Any = [Image.open(io.BytesIO(picture)) for picture in pictures]
    expected = Qwen2VLImageProcessorPil.from_pretrained(seeing)(opened, return_tensors="np")
    np.testing.assert_array_equal(patches, expected["pixel_values"])
    assert grids.tolist() == [[1, 4, 4], [1, 6, 4]]


@pytest.mark.parametrize("seed", range(6))
def test_positions_are_those_of_transformers(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    seen = vision_of(folder)
    pictures = {n: squares(n, *rng.integers(1, 5, 2)) for n in range(1, 4)}
    pieces = [np.arange(rng.integers(1, 6))]
    for number in map(int, rng.integers(1, 4, seed)):
        pieces.append(ids(number, int(np.prod(seen.grid(pictures[number])))))
        pieces.append(np.arange(rng.integers(1, 6)))
    tokens = np.concatenate(pieces)
    model = vision.load(folder, torch.float32, "eager")
    shapes = (seen.grid(pictures[run.number]) for run in runs(tokens))
    grid = [[1, 2 * rows, 2 * columns] for rows, columns in shapes]
    expected, delta = model.model.get_rope_index(
        torch.from_numpy(tokens)[None].clamp(min=0),
        torch.from_numpy(tokens < 0)[None].int(),
        image_grid_thw=torch.tensor(grid) if grid else None,
    )
    places = seen.sequence(tokens, pictures)
    np.testing.assert_array_equal(places, expected[:, 0])
    assert places[0, -1] + 1 - len(tokens) == int(delta)


def test_wrong_pictures_are_refused(seeing: Path, llama: Path, tmp_path: Path) -> None:
    seen = vision_of(seeing)
    with pytest.raises(ValueError, match="expected the bytes of a PNG"):
        seen.grid(b"GIF89a")
    with pytest.raises(ValueError, match="at most 200"):
        seen.grid(blank(1, 201))
    with pytest.raises(ValueError, match=r"expected \{'type': 'text'"):
        list(vision.shown([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]))
    assert Vision.of(llama) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    with pytest.raises(FileNotFoundError, match="preprocessor_config"):
        Vision.of(tmp_path)
