"""Pictures in prompts, for models of the Qwen2-VL family: the tokens of a picture, its positions
and its pixel values.

The journal numbers the pictures of a run from 1, equal bytes once. In every prefix, picture
``number`` is the id ``-number``, once for each token that the model's processor makes of the
picture, and the bytes travel beside the ids as {number: PNG}, so prefixes are compared as ever. The
scheduler uses this module too: torch and transformers are imported only where they are needed.
"""

import base64
import functools
import io
import itertools
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from coppice.wire.faults import DataFault

FAMILY = ("qwen2_vl", "qwen2_5_vl")
"""The model types whose pictures this module knows."""
STEEPEST = 200
"""The largest ratio of a picture's sides, as in the processor of Qwen2-VL."""

_PLAIN = {
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "logits_soft_cap": None,
    "logits_mup_width_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
}
_PNG = struct.Struct(">8s8xII")
Grids = dict[int, tuple[int, int]]
"""The rows and columns of tokens of pictures, by number."""


class PictureRun(msgspec.Struct, frozen=True):
    """The tokens [start, end) of one picture."""

    start: int
    end: int
    number: int


class View(msgspec.Struct, frozen=True):
    """Pictures as a vision tower reads them. patches: float32 [patches, values]. grids: the frames,
    rows and columns of each picture's patches, int64 [pictures, 3]. rows: the row of the tower's
    features that belongs to each picture token of the forest, int64 [picture tokens]."""

    patches: np.ndarray
    grids: np.ndarray
    rows: np.ndarray


def ids(number: int, count: int) -> np.ndarray:
    """Return the ids of a picture of ``count`` tokens, int32 [count]."""
    return np.full(count, -number, np.int32)


def runs(tokens: np.ndarray) -> list[PictureRun]:
    """Return the pictures of ``tokens`` in order. Text stands between two pictures, so equal
    neighbours belong to one picture."""
    edges = np.flatnonzero(np.diff(np.where(tokens < 0, tokens, 0), prepend=0, append=0)).tolist()
    pairs = itertools.pairwise(edges)
    return [PictureRun(at, end, -int(tokens[at])) for at, end in pairs if tokens[at] < 0]


def numbers(tokens: np.ndarray) -> list[int]:
    """Return the numbers of the pictures in ``tokens``, each once."""
    return (-np.unique(tokens[tokens < 0])).tolist()


