"""A client of the OpenAI-compatible chat protocol with bounded concurrency, retries and counts; any server that speaks it will do."""

import asyncio
import os
import random
from collections import Counter
from typing import Any

import aiohttp
import msgspec

from wire.faults import InfrastructureFault

_RETRY_STATUS = frozenset({408, 409, 429, 500, 502, 503, 504})


class ChatEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where and how to ask. api_key_env: the environment variable that holds the key ("" for none). timeout_s: one attempt."""

    url: str
    model: str
    api_key_env: str = ""
    timeout_s: float = 120.0
    attempts: int = 3
    concurrency: int = 32
    max_tokens: int = 512
    temperature: float = 0.0


class ChatClient:
    """Asks one endpoint; ``counts`` holds requests, retries and failures."""

    def __init__(self, endpoint: ChatEndpoint):
        self.endpoint = endpoint
        self.counts: Counter[str] = Counter()
        self._room = asyncio.Semaphore(endpoint.concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._rng = random.Random(0)

    async def start(self) -> None:
        """Open the connection pool. Raises KeyError naming the variable when the API key is not set."""
        headers = {}
        if self.endpoint.api_key_env:
            key = os.environ.get(self.endpoint.api_key_env)
            if not key:
                raise KeyError(f"environment variable {self.endpoint.api_key_env} is empty: it must hold the API key")
            headers["Authorization"] = f"Bearer {key}"
        timeout = aiohttp.ClientTimeout(total=self.endpoint.timeout_s)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)

    async def close(self) -> None:
        """Close the connection pool."""
        if self._session is not None:
            await self._session.close()

    async def ask(self, prompt: str) -> str:
        """The reply to one user message. Raises InfrastructureFault after the last attempt, naming the cause."""
        request = {
            "model": self.endpoint.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": self.endpoint.temperature,
            "max_tokens": self.endpoint.max_tokens,
        }
        cause = ""
        async with self._room:
            for attempt in range(self.endpoint.attempts):
                if attempt:
                    self.counts["retries"] += 1
                    await asyncio.sleep(min(10.0, 0.2 * 2**attempt) * (0.5 + self._rng.random() / 2))
                self.counts["requests"] += 1
                reply, cause, final = await self._once(request)
                if reply is not None:
                    return reply
                if final:
                    break
        self.counts["failures"] += 1
        raise InfrastructureFault(f"chat endpoint {self.endpoint.url}: {cause}")

    async def _once(self, request: dict[str, Any]) -> tuple[str | None, str, bool]:
        """Reply or cause of failure, and whether another attempt is useless."""
        assert self._session is not None, "ask before start"
        try:
            async with self._session.post(
                f"{self.endpoint.url.rstrip('/')}/chat/completions", json=request
            ) as response:
                text = await response.text(errors="replace")
                if response.status != 200:
                    return None, f"HTTP {response.status}: {text[:200]}", response.status not in _RETRY_STATUS
                content = msgspec.json.decode(text)["choices"][0]["message"]["content"]
                if not isinstance(content, str):
                    raise TypeError(f"content is {content!r}, expected text")
                return content, "", True
        except TimeoutError:
            return None, f"no reply within {self.endpoint.timeout_s:.0f} s", False
        except aiohttp.ClientError as error:
            return None, f"{type(error).__name__}: {error}", False
        except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
            return None, f"a reply that is not the chat protocol: {type(error).__name__}: {error}", True
