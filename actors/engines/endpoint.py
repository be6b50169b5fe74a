"""A player behind any OpenAI-compatible chat endpoint, as an engine: for measuring models that are served elsewhere.

Its tokens are UTF-8 bytes. A prompt is its chat messages as JSON (``EndpointText``), which ``EndpointEngine`` reads back from the
prefix; so it plays environments that show a fresh prompt each turn. Log-probabilities are zeros: nothing can be trained on them.
"""

import asyncio
import email.utils
import json
import os
import random
import re
import time
from collections import Counter
from typing import Any, NoReturn

import aiohttp
import msgspec
import numpy as np

from actors.environments.base import SPLIT
from wire.faults import DataFault, InfrastructureFault
from wire.messages import GenerateRequest, GenerateResult, LoadRequest, LoadResult, Sample, ScoreRequest, ScoreResult

LONGEST_WAIT_S = 120.0
"""The most that a Retry-After may ask for at once; a longer limit meets the next attempt."""
_SEEDS = 2**31
"""Some servers keep a seed in 32 bits."""
_ESCAPED_SPLIT = re.compile(rf"(?<!\\)((?:\\\\)*)\\u{ord(SPLIT):04x}")
_AGAIN = frozenset({408, 409, 425, 429})
_REFUSED = frozenset({400, 413, 422})


class Endpoint(msgspec.Struct, frozen=True):
    """Where and how to ask. url: up to /v1. api_key_env: the environment variable that holds the key ("" for none).

    timeout_s: of one attempt. backoff_s: the wait after the first failure, doubled each time. fields: more of the request's body.
    """

    url: str
    model: str
    api_key_env: str = ""
    timeout_s: float = 300.0
    attempts: int = 6
    backoff_s: float = 1.0
    concurrency: int = 16
    fields: dict[str, Any] = {}


class EndpointText:
    """Text as UTF-8 bytes, one token each, and messages as JSON in which ``SPLIT`` stands as it is."""

    def encode(self, text: str) -> np.ndarray:
        """int32 [bytes]."""
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """The text of bytes."""
        return tokens.astype(np.uint8).tobytes().decode("utf-8", "replace")

    def prompt(self, messages: list[dict[str, str]], thinking: bool = True) -> str:
        """The messages as JSON. thinking: has no effect here, the endpoint renders its own template."""
        return _ESCAPED_SPLIT.sub(lambda found: found[1] + SPLIT, json.dumps(messages, ensure_ascii=False))


class _Busy(Exception):
    """The same request may work later. after_s: how long the server asks to wait, 0 when it does not say."""

    def __init__(self, cause: str, after_s: float = 0.0):
        super().__init__(cause)
        self.after_s = after_s


