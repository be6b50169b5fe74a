"""The speaker plug-in: a class with one coroutine that replies in text, served as
``speaker.<name>`` beside the judges."""

import asyncio

from coppice.common.numbers import NotNegative
from coppice.judges.llm import ChatClient, ChatEndpoint
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import SpeakRequest


class Speaker:
    """Subclass this, set ``name`` and write ``speak``. concurrency: requests in progress at once."""

    name: str = ""
    concurrency: int = 64

    async def start(self) -> None:
        """Acquire what speaking needs. Called once, before the first request."""

    async def speak(self, request: SpeakRequest) -> str:
        """Return the reply to ``request.messages``, without a stop string. Any exception is a fault
        of the call."""
        raise NotImplementedError(f"{type(self).__name__} does not implement speak")

    async def close(self) -> None:
        """Release what ``start`` acquired."""


class Chat(Speaker):
    """The model behind an OpenAI-compatible endpoint. temperature: of its replies, None for that of
    the policy's own samples.

    endpoint.max_tokens and endpoint.temperature have no effect, because the request says both. A
    reply that does not come within endpoint.patience_s is an InfrastructureFault, so the call is
    tried again.
    """

    name = "chat"

    def __init__(self, endpoint: ChatEndpoint, temperature: NotNegative | None = None):
        self.client, self.temperature, self.concurrency = (
            ChatClient(endpoint),
            temperature,
            endpoint.concurrency,
        )

    async def start(self) -> None:
        await self.client.start()

    async def close(self) -> None:
        await self.client.close()

    async def speak(self, request: SpeakRequest) -> str:
        """Raises DataFault when the endpoint refuses the request, for example because the messages
        are longer than its context."""
        patience = self.client.endpoint.patience_s
        temperature = request.temperature if self.temperature is None else self.temperature
        fields = {
            "max_tokens": request.max_tokens,
            "temperature": temperature,
            "seed": request.seed % 2**31,
        }
        try:
            async with asyncio.timeout(patience):
                return await self.client.chat(
                    request.messages, fields | ({"stop": request.stop} if request.stop else {})
                )
        except TimeoutError:
            raise InfrastructureFault(
                f"{self.client.http.url} gave no reply within {patience:g} s (patience_s)"
            ) from None


class Frozen(Chat):
    """The same under another name, for a frozen copy of the starting policy: endpoint.url =
    "served" and judges.model.name = "policy"."""

    name = "frozen"
