"""The pictures of prompts in the embedded engine: positions when a request arrives, features when
its tokens are computed."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from coppice.actors.engines.attend import Chunk
from coppice.common import vision
from coppice.wire.faults import DataFault
from coppice.wire.messages import GenerateRequest

KEPT = 64
"""The most pictures whose features are kept: those that a turn's samples share."""


class Pictures:
    """Features are kept for the current weights: new weights must be followed by ``forget``.
    ``positions`` may be called anywhere, the rest on the engine's thread."""

    def __init__(self, model: Any, processor: vision.Vision):
        self._model, self._processor = model, processor
        self._features: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def positions(self, request: GenerateRequest) -> np.ndarray | None:
        """Return a prompt's positions, int64 [3, prompt]; None without pictures."""
        if not (request.tokens < 0).any():
            return None
        try:
            return self._processor.sequence(request.tokens, request.images)
        except ValueError as error:
            raise DataFault(str(error)) from None

    def features(self, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """Return the chunks' features [picture tokens, width]; None if there are none."""
        pieces: list[torch.Tensor] = []
        for chunk in chunks:
            owner, start = chunk.prefix.owner, chunk.prefix.length
            end = start + chunk.count
            for run in owner.shown:
                if run.start < end and run.end > start:
                    whole = self._encoded(owner.request.images[run.number])
                    first, last = max(start, run.start), min(end, run.end)
                    pieces.append(whole[first - run.start : last - run.start])
        return torch.cat(pieces) if pieces else None

    def forget(self) -> None:
        """Drop all features, because the weights have changed."""
        self._features.clear()

    def _encoded(self, png: bytes) -> torch.Tensor:
        if png not in self._features:
            arrays = self._processor.pixels([png])
            patches, grids = (torch.from_numpy(array).to(self._model.device) for array in arrays)
            self._features[png] = vision.encode(self._model, patches, grids)
            if len(self._features) > KEPT:
                self._features.popitem(last=False)
        self._features.move_to_end(png)
        return self._features[png]
