"""What the embedded engine does with the pictures of a prompt: positions when the request arrives,
features when its tokens are computed."""

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
"""The pictures whose features are kept: all samples of a tree's turn show the same few pictures,
and prompts are computed chunk by chunk."""


class Sight:
    """The pictures of one engine. ``positions`` may be called anywhere, everything else on the
    engine's thread.

    Invariant: kept features are of the current weights, so new weights must be followed by
    ``forget``.
    """

    def __init__(self, model: Any, processor: vision.Vision):
        self._model, self._processor = model, processor
        self._features: OrderedDict[bytes, torch.Tensor] = OrderedDict()

    def positions(self, request: GenerateRequest) -> np.ndarray | None:
        """Return the positions of a prompt with pictures, int64 [3, prompt], else None. Raises
        DataFault if pictures and ids do not fit."""
        if not (request.tokens < 0).any():
            return None
        try:
            return self._processor.sequence(request.tokens, request.images)
        except ValueError as error:
            raise DataFault(str(error)) from None

    def features(self, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """Return the features of the picture tokens of ``chunks`` in order, [picture tokens,
        width]; None if there are none."""
        pieces: list[torch.Tensor] = []
        for chunk in chunks:
            owner, start, end = (
                chunk.prefix.owner,
                chunk.prefix.length,
                chunk.prefix.length + chunk.count,
            )
            for run in owner.shown:
                if run.start < end and run.end > start:
                    whole = self._encoded(owner.request.images[run.number])
                    pieces.append(
                        whole[max(start, run.start) - run.start : min(end, run.end) - run.start]
                    )
        return torch.cat(pieces) if pieces else None

    def forget(self) -> None:
        """Drop all features, because the weights have changed."""
        self._features.clear()

    def _encoded(self, png: bytes) -> torch.Tensor:
        if png not in self._features:
            patches, grids = (
                torch.from_numpy(array).to(self._model.device)
                for array in self._processor.pixels([png])
            )
            self._features[png] = vision.encode(self._model, patches, grids)
            if len(self._features) > KEPT:
                self._features.popitem(last=False)
        self._features.move_to_end(png)
        return self._features[png]