def places(tokens: np.ndarray, depth: np.ndarray, end: np.ndarray, grids: Grids) -> np.ndarray:
    """Return the temporal, vertical and horizontal position of each node of a forest
    (``learner.forest.trees``), int64 [3, nodes].

    A text token's positions are equal and follow the largest position before it. A picture's tokens
    begin there too, and count rows and columns. Raises ValueError if a run of ids has another
    length than its picture.
    """
    shift, inside = np.zeros(len(tokens), np.int64), np.zeros((3, len(tokens)), np.int64)
    for run in runs(tokens):
        rows, columns = grids[run.number]
        if run.end - run.start != rows * columns:
            raise ValueError(
                f"picture {run.number} has {run.end - run.start} tokens in the prefix: expected"
                f" {rows} x {columns}; was another model's processor used, or is no text between"
                " pictures?"
            )
        shift[run.end : end[run.start]] += max(rows, columns) - rows * columns
        step = np.arange(rows * columns)
        offsets = np.stack([0 * step, step // columns, step % columns])
        inside[:, run.start : run.end] = offsets - step
    return depth + shift + inside


class Vision:
    """The image processor of one model folder. ``Vision.of`` returns None for a model that reads
    text only."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        path = folder / "preprocessor_config.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} reads pictures and has no {path.name}: copy it there"
            )
        own = json.loads(path.read_text())
        size = own.get("size") or {}
        least = own.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
        most = own.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
        self.folder = folder
        self.token: int = settings.get("image_token_id", 151655)
        self.patch, self.merge = own.get("patch_size", 14), own.get("merge_size", 2)
        self.least, self.most = least or 56 * 56, most or 28 * 28 * 1280

    @classmethod
    def of(cls, folder: str | Path) -> "Vision | None":
        """Return the processor of a model folder, or None. Raises FileNotFoundError if a model of
        the family has no processor settings."""
        path = Path(folder) / "config.json"
        settings = json.loads(path.read_text()) if path.is_file() else {}
        return cls(Path(folder), settings) if settings.get("model_type") in FAMILY else None

    def grid(self, png: bytes) -> tuple[int, int]:
        """Return the rows and columns of tokens of a picture: its sides as the nearest multiples of
        a token's side, scaled first if the area is outside the processor's bounds. Raises
        ValueError for bytes that are not a PNG, and for a strip."""
        height, width = size_of(png)
        if max(height, width) > STEEPEST * min(height, width):
            raise ValueError(f"a picture of {width} x {height}: expected at most {STEEPEST} : 1")
        side = self.patch * self.merge
        rows, columns = round(height / side), round(width / side)
        area = rows * columns * side**2
        if area > self.most:
            scale = math.sqrt(height * width / self.most)
            rows, columns = (max(1, math.floor(n / scale / side)) for n in (height, width))
        elif area < self.least:
            scale = math.sqrt(self.least / (height * width))
            rows, columns = (math.ceil(n * scale / side) for n in (height, width))
        return rows, columns

    def grids(self, pictures: Mapping[int, bytes], needed: Sequence[int]) -> Grids:
        """Return the grid of each needed picture. Raises ValueError if one is absent."""
        if missing := [number for number in needed if number not in pictures]:
            raise ValueError(f"pictures {missing[:5]} are in the prefix and their bytes are not")
        return {number: self.grid(pictures[number]) for number in needed}

    def sequence(self, tokens: np.ndarray, pictures: Mapping[int, bytes]) -> np.ndarray:
        """Return the positions of one sequence, int64 [3, tokens]. Raises DataFault if ids and
        pictures do not fit each other."""
        count = len(tokens)
        try:
            grids = self.grids(pictures, numbers(tokens))
            return places(tokens, np.arange(count), np.full(count, count), grids)
        except ValueError as error:
            raise DataFault(str(error)) from None

    def view(self, tokens: np.ndarray, pictures: Mapping[int, bytes]) -> "View":
        """Return the pictures of a forest's ids, each once, for the vision tower."""
        needed = numbers(tokens)
        patches, grids = self.pixels([pictures[number] for number in needed])
        ends = np.cumsum(grids.prod(1) // self.merge**2)
        first = dict(zip(needed, [0, *ends[:-1].tolist()], strict=True))
        rows = [first[run.number] + np.arange(run.end - run.start) for run in runs(tokens)]
        return View(patches, grids, np.concatenate(rows))

    def pixels(self, pictures: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return ``patches`` and ``grids`` of all pictures (see ``View``)."""
        from PIL import Image

        images = [Image.open(io.BytesIO(png)).convert("RGB") for png in pictures]
        processed = self._processor(images, return_tensors="np")
        return processed["pixel_values"], processed["image_grid_thw"]

    @functools.cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(self.folder, backend="pil")


def size_of(png: bytes) -> tuple[int, int]:
    """Return a PNG's height and width."""
    signature, width, height = _PNG.unpack_from(png.ljust(_PNG.size, b"\0"))
    if signature != b"\x89PNG\r\n\x1a\n" or not width * height:
        raise ValueError(f"a picture begins with {png[:8]!r}: expected the bytes of a PNG file")
    return height, width


def check(png: bytes) -> None:
    """Raise OSError or SyntaxError unless all parts of a PNG are there and as they were written."""
    from PIL import Image

    Image.open(io.BytesIO(png)).verify()


def url(png: bytes) -> str:
    """Return a picture as a data URL, as HTTP interfaces take it."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def shown(messages: Sequence[Mapping[str, Any]]) -> Iterator[str | bytes]:
    """Yield the text parts (str) and the pictures (bytes) of messages in order. A message's content
    is a text or a list of parts: {"type": "text", "text": str} or {"type": "image", "image": PNG
    bytes}. Raises ValueError for any other part."""
    for message in messages:
        content = message["content"]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            name = str(part.get("type"))
            value: Any = part.get(name)
            if not isinstance(value, {"text": str, "image": bytes}.get(name, ())):
                raise ValueError(
                    f"a part {str(part)[:80]} of a prompt: expected {{'type': 'text', 'text': str}}"
                    " or {'type': 'image', 'image': PNG bytes}"
                )
            yield value


def check_head(folder: str | Path, text: Any) -> None:
    """Raise ValueError unless the logits of ``text``, the configuration of a language model, are
    the product of hidden states and output embeddings, as the engine and the learner compute it."""
    for key, expected in _PLAIN.items():
        value = getattr(text, key, expected)
        if value is not None and value != expected:
            raise ValueError(
                f"{folder}: {key} = {value} changes what the head computes: expected {expected};"
                " take another model (docs/models.md)"
            )


def context_of(text: Any) -> int:
    """Return how many tokens a model reads by its configuration, or by the mapping that is stored
    of it; 2^31 if that does not say. Of LongRoPE only the short positions count: its angles are
    others as soon as one sequence of a forward is longer."""

    def value(name: str) -> Any:  # some configurations have another name for it in the mapping
        return text.get(name) if isinstance(text, Mapping) else getattr(text, name, None)

    most: int = value("max_position_embeddings") or 2**31
    rope = value("rope_parameters") or value("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return most
    name = "original_max_position_embeddings"
    return min(most, value(name) or rope.get(name) or most)


def load(folder: str | Path, dtype: Any, attention: str | None, values: bool = True) -> Any:
    """Load a causal language model, without its stored weights if not ``values``. Of a model with
    vision, ``attention`` is that of the language layers; the vision tower keeps its own. Raises
    ValueError if the model computes its attention or its logits in another way."""
    from torch.nn import Linear
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    blind = Vision.of(folder) is None
    kind = AutoModelForCausalLM if blind else AutoModelForImageTextToText
    chosen: Any = attention if blind else {"text_config": attention, "vision_config": "sdpa"}
    config = AutoConfig.from_pretrained(folder)
    check_head(folder, config.get_text_config())
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": chosen}
    try:
        if values:
            model = kind.from_pretrained(folder, **settings)
        else:
            model = kind.from_config(config, **settings)
    except KeyError as error:
        if error.args != (attention,):
            raise
        raise ValueError(
            f"{folder}: {config.model_type} does not use transformers' attention interface, which"
            " trees need: take another model (docs/models.md)"
        ) from None
    head = model.get_output_embeddings()
    if type(head) is not Linear or head.bias is not None:
        more = "a bias" if type(head) is Linear else f"the class {type(head).__name__}"
        raise ValueError(f"{folder}: its head has {more}: take another model (docs/models.md)")
    return model


def stored(name: str) -> str:
    """Return the name under which a model folder of the family stores the parameter that a loaded
    model calls ``name``."""
    return name.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1)


def embed(causal: Any, tokens: Any, features: Any, rows: Any) -> Any:
    """Return the embeddings [1, tokens, width] of ids, in which the pictures' places get the rows
    ``rows`` of ``features`` in order."""
    embedded = causal.get_input_embeddings()(tokens.clamp(min=0))[None]
    at = (tokens < 0).nonzero()[:, 0]
    return embedded.index_copy(1, at, features[rows][None].to(embedded.dtype))


def encode(causal: Any, patches: Any, grids: Any) -> Any:
    """Return the features of pictures, one row for each of their tokens, picture after picture:
    [tokens, width]."""
    return causal.model.visual(patches, grid_thw=grids).pooler_output
