"""A sample's text as it grows: complete characters only, up to the first stop string and never into what may begin one.

Put together, the pieces are the text that decoding all tokens at once and cutting at the first stop string gives.
"""

from collections.abc import Mapping, Sequence

import msgspec
import tokenizers

_BROKEN = "\ufffd"
"""What an incomplete character decodes to."""


class TokenText(msgspec.Struct):
    """One sampled token. text: alone, special tokens written out. offset: characters before it in the whole text.

    top: texts and log-probabilities of the most probable tokens in its place, descending; empty unless they are asked for.
    """

    text: str
    logprob: float
    offset: int
    top: list[tuple[str, float]] = []


class Pieces:
    """The text of one sample.

    growing --feed--> growing --feed (a stop string came) or finish--> ended, where feeding does nothing
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, stops: Sequence[str]):
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens: list[int] = []
        self._from, self._read = 0, 0
        """Where the tokens begin that are decoded for context, and those whose text is not out of the tokenizer yet."""
        self._held = ""
        self._length = 0
        self.stopped = False
        """A stop string ended the text."""
        self.tokens: list[TokenText] = []
        """Those since ``take``."""

    def feed(self, token: int, logprob: float, top: Mapping[int, float] = {}) -> str:
        """The text that ``token`` makes certain. top: see ``wire.messages.Sample``."""
        likely = [(self._spelled(other), value) for other, value in top.items()]
        self.tokens.append(TokenText(self._spelled(token), logprob, self._length, likely))
        self._tokens.append(token)
        if self.stopped:
            return ""
        return self._cut(self._decoded(whole=False), last=False)

    def finish(self) -> str:
        """The rest of the text."""
        return "" if self.stopped else self._cut(self._decoded(whole=True), last=True)

    def take(self) -> list[TokenText]:
        """The tokens fed since the last call."""
        taken, self.tokens = self.tokens, []
        return taken

    def _spelled(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _decoded(self, whole: bool) -> str:
        """New text; an incomplete character at its end waits unless ``whole``."""
        before = self._tokenizer.decode(self._tokens[self._from : self._read], skip_special_tokens=True)
        text = self._tokenizer.decode(self._tokens[self._from :], skip_special_tokens=True)
        if text.endswith(_BROKEN) and not whole:
            return ""
        self._from, self._read = self._read, len(self._tokens)
        return text[len(before) :]

    def _cut(self, new: str, last: bool) -> str:
        """What of the held text and ``new`` is certain."""
        text = self._held + new
        self._length += len(new)
        found = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The longest end of ``text`` that begins ``stop`` without completing it, in characters."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
