"""A request and its samples. The request waits, is prefilled (its prefix grows chunk by chunk),
then has n samples that decode."""

import functools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import tokenizers
import torch

from coppice.actors.engines.attend import Chunk
from coppice.actors.engines.grammar import Matcher
from coppice.actors.engines.memory import Shelf, Stretch
from coppice.actors.engines.sampling import key
from coppice.common import vision
from coppice.common.support import encode
from coppice.wire.faults import DataFault
from coppice.wire.messages import GenerateRequest, GenerateResult, Sample


class ActiveRequest:
    """A request until its last sample is done. positions: int64 [3, prompt] with pictures."""

    def __init__(
        self, request: GenerateRequest, seed: int, matcher: Matcher | None = None,
        positions: np.ndarray | None = None,
    ):  # fmt: skip
        self.request, self.matcher = request, matcher
        self.prompt = np.ascontiguousarray(request.tokens, np.int32)
        self.positions = positions
        self.shown = vision.runs(self.prompt) if positions is not None else []
        """The prompt's pictures."""
        self.end = len(self.prompt) if positions is None else int(positions.max()) + 1
        """The position of the first sampled token: a picture takes fewer positions than tokens."""
        self.future: Future[GenerateResult] = Future()
        self.samples: list[Sample | None] = [None] * request.n
        self.left = request.n
        self.seed = request.sampling.seed if request.sampling.seed is not None else seed
        self.cached = 0
        self.version = 0
        """The policy version when the request was admitted."""
        self.clock: dict[str, float] = {"queue": time.monotonic()}
        """When each phase began."""
        self.prefix: Stretch
        """The place of the prompt's keys and values, from its admission on."""
        self.tails: Shelf
        """The shelf of its samples' keys and values."""
        self.ending: torch.Tensor | None = None
        """The final hidden state of the last prompt token, if known."""
        self.experts: list[np.ndarray] = []
        """Those of the prompt's computed tokens, if asked for: pieces [tokens, layers * k]."""

    @property
    def routed(self) -> bool:
        """Whether the samples report experts."""
        return self.request.sampling.experts_from >= 0

    @property
    def missing(self) -> int:
        """The prompt tokens that are not computed yet, once the request is admitted."""
        return len(self.prompt) - self.prefix.length

    def where(self, start: int, end: int) -> np.ndarray:
        """Return the positions of prompt tokens, int64 [tokens] or [3, tokens]."""
        return np.arange(start, end) if self.positions is None else self.positions[:, start:end]

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase, of which the last ends now."""
        ends = [*self.clock.values(), time.monotonic()][1:]
        phases = zip(self.clock.items(), ends, strict=True)
        return {name: end - start for (name, start), end in phases}


class Running:
    """One sample that decodes, with a tail of keys and values of all its tokens but the last."""

    def __init__(self, owner: ActiveRequest, index: int, tail: Any):
        self.owner, self.index, self.tail = owner, index, tail
        self.key = key(owner.seed, index)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        asks_top = owner.request.sampling.top_logprobs > 0
        self.top: list[dict[int, float]] | None = [] if asks_top else None
        self.support: list[np.ndarray] = []
        self.experts: list[np.ndarray] = []
        """Those of each token but the last, if asked for: [layers * k]."""
        self.matcher = owner.matcher.copy() if owner.matcher is not None else None

    @property
    def position(self) -> int:
        """The position of the last token, which is not in the tail yet."""
        return self.owner.end + len(self.tokens) - 1

    def context(self) -> np.ndarray:
        """Return the tokens whose keys and values exist, int32 [tokens]."""
        return np.concatenate([self.owner.prompt, np.array(self.tokens[:-1], np.int32)])

    def read(self, start: int, end: int) -> torch.Tensor:
        """Return keys and values of ``context``, as ``radix.Read`` does."""
        prompt = len(self.owner.prompt)
        if start >= prompt:
            return self.tail.view(start - prompt, end - prompt)
        parts = self.owner.prefix.view(start, prompt), self.tail.view(0, end - prompt)
        return torch.cat(parts, 3)

    def sample(self, finish: Any) -> Sample:
        tokens, versions = np.array(self.tokens, np.int32), np.array(self.versions, np.int32)
        left = encode(self.support) if self.owner.request.sampling.support else None
        logprobs, experts = np.array(self.logprobs, np.float32), None
        if pieces := self.owner.experts:
            experts = np.concatenate([*pieces, *(row[None] for row in self.experts)])
            experts = experts[self.owner.request.sampling.experts_from - self.owner.cached :]
        return Sample(tokens, logprobs, versions, finish, self.top, left, experts)


class StopStrings:
    """Looks for stop strings after each token. The end of a sample is decoded only when the token
    has a stop string's last character or is a part of a character."""

    MARGIN = 8
    """Further characters to decode: decoding from the middle may change the first."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def found(self, tokens: list[int], stops: Sequence[str]) -> bool:
        """Return whether the text of ``tokens`` has one of ``stops``, which the text without the
        last token must not have had."""
        last = tokens[-1]
        if last not in self._texts:
            # decoded twice in a row, because some decoders drop a space at the start
            self._texts[last] = self._tokenizer.decode([last, last], skip_special_tokens=False)
        text = self._texts[last]
        if not any(not stop or stop[-1] in text for stop in stops) and "\ufffd" not in text:
            return False
        count = enough = max(map(len, stops)) + self.MARGIN
        while True:
            ending = self._tokenizer.decode(tokens[-count:], skip_special_tokens=False)
            if len(ending) >= enough or count >= len(tokens):
                return any(stop in ending for stop in stops)
            count *= 2


PICTURES_KEPT = 64
"""The most pictures whose features are kept: those that a turn's samples share."""


class Pictures:
    """Features are kept for the current weights: new weights must be followed by ``forget``.
    ``positions`` may be called anywhere, the rest on the engine's thread."""

    def __init__(self, model: Any, processor: vision.Vision):
        self._model, self._processor = model, processor
        self._encoded = functools.lru_cache(PICTURES_KEPT)(self._encode)

    def positions(self, request: GenerateRequest) -> np.ndarray | None:
        """Return a prompt's positions, int64 [3, prompt]; None without pictures."""
        if not (request.tokens < 0).any():
            return None
        return self._processor.sequence(request.tokens, request.images)

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
        self._encoded.cache_clear()

    def _encode(self, png: bytes) -> torch.Tensor:
        arrays = self._processor.pixels([png])
        patches, grids = (torch.from_numpy(array).to(self._model.device) for array in arrays)
        return vision.encode(self._model, patches, grids)


def check_room(request: GenerateRequest, needed: int, budget: int) -> None:
    """Raise DataFault if a request needs more bytes of keys and values than there are at all."""
    if needed > budget:
        raise DataFault(
            f"{request.n} samples of {request.sampling.max_tokens} need {needed / 2**30:.4f} GiB of"
            f" keys and values: expected at most actors.kv_cache_gib={budget / 2**30:.4f}"
        )
