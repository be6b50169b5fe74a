"""What the servers of these protocols share: bodies, errors and streams."""

import re
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from coppice.actors.serving import anthropic
from coppice.actors.serving.protocol import Refused
from coppice.common.dialogue import TOO_DEEP, is_too_deep
from coppice.wire.faults import DataFault, Fault

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def body_of(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a request's body. Raises Refused."""
    try:
        body = msgspec.json.decode(raw)
    except RecursionError:
        raise Refused(f"the body: {TOO_DEEP}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        surrogate = " (or has a lone surrogate, which is no text)" if _SURROGATE.search(raw) else ""
        raise Refused(f"the body is not JSON{surrogate}: {error}") from None
    if not isinstance(body, dict):
        raise Refused(f"the body is {type(body).__name__}, expected a JSON object")
    if is_too_deep(body):
        raise Refused(f"the body: {TOO_DEEP}")
    return body


def refusal(fault: Fault) -> Refused:
    """Return a fault as the refusal that clients get."""
    return Refused(str(fault), 400 if isinstance(fault, DataFault) else 503)


def errors(largest: int) -> Any:
    """Return the middleware that answers errors. largest: bytes of a body that are taken."""

    @web.middleware
    async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as error:
            refused = error
        except Fault as fault:
            refused = refusal(fault)
        except web.HTTPException as error:
            refused = _of_http(request, error.status, largest)
        body = anthropic.refusal(request.path, refused)
        return web.json_response(body, status=refused.status)

    return answered


def _of_http(request: web.Request, status: int, largest: int) -> Refused:
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return Refused(f"the body is too long, expected at most {largest} bytes", status)
    return Refused(f"{request.method} {request.path}: {HTTPStatus(status).phrase}", status)


async def stream(request: web.Request) -> web.StreamResponse:
    """Begin an answer of server-sent events."""
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response


async def finish(response: web.StreamResponse, events: Iterable[bytes]) -> web.StreamResponse:
    """Write the rest of a stream and end it."""
    for event in events:
        await response.write(event)
    await response.write_eof()
    return response
