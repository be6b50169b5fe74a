"""A chat endpoint that answers in several turns. The model's text becomes assistant messages, all
other text user messages.

The journal's tokens are bytes, as in ``actors.engines.endpoint``. A byte that the model wrote is
stored plus 256, so a prefix says who wrote which part and can be sent as a conversation.
"""

from typing import Any

import msgspec
import numpy as np

from coppice.actors.engines.endpoint import EndpointEngine, EndpointText
from coppice.wire.faults import DataFault
from coppice.wire.messages import GenerateRequest, GenerateResult, Sample

_ITS_OWN = 256
_OPENING = "<answer>"
_INSTEAD = "No steps are left. Reply with your final answer alone: <answer> answer </answer>"
"""Asks for a forced answer in words, because the chat protocol cannot begin the model's reply."""


class ChatText(EndpointText):
    """Decodes bytes of both writers."""

    def decode(self, tokens: np.ndarray) -> str:
        return super().decode(tokens % _ITS_OWN)


class ChatEngine(EndpointEngine):
    """``EndpointEngine`` for observations that are appended to one growing text."""

    text = ChatText()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """See ``EndpointEngine.generate``. If the prefix opens a forced answer, the opening is
        removed from the reply."""
        result = await super().generate(request)
        forced = self.text.decode(request.tokens).endswith(_OPENING)
        samples = [self._own(sample, forced) for sample in result.samples]
        return msgspec.structs.replace(result, samples=samples)

    def _own(self, sample: Sample, forced: bool) -> Sample:
        text = self.text.decode(sample.tokens)
        text = text.split(_OPENING, 1)[-1] if forced else text
        tokens = self.text.encode(text or " ") + _ITS_OWN  # an action has a token at least
        n = len(tokens)
        return Sample(tokens, np.zeros(n, np.float32), np.zeros(n, np.int32), sample.finish)

    def _messages(self, tokens: np.ndarray) -> list[dict[str, str]]:
        """The prompt's messages, then one message per stretch of the same writer."""
        edges = np.flatnonzero(np.diff(tokens >= _ITS_OWN)) + 1
        parts: list[Any] = np.split(tokens, edges)
        first = self.text.decode(parts[0])
        try:
            messages = msgspec.json.decode(first, type=list[dict[str, str]])
        except msgspec.DecodeError as error:
            expected = "the prefix does not begin with a prompt's messages"
            raise DataFault(f"{expected} ({error})") from None
        for part in parts[1:]:
            role = "assistant" if part[0] >= _ITS_OWN else "user"
            messages.append({"role": role, "content": self.text.decode(part)})
        last = messages[-1]
        if last["role"] == "user" and len(messages) > 1 and last["content"].endswith(_OPENING):
            last["content"] = last["content"].removesuffix(_OPENING) + _INSTEAD
        return messages