class EndpointEngine:
    """Implements ``actors.engines.base.Engine``, but for ``score`` and ``load``, which a chat endpoint does not offer."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint, self.text = endpoint, EndpointText()
        self.url = f"{endpoint.url.rstrip('/')}/chat/completions"
        self.counts: Counter[str] = Counter()
        self.busy_s = 0.0
        self._key = ""
        self._room = asyncio.Semaphore(endpoint.concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._rng = random.Random(0)

    async def start(self) -> None:
        """Open the connection pool. Raises ValueError naming the variable when the API key is not set."""
        headers = {}
        if variable := self.endpoint.api_key_env:
            self._key = os.environ.get(variable, "").strip()
            if not self._key:
                raise ValueError(f"environment variable {variable} is empty: it must hold the API key of {self.url}")
            headers["Authorization"] = f"Bearer {self._key}"
        timeout = aiohttp.ClientTimeout(total=self.endpoint.timeout_s)
        room = aiohttp.TCPConnector(
            limit=self.endpoint.concurrency
        )  # a wait for a connection would count as the server's
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=room)

    async def close(self) -> None:
        """Close the connection pool."""
        if self._session is not None:
            await self._session.close()

    # ------------------------------------------------------------------------------------------ requests

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """``request.n`` replies. Raises DataFault for a prompt the endpoint refuses, InfrastructureFault after the last attempt."""
        sampling = request.sampling
        body = {
            "model": self.endpoint.model,
            "messages": self._messages(request.tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
        }
        # What is not asked for is not sent: some servers refuse fields they do not know.
        body |= {"top_k": sampling.top_k} if sampling.top_k else {}
        body |= {"n": request.n} if request.n > 1 else {}
        body |= {"stop": sampling.stop} if sampling.stop else {}
        body |= {"seed": sampling.seed % _SEEDS} if sampling.seed is not None else {}
        reply = await self._ask(body | self.endpoint.fields)
        try:
            samples = [self._sample(choice, sampling.stop) for choice in reply["choices"]]
            prompt, cached = self._count(reply.get("usage") or {})
        except (KeyError, TypeError, AttributeError) as error:
            raise InfrastructureFault(
                f"{self.url} answered what is not the chat protocol ({type(error).__name__}: {error}): is it the right URL?"
            ) from None
        if len(samples) != request.n:
            raise InfrastructureFault(f"{self.url} answered {len(samples)} choices, expected n = {request.n}")
        return GenerateResult(samples, prompt or len(request.tokens), cached)

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """A chat endpoint scores nothing."""
        raise DataFault(f"{self.url} is a chat endpoint: it gives no log-probabilities of given tokens")

    async def load(self, request: LoadRequest) -> LoadResult:
        """A chat endpoint takes no weights."""
        raise InfrastructureFault(f"{self.url} is a chat endpoint: it takes no weights")

    def stats(self) -> dict[str, float]:
        """Counters; see ``actors.engines.base``. Tokens are those of the replies' ``usage``; busy_s adds all requests up, with their retries."""
        return {**self.counts, "busy_s": self.busy_s, "version": 0}

    # ------------------------------------------------------------------------------------------ inner workings

    def _messages(self, tokens: np.ndarray) -> list[dict[str, str]]:
        try:
            return msgspec.json.decode(self.text.decode(tokens), type=list[dict[str, str]])
        except msgspec.DecodeError as error:
            raise DataFault(
                f"a prefix that is not one prompt ({error}): an endpoint plays environments with a fresh prompt each turn"
            ) from None

    async def _ask(self, body: dict[str, Any]) -> Any:
        """The decoded reply, after as many attempts as it takes."""
        for attempt in range(1, self.endpoint.attempts + 1):
            start = time.monotonic()
            try:
                async with self._room:
                    self.counts["requests"] += 1
                    return await self._once(body)
            except _Busy as busy:
                if attempt == self.endpoint.attempts:
                    raise InfrastructureFault(
                        f"{self.url}: {busy}, {attempt} attempts; go on when it answers again, or allow more attempts"
                    ) from None
                wait = self.endpoint.backoff_s * 2 ** (attempt - 1) * (0.5 + self._rng.random())
                self.counts["retries"] += 1
                await asyncio.sleep(min(LONGEST_WAIT_S, max(wait, busy.after_s)))
            finally:
                self.busy_s += time.monotonic() - start
        raise AssertionError("attempts < 1")

    async def _once(self, body: dict[str, Any]) -> Any:
        assert self._session is not None, "generate before start"
        try:
            # A redirect is not followed: it would take the key to another host.
            async with self._session.post(self.url, json=body, allow_redirects=False) as response:
                text = await response.text(errors="replace")
        except TimeoutError:
            raise _Busy(f"no reply within {self.endpoint.timeout_s:g} s") from None
        except aiohttp.InvalidURL:
            raise InfrastructureFault(f"{self.url} is no URL: expected http(s)://host:port/v1") from None
        except aiohttp.ClientError as error:
            raise _Busy(f"{type(error).__name__}: {error}") from None
        if response.status != 200:
            self._fail(response, text)
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise InfrastructureFault(f"{self.url} answered no JSON ({error}): is it the right URL?") from None

    def _fail(self, response: aiohttp.ClientResponse, text: str) -> NoReturn:
        """The fault that a status means, with what to do about it."""
        said = f"HTTP {response.status}: {text.strip()[:300]}"
        said = said.replace(self._key, "(the key)") if self._key else said
        if response.status in _AGAIN or response.status >= 500:
            raise _Busy(said, retry_after(response.headers.get("Retry-After", ""), time.time()))
        if response.status in _REFUSED:
            raise DataFault(f"{self.url} refused the request, {said}")
        key = self.endpoint.api_key_env
        remedy = {
            401: f"is the key in {key} right?" if key else "it wants an API key: name its variable with --api-key-env",
            404: f"does the URL end where /chat/completions begins, and is {self.endpoint.model!r} served there?",
        }.get(response.status, "expected 200")
        if response.status in range(300, 400):
            remedy = f"it moved to {response.headers.get('Location')}: give that URL"
        raise InfrastructureFault(f"{self.url}: {said}: {remedy}")

    def _sample(self, choice: dict[str, Any], stop: list[str]) -> Sample:
        tokens = self.text.encode(whole(choice, stop))
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
        return Sample(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), finish)

    def _count(self, usage: dict[str, Any]) -> tuple[int, int]:
        """Counts the tokens of a reply; those of its prompt, and how many of them came from a cache."""
        prompt = usage.get("prompt_tokens") or 0
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self.counts["prompt_tokens"] += prompt
        self.counts["cached_tokens"] += cached
        self.counts["prefilled_tokens"] += prompt - cached
        self.counts["decoded_tokens"] += usage.get("completion_tokens") or 0
        self.counts["replies_without_usage"] += not usage
        return prompt, cached


def whole(choice: dict[str, Any], stop: list[str]) -> str:
    """The reply with the stop string that ended it, which the protocol cuts off.

    vLLM and SGLang name it (stop_reason, matched_stop). Elsewhere "</tag>" is taken to have ended a text whose last "<tag>" is open.
    A reply without content (a model that thought until its tokens were used up) is "".
    """
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


def retry_after(header: str, now: float) -> float:
    """Seconds that a Retry-After header asks to wait (a number, or a date against ``now``); 0 when it says nothing."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - now)
    except (TypeError, ValueError):
        return 0.0
