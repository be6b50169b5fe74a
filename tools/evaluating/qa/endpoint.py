"""A chat endpoint that answers in several turns: what it said are its messages, what it was shown are the user's.

The journal's tokens are bytes, as in ``actors.engines.endpoint``; the bytes that the model wrote are stored plus 256, so that a prefix says
who wrote what and can be asked for as a conversation.
"""

from typing import Any

import msgspec
import numpy as np

from actors.engines.base import OnTokens
from actors.engines.endpoint import Endpoint, EndpointEngine, EndpointText
from wire.faults import DataFault
from wire.messages import GenerateRequest, GenerateResult, Sample

_ITS_OWN = 256
_OPENING = "<answer>"
_INSTEAD = "No steps are left. Reply with your final answer alone: <answer> answer </answer>"
"""A chat protocol cannot begin the model's reply, so a forced answer is asked for in words."""


class ChatText(EndpointText):
    """Bytes of either writer as text."""

    def decode(self, tokens: np.ndarray) -> str:
        """The text, whoever wrote it."""
        return super().decode(tokens % _ITS_OWN)


class ChatEngine(EndpointEngine):
    """``EndpointEngine`` for observations that are appended to one growing text."""

    def __init__(self, endpoint: Endpoint):
        super().__init__(endpoint)
        self.text = ChatText()

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> GenerateResult:
        """See ``EndpointEngine.generate``; what follows the opening of a forced answer comes without that opening."""
        result = await super().generate(request, on_tokens)
        forced = self.text.decode(request.tokens).endswith(_OPENING)
        samples = [self._own(sample, forced) for sample in result.samples]
        return msgspec.structs.replace(result, samples=samples)

    def _own(self, sample: Sample, forced: bool) -> Sample:
        text = self.text.decode(sample.tokens)
        tokens = self.text.encode(text.split(_OPENING, 1)[-1] if forced else text) + _ITS_OWN
        return Sample(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), sample.finish)

    def _messages(self, tokens: np.ndarray) -> list[dict[str, str]]:
        """The prompt's messages, then each stretch of one writer."""
        edges = np.flatnonzero(np.diff(tokens >= _ITS_OWN)) + 1
        parts: list[Any] = np.split(tokens, edges)
        first = self.text.decode(parts[0])
        try:
            messages = msgspec.json.decode(first, type=list[dict[str, str]])
        except msgspec.DecodeError as error:
            raise DataFault(f"a prefix that begins with no prompt ({error})") from None
        for part in parts[1:]:
            role = "assistant" if part[0] >= _ITS_OWN else "user"
            messages.append({"role": role, "content": self.text.decode(part)})
        last = messages[-1]
        if last["role"] == "user" and len(messages) > 1 and last["content"].endswith(_OPENING):
            last["content"] = last["content"].removesuffix(_OPENING) + _INSTEAD
        return messages
