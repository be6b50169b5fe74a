"""The text of a sample in pieces, while it grows. Only complete characters are given out, and no
text that may belong to a stop string.

The joined pieces equal the text of all tokens decoded at once and cut at the first stop string.
"""

from collections.abc import Mapping, Sequence

import msgspec
import tokenizers

_BROKEN = "\ufffd"
"""The result of decoding an incomplete character."""


class TokenText(msgspec.Struct):
    """One sampled token. text: the token decoded alone, even if it is a special token. offset:
    characters before it in the whole text.

    top: texts and log-probabilities of the most probable tokens in its place, descending; empty
    unless they are asked for.
    """

    text: str
    logprob: float
    offset: int
    top: list[tuple[str, float]] = []


class Pieces:
    """The text of one sample.

    growing --feed--> growing --feed (which completes a stop string) or finish--> ended, where
    ``feed`` returns ""
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, stops: Sequence[str]):
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens: list[int] = []
        self._from, self._read = 0, 0
        """The index of the first token that is decoded for context, and of the first token whose
        text is still unknown."""
        self._held = ""
        self._length = 0
        self.stopped = False
        """Whether a stop string ended the text."""
        self.tokens: list[TokenText] = []
        """The tokens since the last ``take``."""

    def feed(self, token: int, logprob: float, top: Mapping[int, float] = {}) -> str:
        """Return the text that ``token`` makes certain. top: see ``wire.messages.Sample``."""
        likely = [(self._spelled(other), value) for other, value in top.items()]
        self.tokens.append(TokenText(self._spelled(token), logprob, self._length, likely))
        self._tokens.append(token)
        if self.stopped:
            return ""
        return self._cut(self._decoded(whole=False), last=False)

    def finish(self) -> str:
        """Return the rest of the text."""
        return "" if self.stopped else self._cut(self._decoded(whole=True), last=True)

    def take(self) -> list[TokenText]:
        """Return the tokens fed since the last call."""
        taken, self.tokens = self.tokens, []
        return taken

    def _spelled(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _decoded(self, whole: bool) -> str:
        """Return the new text. If it ends in an incomplete character, it waits for more tokens
        unless ``whole``."""
        before = self._tokenizer.decode(
            self._tokens[self._from : self._read], skip_special_tokens=True
        )
        text = self._tokenizer.decode(self._tokens[self._from :], skip_special_tokens=True)
        if text.endswith(_BROKEN) and not whole:
            return ""
        self._from, self._read = self._read, len(self._tokens)
        return text[len(before) :]

    def _cut(self, new: str, last: bool) -> str:
        """Return the part of the held text and ``new`` that is certain, and hold the rest."""
        text = self._held + new
        self._length += len(new)
        ends = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        keep = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is a beginning of ``stop`` but not all
    of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
