"""A client of JSON over HTTP: every call ends in the decoded answer or in a classified fault that
names the URL and the cause.

A call that may work later (a broken connection, no answer in time, a status of ``_AGAIN`` or 5xx)
is tried again after a growing pause, or after the seconds of ``Retry-After``. A status of
``_REFUSED`` is a DataFault: every server would refuse the request. Any other failure is an
InfrastructureFault with its remedy. Redirects are not followed: they would take the key to another
host. No message has the key.
"""

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

import aiohttp
import msgspec

from coppice.wire.faults import DataFault, InfrastructureFault

CHAT = "/chat/completions"
"""The path of the chat protocol, below the URL that ends in /v1."""
LONGEST_WAIT_S = 120.0
"""The longest pause before the next attempt, even when Retry-After asks for more."""
_AGAIN = frozenset({408, 409, 425, 429})
_REFUSED = frozenset({400, 413, 422})
_IDLE_S = 2.0
"""A connection is closed after this idle time, because servers close it too (uvicorn after 5 s) and
a request sent just then is lost."""
_SHOWN = 300
"""A message quotes this many characters of a server's error text."""


class Reached(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a model behind the chat protocol is reached. url: the URL up to /v1. api_key_env: the
    environment variable that holds the key ("" for none). timeout_s: limit of one attempt.
    backoff_s: pause after the first failure, doubled each time, or as long as the server asks.
    fields: additional fields of the request. The subclasses have their own defaults."""

    url: str
    model: str
    api_key_env: str = ""
    timeout_s: float = 300.0
    attempts: int = 6
    backoff_s: float = 1.0
    concurrency: int = 16
    fields: dict[str, Any] = {}

    def client(self, remedies: Mapping[int, str] = {}) -> "JsonClient":
        """Return a client, which is not started. remedies: what to do about an HTTP status; 404 is
        known."""
        absent = f"does the URL end where {CHAT} begins, and is {self.model!r} served there?"
        names = ("api_key_env", "timeout_s", "attempts", "backoff_s", "concurrency")
        limits: dict[str, Any] = {name: getattr(self, name) for name in names}
        return JsonClient(self.url, remedies={404: absent, **remedies}, **limits)


class _Busy(Exception):
    """The same request may work later. after_s: the seconds that the server asks to wait, 0 when it
    does not say."""

    def __init__(self, cause: str, after_s: float = 0.0):
        super().__init__(cause)
        self.after_s = after_s


class NoAnswer(InfrastructureFault):
    """Every attempt met silence, a broken connection or a busy server, which may answer later."""


class JsonClient:
    """Calls one server: ``start``, any number of calls, ``close``. Parameters as in ``Reached``;
    url: the beginning of every request's URL; key: the key itself, when this process created it;
    remedies: by status, what the user of this server should do.

    timeout_s does not include the wait until fewer than ``concurrency`` requests are open.
    ``counts``: requests, retries and failures. ``busy_s``: the time of all calls and their pauses.
    """

    def __init__(
        self, url: str, *, api_key_env: str = "", key: str = "", timeout_s: float = 120.0,
        attempts: int = 3, backoff_s: float = 1.0, concurrency: int = 16,
        remedies: Mapping[int, str] = {},
    ):  # fmt: skip
        if attempts < 1 or concurrency < 1:
            raise ValueError(
                f"attempts {attempts} and concurrency {concurrency}: expected at least 1 of each"
            )
        if "@" in (host := urlsplit(url).netloc):
            plain = url.replace(host, host.rpartition("@")[2], 1)
            raise ValueError(
                f"{plain}: expected a URL without a user or key; name the key's variable"
            )
        self.url = url.rstrip("/")
        self.timeout_s, self.attempts = timeout_s, attempts
        self.backoff_s, self.concurrency = backoff_s, concurrency
        self.counts: Counter[str] = Counter()
        self.busy_s = 0.0
        self._api_key_env, self._key = api_key_env, key
        self._remedies = remedies
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the connection pool. Raises ValueError, which names the variable, when the API key
        is not set."""
        headers = {"Content-Type": "application/json"}
        if variable := self._api_key_env:
            self._key = os.environ.get(variable, "").strip()
            if not self._key:
                raise ValueError(
                    f"environment variable {variable} is empty: it must hold the key of {self.url}"
                )
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        # One connection for each open request, because waiting for a connection would count against
        # the server's timeout.
        self._room = asyncio.Semaphore(self.concurrency)  # of this event loop
        pool = aiohttp.TCPConnector(limit=self.concurrency, keepalive_timeout=_IDLE_S)
        self._session = aiohttp.ClientSession(headers=headers, connector=pool)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def post(self, path: str, body: Any, **limits: Any) -> Any:
        """Return the decoded answer. body: anything msgspec encodes. limits: ``timeout_s`` and
        ``attempts`` of this call. Raises DataFault and InfrastructureFault (see the module)."""
        return self._decoded(path, await self.send("POST", path, body, **limits))

    async def get(self, path: str, **limits: Any) -> Any:
        """Send a GET request without a body, otherwise like ``post``."""
        return self._decoded(path, await self.send("GET", path, **limits))

    async def send(
        self, method: Literal["GET", "POST", "DELETE"], path: str, body: Any = None, *,
        timeout_s: float = 0.0, attempts: int = 0,
    ) -> bytes:  # fmt: skip
        """Return the answer's bytes undecoded; otherwise like ``post``. body: None sends none."""
        url, content = f"{self.url}{path}", None if body is None else msgspec.json.encode(body)
        limit, last = timeout_s or self.timeout_s, attempts or self.attempts
        start = time.monotonic()
        attempt = 0
        try:
            while True:
                attempt += 1
                try:
                    async with self._room:
                        self.counts["requests"] += 1
                        return await self._once(method, url, content, limit)
                except _Busy as busy:
                    if attempt == last:
                        raise NoAnswer(
                            f"{url}: {busy}, {attempt} attempts; try again when the server answers"
                        ) from None
                    self.counts["retries"] += 1
                    pause = pause_s(attempt, self.backoff_s, busy.after_s, random.random())
                    await asyncio.sleep(pause)
        except (InfrastructureFault, DataFault):
            self.counts["failures"] += 1
            raise
        finally:
            self.busy_s += time.monotonic() - start

    async def _once(self, method: str, url: str, content: bytes | None, timeout_s: float) -> bytes:
        assert self._session is not None, "call before start"
        if self._session.closed:
            raise InfrastructureFault(f"{url}: this client has been closed")
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, url, data=content, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await response.read()
        except TimeoutError:
            raise _Busy(f"no reply within {timeout_s:g} s") from None
        except aiohttp.InvalidURL:
            raise InfrastructureFault(f"{url} is no URL: expected http(s)://host:port") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Busy(self._hidden(f"{type(error).__name__}: {error}")) from None
        if response.status not in (200, 202):
            self._fail(url, response, answer.decode(errors="replace"))
        return answer

    def _decoded(self, path: str, answer: bytes) -> Any:
        try:
            return msgspec.json.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            with contextlib.suppress(ValueError, RecursionError, msgspec.DecodeError):
                # half a surrogate pair, such as of an emoji that was cut
                text = json.dumps(json.loads(answer), ensure_ascii=False)
                return msgspec.json.decode(text.encode(errors="replace"))
            self.counts["failures"] += 1
            raise InfrastructureFault(
                f"{self.url}{path} answered no JSON ({error}): is it the right URL?"
            ) from None

    def _fail(self, url: str, response: aiohttp.ClientResponse, text: str) -> NoReturn:
        status = response.status
        cause = self._hidden(f"HTTP {status}: {text.strip()}")[:_SHOWN]
        if status in _AGAIN or status >= 500:
            raise _Busy(cause, retry_after(response.headers.get("Retry-After", "")))
        if status in _REFUSED:
            raise DataFault(f"{url} refused the request, {cause}")
        remedy = "expected 200 or 202"
        if 300 <= status < 400:
            location = self._hidden(response.headers.get("Location", "(it does not say)"))
            remedy = f"it moved to {location}: give that URL"
        elif status == 404:
            remedy = f"does the server's URL end where {self.url} does?"
        elif status in (401, 403):
            wanted = "it wants an API key: name the variable that holds it"
            remedy = f"is the key in {self._api_key_env} right?" if self._api_key_env else wanted
        raise InfrastructureFault(f"{url}: {cause}: {self._remedies.get(status, remedy)}")

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, "(the key)") if self._key else text


def pause_s(attempt: int, backoff_s: float, least_s: float, chance: float) -> float:
    """Return the seconds to wait after ``attempt`` (from 1): doubled each time, scattered by
    ``chance`` in [0, 1), at least ``least_s``."""
    return min(LONGEST_WAIT_S, max(least_s, backoff_s * 2 ** (attempt - 1) * (0.5 + chance)))


def retry_after(header: str) -> float:
    """Return the seconds that a Retry-After header asks to wait, 0 when it has no such number."""
    try:
        seconds = float(header)
    except ValueError:
        return 0.0
    return seconds if seconds > 0 else 0.0  # also for "nan"
