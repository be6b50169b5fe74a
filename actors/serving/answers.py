"""Answers of OpenAI's protocol whose text is sent while it grows: one body, or chunks of a stream.

The chunks of a choice, joined, equal the choice of the whole body: a role (chat), texts with their
log-probabilities, and a finish reason. Log-probabilities refer to the distribution that was really
sampled from, after temperature, top-p/k and constraint.
"""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import tokenizers

from coppice.actors.serving.protocol import ChatFields, CompletionFields
from coppice.actors.serving.replies import usage
from coppice.wire.messages import GenerateResult, Sample

_Top = Sequence[Mapping[int, float]]
_BROKEN = "\ufffd"
"""The result of decoding an incomplete character."""
_UNFINISHED: dict[str, Any] = {"logprobs": None, "finish_reason": None}


class TokenText(msgspec.Struct):
    """One sampled token. text: decoded alone, also of a special token. offset: characters before
    it. top: texts and log-probabilities of the most probable tokens, descending."""

    text: str
    logprob: float
    offset: int
    top: list[tuple[str, float]] = []


class Pieces:
    """The text of one sample, in pieces while it grows: only complete characters, and nothing that
    may belong to a stop string. Joined, they equal all tokens decoded at once and cut at the first
    stop string."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, stops: Sequence[str]):
        self._tokenizer, self._stops = tokenizer, stops
        self._tokens: list[int] = []
        self._from, self._read = 0, 0
        """The first token decoded for context, and the first one whose text is unknown."""
        self._held, self._length = "", 0
        self.stopped = False
        """Whether a stop string ended the text."""
        self.tokens: list[TokenText] = []
        """The tokens since the last ``take``."""

    @property
    def fed(self) -> int:
        """The number of tokens fed so far."""
        return len(self._tokens)

    def feed(self, token: int, logprob: float, top: Mapping[int, float] = {}) -> str:
        """Return the text that ``token`` makes certain. top: see ``wire.messages.Sample``."""
        likely = [(self._spelled(other), value) for other, value in top.items()]
        self.tokens.append(TokenText(self._spelled(token), logprob, self._length, likely))
        self._tokens.append(token)
        return self.finish(last=False)

    def finish(self, last: bool = True) -> str:
        """Return the rest of the text. last: also an incomplete character and what is held."""
        if self.stopped:
            return ""
        context = self._tokens[self._from : self._read]
        before = self._tokenizer.decode(context, skip_special_tokens=True)
        text = self._tokenizer.decode(self._tokens[self._from :], skip_special_tokens=True)
        if last or not text.endswith(_BROKEN):
            self._from, self._read = self._read, len(self._tokens)
            self._held += text[len(before) :]
            self._length += len(text) - len(before)
        text = self._held
        if ends := [place for place in map(text.find, self._stops) if place >= 0]:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        keep = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def take(self) -> list[TokenText]:
        """Return the tokens fed since the last call."""
        taken, self.tokens = self.tokens, []
        return taken

    def _spelled(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop`` but is not all."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class Answer:
    """The answer to one request with ``choices`` samples in all. Sample j of prompt i is choice ``i
    * n + j``. An answer is either ``whole``, or a stream: ``opening``, then ``grown`` for each new
    token, then ``closing``."""

    def __init__(
        self, fields: ChatFields | CompletionFields, model: str, tokenizer: Any, choices: int
    ):
        self._fields, self.chat = fields, isinstance(fields, ChatFields)
        self._top = fields.top_logprobs if isinstance(fields, ChatFields) else fields.logprobs
        self._wants_logprobs = fields.logprobs is not None and fields.logprobs is not False
        self._head = {"id": f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"}
        self._head |= {"created": int(time.time()), "model": model}
        self._texts = [Pieces(tokenizer, fields.stops) for _ in range(choices)]

    def whole(self, results: Sequence[GenerateResult]) -> dict[str, Any]:
        """Return the body of an answer that is not a stream."""
        choices = []
        for index, sample in enumerate(s for result in results for s in result.samples):
            text = self._rest(index, sample)
            content = {"message": {"role": "assistant", "content": text}}
            choice = {"index": index, **(content if self.chat else {"text": text})}
            choice["logprobs"] = self._logprobs(index)
            choices.append(choice | {"finish_reason": self._reason(index, sample)})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": _usage(results)}

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks before the first token: the roles of a chat."""
        for index in range(len(self._texts) if self.chat else 0):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk({"index": index, "delta": delta, **_UNFINISHED})

    def grown(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[float], top: _Top = ()
    ) -> Iterator[dict[str, Any]]:
        """Yield at most one chunk with the text that new tokens make certain."""
        if text := self._feed(index, tokens, logprobs, top):
            yield self._text_chunk(index, text)

    def closing(self, results: Sequence[GenerateResult]) -> Iterator[dict[str, Any]]:
        """Yield the rest of every choice, its finish reason, and the counts of tokens."""
        for index, sample in enumerate(s for result in results for s in result.samples):
            text = self._rest(index, sample)
            if text or (self._wants_logprobs and self._texts[index].tokens):
                yield self._text_chunk(index, text)
            content: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
            end = _UNFINISHED | {"finish_reason": self._reason(index, sample)}
            yield self._chunk({"index": index, **content, **end})
        if self._fields.wants_usage:
            yield {**self._chunk(), "usage": _usage(results)}

    def _text_chunk(self, index: int, text: str) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
        logprobs = _UNFINISHED | {"logprobs": self._logprobs(index)}
        return self._chunk({"index": index, **content, **logprobs})

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        counts = {"usage": None} if self._fields.wants_usage else {}
        return {**self._head, "object": kind, "choices": list(choices), **counts}

    def _feed(self, index: int, tokens: Sequence[int], logprobs: Sequence[float], top: _Top) -> str:
        rows = zip(tokens, logprobs, top or [{}] * len(tokens), strict=True)
        return "".join(self._texts[index].feed(*row) for row in rows)

    def _rest(self, index: int, sample: Sample) -> str:
        """Return the text of a sample that was not sent yet."""
        left = slice(self._texts[index].fed, None)
        tokens, logprobs = sample.tokens[left].tolist(), sample.logprobs[left].tolist()
        new = self._feed(index, tokens, logprobs, (sample.top or [])[left])
        return new + self._texts[index].finish()

    def _reason(self, index: int, sample: Sample) -> str:
        return "stop" if self._texts[index].stopped else sample.finish

    def _logprobs(self, index: int) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens since the last call."""
        if not self._wants_logprobs:
            return None
        tokens = self._texts[index].take()
        if self.chat:
            return chat_logprobs(tokens)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens] if self._top else None,
            "text_offset": [token.offset for token in tokens],
        }


def chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    """Return log-probabilities as a choice of a chat has them."""
    content = []
    for token in tokens:
        top = [_entry(text, logprob) for text, logprob in token.top]
        content.append({**_entry(token.text, token.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    # the bytes of a token that is a part of a character are not known here
    spelled = None if _BROKEN in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": spelled}


def _by_text(token: TokenText) -> dict[str, float]:
    """Return log-probabilities by text. Of equal texts the sampled, then the best counts."""
    logprobs: dict[str, float] = {}
    for text, logprob in token.top:
        logprobs.setdefault(text, logprob)
    return logprobs | {token.text: token.logprob}


def _usage(results: Sequence[GenerateResult]) -> dict[str, Any]:
    sampled = sum(len(sample.tokens) for result in results for sample in result.samples)
    cached = sum(result.cached_tokens for result in results)
    return usage(sum(result.prompt_tokens for result in results), cached, sampled)
