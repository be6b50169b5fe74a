"""The built-in speakers: the model behind an OpenAI-compatible endpoint."""

from coppice.common.numbers import NotNegative
from coppice.judges.base import Speaker
from coppice.judges.llm import ChatClient, ChatEndpoint
from coppice.wire.messages import SpeakRequest


class Chat(Speaker):
    """temperature: of its replies, None for that of the policy's own samples.

    endpoint.max_tokens and endpoint.temperature have no effect, because the request says both.
    """

    name = "chat"

    def __init__(self, endpoint: ChatEndpoint, temperature: NotNegative | None = None):
        self.client, self.temperature = ChatClient(endpoint), temperature
        self.concurrency = endpoint.concurrency

    async def start(self) -> None:
        await self.client.start()

    async def close(self) -> None:
        await self.client.close()

    async def speak(self, request: SpeakRequest) -> str:
        """Raises InfrastructureFault when no reply comes, and DataFault when the endpoint refuses
        the request, for example because the messages are longer than its context."""
        temperature = request.temperature if self.temperature is None else self.temperature
        fields = {
            "max_tokens": request.max_tokens,
            "temperature": temperature,
            "seed": request.seed % 2**31,
        }
        if request.stop:
            fields["stop"] = request.stop
        return await self.client.chat(request.messages, fields)


class Frozen(Chat):
    """The same under another name, for a frozen copy of the starting policy: endpoint.url =
    "served" and judges.model.name = "policy"."""

    name = "frozen"
