"""Judges and speakers that ask a language model over the OpenAI chat protocol: the client, the
prompt templates, and the form to which a server can keep replies."""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from coppice.common.http import CHAT, NoAnswer, Reached
from coppice.judges.base import Judge, Speaker
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import JudgedTurn, Judgement, SpeakRequest

PROMPTS = Path(__file__).parent / "prompts"
PATIENCE_S = 110.0
"""The default limit of one reply. It is shorter than the scheduler's default deadline of a
judgement."""
_LOOK_S = 0.5
"""Seconds between two checks whether the server answers, and the limit of one check."""
_FEWEST = 16
"""The least room, in characters, that each free text of a constrained reply needs."""


class ChatEndpoint(Reached, frozen=True, forbid_unknown_fields=True):
    """An endpoint and its settings, see ``common.http.Reached``. patience_s: limit of all attempts
    for one reply. It must be less than scheduler.judge_deadline_s, so that a missing reply becomes
    an invalid judgement and not a failed call. constrain: whose request field keeps a reply to the
    judge's form, "" for none. wait_s: seconds to wait at the start for the answer to /models."""

    timeout_s: float = 120.0
    attempts: int = 3
    backoff_s: float = 0.5
    concurrency: int = 32
    patience_s: float = PATIENCE_S
    max_tokens: int = 512
    temperature: float = 0.0
    constrain: Literal["", "sglang", "vllm"] = ""
    wait_s: float = 0.0


class ChatClient:
    """Asks one endpoint: ``start``, any number of questions, ``close``."""

    def __init__(self, endpoint: ChatEndpoint):
        self.endpoint = endpoint
        self.http = endpoint.client()

    async def start(self) -> None:
        """Open the connection pool and, with ``wait_s``, wait for the server. Raises ValueError
        without an API key, and InfrastructureFault when the server does not answer."""
        await self.http.start()
        wait_s, end = self.endpoint.wait_s, time.monotonic() + self.endpoint.wait_s
        while wait_s:
            try:
                await self.http.get("/models", timeout_s=_LOOK_S, attempts=1)
                break
            # any other fault is an answer (such as a wrong key) and ends the wait
            except NoAnswer as fault:
                if time.monotonic() + _LOOK_S > end:
                    late = f"no server after {wait_s:g} s (wait_s): {fault}"
                    raise InfrastructureFault(late) from None
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Close the connection pool."""
        await self.http.close()

    async def chat(self, messages: list[dict[str, str]], fields: dict[str, Any]) -> str:
        """Return the reply to chat messages. fields: of the request, before the endpoint's own.
        Raises InfrastructureFault after the last attempt or ``patience_s``, and DataFault when the
        endpoint refuses the request. Both name the cause."""
        endpoint, url = self.endpoint, f"{self.http.url}{CHAT}"
        request = {
            "model": endpoint.model,
            "messages": messages,
            "temperature": endpoint.temperature,
            "max_tokens": endpoint.max_tokens,
            **fields,
            **endpoint.fields,
        }
        try:
            async with asyncio.timeout(endpoint.patience_s):
                reply = await self.http.post(CHAT, request)
            content = reply["choices"][0]["message"]["content"]
            if not isinstance(content, str | None):
                raise TypeError(f"content is {content!r}, expected text")
        except TimeoutError:
            problem = f"gave no reply within {endpoint.patience_s:g} s (patience_s)"
        except (KeyError, IndexError, TypeError) as error:
            problem = f"answered what is not the chat protocol ({type(error).__name__}: {error})"
        else:
            return content or ""  # null: the reply ended in its thinking
        raise InfrastructureFault(f"{url} {problem}")


class ChatJudge(ChatClient, Judge):
    """A judge that asks a language model about each turn: subclass this and write ``judge``. form:
    returns the regular expression of a constrained reply, given its most tokens."""

    concurrency = 64
    batch = 8

    def __init__(self, endpoint: ChatEndpoint, form: Callable[[int], str]):
        super().__init__(endpoint)
        self.form = form(endpoint.max_tokens) if endpoint.constrain else ""

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        return list(await asyncio.gather(*(self.judge(turn) for turn in turns)))

    async def judge(self, turn: JudgedTurn) -> Judgement:
        """Return the judgement of one turn."""
        raise NotImplementedError(f"{type(self).__name__} does not implement judge")

    async def reply(self, prompt: str, system: str = "") -> tuple[str, str]:
        """Return the model's reply and "", or "" and the reason why none came."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        field = {"regex": self.form} if self.form else {}
        vllm = self.endpoint.constrain == "vllm"
        fields = {"structured_outputs": field} if field and vllm else field
        try:
            return await self.chat(messages, fields), ""
        except (InfrastructureFault, DataFault) as fault:
            self.failed += isinstance(fault, InfrastructureFault)  # a refusal would come again
            return "", str(fault)


class Chat(ChatClient, Speaker):
    """A speaker behind an endpoint, whose max_tokens and temperature have no effect, because the
    request says both."""

    name = "chat"

    def __init__(self, endpoint: ChatEndpoint):
        super().__init__(endpoint)
        self.concurrency = endpoint.concurrency

    async def speak(self, request: SpeakRequest) -> str:
        """Raises InfrastructureFault when no reply comes, and DataFault when the endpoint refuses
        the request, for example because the messages are longer than its context."""
        fields = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed % 2**31,
        }
        return await self.chat(
            request.messages, fields | ({"stop": request.stop} if request.stop else {})
        )


class Frozen(Chat):
    """The same under another name, for a frozen copy of the starting policy: endpoint.url =
    "served" and judges.model.name = "policy"."""

    name = "frozen"


def room(judge: str, max_tokens: int, around: int, texts: int = 1) -> int:
    """Return the characters that each of the free ``texts`` of a reply may have.
    around: the most tokens of the rest. Raises ValueError if they are too few."""
    left = (max_tokens - around) // texts
    if left < _FEWEST:
        needs = f"a reply of its form needs {around + texts * _FEWEST} or more"
        raise ValueError(f"judge {judge}: max_tokens {max_tokens}: {needs}")
    return left


def read_prompts(
    judge: str, built_in: Mapping[str, str], own: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the texts of prompt templates by part. built_in: file names in prompts/. own: paths of
    templates that replace them. Raises ValueError for an unknown part, and FileNotFoundError."""
    own = own or {}
    if unknown := set(own) - set(built_in):
        wish = f"expected {list(built_in)}"
        raise ValueError(f"judge {judge}: templates for {sorted(unknown)}; {wish}")
    places = {part: own.get(part, PROMPTS / name) for part, name in built_in.items()}
    return {part: Path(place).read_text() for part, place in places.items()}


def fill(template: str, **values: str) -> str:
    """Replace the known {placeholders} of a template. Braces and placeholders inside a value stay
    unchanged."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)
