"""Answers of the OpenAI-compatible protocol: one whole body, or the chunks of a stream.

The chunks of a choice, joined, equal the choice of the whole body: a role (chat), texts with their
log-probabilities, and a finish reason. Log-probabilities refer to the distribution that was really
sampled from, after temperature, top-p/k and constraint.
"""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from coppice.actors.serving.pieces import Pieces, TokenText
from coppice.actors.serving.protocol import Asked, Chat
from coppice.wire.messages import GenerateResult, Sample

_Top = Sequence[Mapping[int, float]]


class Answer:
    """The answer to one request with ``choices`` samples in all. Sample j of prompt i is choice ``i
    * n + j``.

    An answer is either ``whole``, or a stream: ``opening``, then ``grown`` for each new token, then
    ``closing``."""

    def __init__(self, asked: Asked, model: str, tokenizer: tokenizers.Tokenizer, choices: int):
        self._asked, self._model = asked, model
        self.chat = isinstance(asked, Chat)
        self._id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._texts = [Pieces(tokenizer, asked.stops) for _ in range(choices)]
        self._fed = [0] * choices

    # ------------------------------------------------------------------------------------------
    # whole

    def whole(self, results: Sequence[GenerateResult]) -> dict[str, Any]:
        """Return the body of an answer that is not a stream."""
        choices = [
            self._choice(i, sample)
            for i, sample in enumerate(s for r in results for s in r.samples)
        ]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage(results)}

    def _choice(self, index: int, sample: Sample) -> dict[str, Any]:
        text = self._rest(index, sample)
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        )
        logprobs = self._logprobs(index)
        return {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": self._reason(index, sample),
        }

    # ------------------------------------------------------------------------------------------
    # stream

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks before the first token: the roles of a chat."""
        for index in range(len(self._texts) if self.chat else 0):
            yield self._chunk(
                {"index": index, "delta": {"role": "assistant", "content": ""}, **_UNFINISHED}
            )

    def grown(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[float], top: _Top = ()
    ) -> Iterator[dict[str, Any]]:
        """Yield at most one chunk with the text that new tokens of a choice make certain. top:
        empty, or as in ``wire.messages.Sample``."""
        text = self._feed(index, tokens, logprobs, top)
        if text:
            yield self._text_chunk(index, text)

    def closing(self, results: Sequence[GenerateResult]) -> Iterator[dict[str, Any]]:
        """Yield the rest of every choice, its finish reason, and the counts of tokens if they are
        asked for."""
        for index, sample in enumerate(s for result in results for s in result.samples):
            text = self._rest(index, sample)
            if text or (self._asked.wants_logprobs and self._texts[index].tokens):
                yield self._text_chunk(index, text)
            content: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
            reason = self._reason(index, sample)
            yield self._chunk(
                {"index": index, **content, "logprobs": None, "finish_reason": reason}
            )
        if self._asked.wants_usage:
            yield {**self._chunk(), "usage": usage(results)}

    def _text_chunk(self, index: int, text: str) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
        return self._chunk(
            {"index": index, **content, **_UNFINISHED, "logprobs": self._logprobs(index)}
        )

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        return {
            **head,
            "choices": list(choices),
            **({"usage": None} if self._asked.wants_usage else {}),
        }

    # ------------------------------------------------------------------------------------------
    # parts of both

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _feed(self, index: int, tokens: Sequence[int], logprobs: Sequence[float], top: _Top) -> str:
        self._fed[index] += len(tokens)
        rows = zip(tokens, logprobs, top or [{}] * len(tokens), strict=True)
        return "".join(self._texts[index].feed(*row) for row in rows)

    def _rest(self, index: int, sample: Sample) -> str:
        """Return the text of a sample that was not sent yet."""
        begin = self._fed[index]
        top = (sample.top or [])[begin:]
        new = self._feed(
            index, sample.tokens[begin:].tolist(), sample.logprobs[begin:].tolist(), top
        )
        return new + self._texts[index].finish()

    def _reason(self, index: int, sample: Sample) -> str:
        return "stop" if self._texts[index].stopped else sample.finish

    def _logprobs(self, index: int) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens since the last call, including the tokens of a
        stop string."""
        if not self._asked.wants_logprobs:
            return None
        tokens = self._texts[index].take()
        if self.chat:
            return chat_logprobs(tokens)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens]
            if self._asked.most_likely
            else None,
            "text_offset": [token.offset for token in tokens],
        }


_UNFINISHED: dict[str, Any] = {"logprobs": None, "finish_reason": None}


def chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    """Return log-probabilities as a choice of a chat has them."""
    return {"content": [_chat_logprob(token) for token in tokens], "refusal": None}


def _chat_logprob(token: TokenText) -> dict[str, Any]:
    top = [_entry(text, logprob) for text, logprob in token.top]
    return {**_entry(token.text, token.logprob), "top_logprobs": top}


def _entry(text: str, logprob: float) -> dict[str, Any]:
    # The bytes of a token that is a part of a character are not known here.
    return {
        "token": text,
        "logprob": logprob,
        "bytes": None if "\ufffd" in text else list(text.encode()),
    }


def _by_text(token: TokenText) -> dict[str, float]:
    """Return the most probable tokens and the sampled token, by text. If texts are equal, the
    sampled, else the most probable token counts."""
    logprobs: dict[str, float] = {}
    for text, logprob in token.top:
        logprobs.setdefault(text, logprob)
    return logprobs | {token.text: token.logprob}


def usage(results: Sequence[GenerateResult]) -> dict[str, Any]:
    """Return the counts of tokens. A prompt counts once, whatever the number of its samples."""
    prompt = sum(result.prompt_tokens for result in results)
    completion = sum(len(sample.tokens) for result in results for sample in result.samples)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(result.cached_tokens for result in results)},
    }
