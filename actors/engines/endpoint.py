"""Any OpenAI-compatible chat endpoint as an engine, to measure models that are served elsewhere.

The tokens of this engine are UTF-8 bytes. A prompt is a list of chat messages as JSON, so it plays
only environments that show a fresh prompt each turn. Log-probabilities are 0: no training.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from coppice.actors.environments.base import SPLIT
from coppice.common import vision
from coppice.common.http import CHAT, Reached
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import GenerateRequest, GenerateResult, LoadRequest, LoadResult, Sample

_SEEDS = 2**31
"""Seeds are below this number, because some servers store a seed in 32 bits."""
_ESCAPED_SPLIT = re.compile(rf"(?<!\\)((?:\\\\)*)\\u{ord(SPLIT):04x}")


class EndpointText:
    """Text as UTF-8 bytes, one token each; messages as JSON with ``SPLIT`` and data URLs."""

    vocabulary = 0
    """No model's: see ``scheduler.growth.answers.sampled``."""

    def encode(self, text: str, pictures: Sequence[tuple[int, bytes]] = ()) -> np.ndarray:
        """Return the text's bytes as int32 [bytes]. pictures: in the JSON already."""
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        return tokens.astype(np.uint8).tobytes().decode("utf-8", "replace")

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], thinking: bool = True,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:  # fmt: skip
        """Return the messages as JSON. thinking: has no effect, because the endpoint renders its
        own template. Raises ValueError for tools."""
        if tools:
            raise ValueError("an endpoint does not play agents: it would have to be sent tools")
        sent = [dict(one) | {"content": _content(one["content"])} for one in messages]
        text = json.dumps(sent, ensure_ascii=False)
        return _ESCAPED_SPLIT.sub(lambda match: match[1] + SPLIT, text)


class EndpointEngine:
    """Implements ``actors.engines.base.Engine`` except ``load``."""

    text = EndpointText()

    def __init__(self, endpoint: Reached):
        self.endpoint = endpoint
        self.counts: Counter[str] = Counter()
        wants_key = {401: "it wants an API key: name its variable with --api-key-env"}
        self.client = endpoint.client({} if endpoint.api_key_env else wants_key)
        self.start, self.close = self.client.start, self.client.close
        self.url = f"{self.client.url}{CHAT}"

    async def died(self) -> str:
        """Never returns, because this engine lives as long as its process."""
        return await asyncio.get_running_loop().create_future()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return ``request.n`` replies. Raises DataFault when the endpoint refuses the request,
        and InfrastructureFault after the last attempt."""
        sampling = request.sampling
        if sampling.constraint is not None:
            raise DataFault(
                f"{self.url}: each server has its own field for a {sampling.constraint.kind}: set"
                " that field in `fields`"
            )
        if sampling.top_logprobs:
            raise DataFault(
                f"{self.url}: top_logprobs {sampling.top_logprobs}: ask an actor with the local"
                " engine"
            )
        body = {
            "model": self.endpoint.model,
            "messages": self._messages(request.tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
        }
        # Only fields that the request sets are sent, because some servers refuse fields that they
        # do not know.
        body |= {"top_k": sampling.top_k} if sampling.top_k else {}
        body |= {"n": request.n} if request.n > 1 else {}
        body |= {"stop": sampling.stop} if sampling.stop else {}
        body |= {"seed": sampling.seed % _SEEDS} if sampling.seed is not None else {}
        reply = await self.client.post(CHAT, body | self.endpoint.fields)
        try:
            samples = [self._sample(choice, sampling.stop) for choice in reply["choices"]]
            prompt, cached = self._count(reply.get("usage") or {})
        except (KeyError, TypeError, AttributeError) as error:
            raise InfrastructureFault(
                f"{self.url} answered what is not the chat protocol ({type(error).__name__}:"
                f" {error}): is it the right URL?"
            ) from None
        if len(samples) != request.n:
            raise InfrastructureFault(
                f"{self.url} answered {len(samples)} choices, expected n = {request.n}"
            )
        return GenerateResult(samples, prompt or len(request.tokens), cached)

    async def load(self, request: LoadRequest) -> LoadResult:
        raise InfrastructureFault(f"{self.url} is a chat endpoint: it takes no weights")

    def stats(self) -> dict[str, float]:
        """Return counters. Tokens are those of the replies' ``usage``."""
        return {**self.counts, **self.client.counts, "busy_s": self.client.busy_s, "version": 0}

    def _messages(self, tokens: np.ndarray) -> list[dict[str, Any]]:
        try:
            return msgspec.json.decode(self.text.decode(tokens), type=list[dict[str, Any]])
        except msgspec.DecodeError as error:
            raise DataFault(
                f"a prefix that is not one prompt ({error}): an endpoint plays environments with a"
                " fresh prompt each turn"
            ) from None

    def _sample(self, choice: dict[str, Any], stop: list[str]) -> Sample:
        tokens = self.text.encode(whole(choice, stop))
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
        nothing = np.zeros(len(tokens))
        return Sample(tokens, nothing.astype(np.float32), nothing.astype(np.int32), finish)

    def _count(self, usage: dict[str, Any]) -> tuple[int, int]:
        """Count a reply's tokens. Return those of the prompt and how many were cached."""
        prompt = usage.get("prompt_tokens") or 0
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self.counts["prompt_tokens"] += prompt
        self.counts["cached_tokens"] += cached
        self.counts["prefilled_tokens"] += prompt - cached
        self.counts["decoded_tokens"] += usage.get("completion_tokens") or 0
        self.counts["replies_without_usage"] += not usage
        return prompt, cached


def _content(content: str | Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """Return a message's content with its pictures as the chat protocol has them."""
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": {"url": vision.url(part["image"])}}
        if part["type"] == "image"
        else part
        for part in content
    ]


def whole(choice: dict[str, Any], stop: list[str]) -> str:
    """Return the reply with the stop string that ended it, which the protocol cuts off. vLLM and
    SGLang name it; for other servers a text whose last "<tag>" is open ended with "</tag>"."""
    text = choice["message"].get("content") or ""
    if choice.get("finish_reason") != "stop":
        return text
    for key in ("stop_reason", "matched_stop"):
        if key in choice:
            cut = choice[key]
            return text + cut if cut in stop and not text.endswith(cut) else text
    for end in stop:
        if end.startswith("</") and text.rfind(f"<{end[2:]}") > text.rfind(end):
            return text + end
    return text
