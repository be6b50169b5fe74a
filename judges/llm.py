"""A client of the OpenAI-compatible chat protocol, for any server that speaks it. ``common.http``
does the retries and counts."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from coppice.common.http import CHAT, NoAnswer, Reached
from coppice.judges.base import Judge
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import JudgedTurn, Judgement

_MODELS = "/models"
_LOOK_S = 0.5
"""Seconds between two checks whether the server answers, and the limit of one check."""
PATIENCE_S = 110.0
"""The default limit of one reply. It is shorter than the scheduler's default deadline of a
judgement."""


class ChatEndpoint(Reached, frozen=True, forbid_unknown_fields=True):
    """An endpoint and its settings, see ``wire.http.Reached``.

    patience_s: limit of all attempts for one reply, including the wait for a free place. It must be
    less than scheduler.judge_deadline_s, so that a missing reply becomes an invalid judgement and
    not a failed call. constrain: the request field that makes the server keep a reply to the
    judge's form: "sglang" (also for coppice serve --model), "vllm", or "" for a server that cannot.
    wait_s: seconds to wait at the start until a server has loaded its model (it then answers
    /models); 0 does not check.
    """

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
    """Asks one endpoint: ``start``, any number of questions, ``close``. ``counts`` holds requests,
    retries and failures."""

    def __init__(self, endpoint: ChatEndpoint):
        self.endpoint = endpoint
        self.http = endpoint.client()

    @property
    def counts(self) -> Counter[str]:
        return self.http.counts

    async def start(self) -> None:
        """Open the connection pool and, with ``wait_s``, wait for the server.

        Raises ValueError, which names the variable, when the API key is not set, and
        InfrastructureFault when the server does not answer.
        """
        await self.http.start()
        if self.endpoint.wait_s:
            await self._wait(self.endpoint.wait_s)
            self.counts.clear()  # they must count questions only

    async def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                await self.http.get(_MODELS, timeout_s=_LOOK_S, attempts=1)
                return
            # any other fault is an answer (such as a wrong key) and ends the wait
            except NoAnswer as fault:
                if time.monotonic() + _LOOK_S > end:
                    raise InfrastructureFault(
                        f"no server after {seconds:g} s (wait_s): {fault}"
                    ) from None
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Close the connection pool."""
        await self.http.close()

    async def ask(self, prompt: str, form: str = "", *, system: str = "") -> str:
        """Return the reply to one user message, which follows the system message if there is one.

        form: a regular expression for the whole reply, used if the endpoint can constrain replies.
        Raises InfrastructureFault after the last attempt, and DataFault when the endpoint refuses
        the request. Both name the cause.
        """
        messages = [{"role": "system", "content": system}] if system else []
        return await self.chat(
            [*messages, {"role": "user", "content": prompt}], self._constraint(form)
        )

    async def chat(self, messages: list[dict[str, str]], fields: dict[str, Any]) -> str:
        """Return the reply to chat messages. fields: of the request; those of the endpoint's own
        ``fields`` come after them. Raises as ``ask``."""
        request = {
            "model": self.endpoint.model,
            "messages": messages,
            "temperature": self.endpoint.temperature,
            "max_tokens": self.endpoint.max_tokens,
            **fields,
            **self.endpoint.fields,
        }
        reply = await self.http.post(CHAT, request)
        try:
            content = reply["choices"][0]["message"]["content"]
            if not isinstance(content, str):
                raise TypeError(f"content is {content!r}, expected text")
        except (KeyError, IndexError, TypeError) as error:
            self.counts["failures"] += 1
            raise InfrastructureFault(
                f"{self.http.url}{CHAT} answered what is not the chat protocol ({type(error).__name__}: {error})"
            ) from None
        return content

    async def reply_or_failure(
        self, prompt: str, form: str = "", *, system: str = ""
    ) -> tuple[str, str]:
        """Return the reply of ``ask`` and "", or "" and the reason why no reply came within
        ``endpoint.patience_s``."""
        patience = self.endpoint.patience_s
        try:
            async with asyncio.timeout(patience):
                return await self.ask(prompt, form, system=system), ""
        except TimeoutError:
            self.counts["failures"] += 1
            return "", f"{self.http.url}{CHAT} gave no reply within {patience:g} s (patience_s)"
        except (InfrastructureFault, DataFault) as fault:
            return "", str(fault)

    def _constraint(self, form: str) -> dict[str, Any]:
        if not form or not self.endpoint.constrain:
            return {}
        return (
            {"regex": form}
            if self.endpoint.constrain == "sglang"
            else {"structured_outputs": {"regex": form}}
        )


class ChatJudge(Judge):
    """A judge that asks a language model about each turn: subclass this and write ``judge``, which
    counts "judged", "failed" and "unparsed".

    form: gives the regular expression to which ``endpoint.constrain`` keeps a reply of so many
    tokens.
    """

    concurrency = 64
    batch = 8

    def __init__(self, endpoint: ChatEndpoint, form: Callable[[int], str]):
        self.client = ChatClient(endpoint)
        self.form = form(endpoint.max_tokens) if endpoint.constrain else ""
        self.counts: Counter[str] = Counter()

    async def start(self) -> None:
        await self.client.start()

    async def close(self) -> None:
        await self.client.close()

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        return list(await asyncio.gather(*(self.judge(turn) for turn in turns)))

    async def judge(self, turn: JudgedTurn) -> Judgement:
        """Return the judgement of one turn."""
        raise NotImplementedError(f"{type(self).__name__} does not implement judge")

    def stats(self) -> dict[str, float]:
        """Return counters for the heartbeat: judged replies, unreadable replies, missing replies,
        and the valid share."""
        judged, bad = self.counts["judged"], self.counts["failed"] + self.counts["unparsed"]
        rate = 1.0 - bad / judged if judged else 1.0
        return {name: self.counts[name] for name in ("judged", "unparsed", "failed")} | {
            "judge_valid_rate": rate
        }
