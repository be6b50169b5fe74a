"""What servers of OpenAI's and Anthropic's protocols share: how bodies are read and requests
refused. A field that is null counts as absent, and an unknown field is ignored."""

import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from coppice.common.dialogue import TOO_DEEP, is_too_deep
from coppice.wire.faults import DataFault, Fault

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
UNTHREADED = "thread_unsupported_request"
"""After this reason Anthropic's clients send the whole conversation."""
_ANTHROPIC_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class RequestRefused(Exception):
    """A request that is answered with ``status`` and the reason. code: its name in the protocol."""

    def __init__(self, reason: str, status: int = 400, code: str | None = None):
        super().__init__(reason)
        self.status, self.code = status, code

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the error as the body of an answer, in the dialect of the request's path."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if "/v1/messages" not in path:
            return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}
        other = kind if self.status < 500 else "api_error"
        error: dict[str, Any] = {"type": _ANTHROPIC_ERRORS.get(self.status, other)}
        error["message"] = str(self)
        if self.code == UNTHREADED:
            error["details"] = {"error_code": UNTHREADED, "unsupported": ["thread"]}
        return {"type": "error", "error": error}


def shown(value: Any) -> str:
    """Return the beginning of a field's value, for the reason of a refusal."""
    return repr(value)[:80]


def unexpected(field: str, value: Any, expected: str) -> RequestRefused:
    """Return the refusal of a field's value."""
    return RequestRefused(f"`{field}`: {shown(value)}: expected {expected}")


def listed(body: Mapping[str, Any], field: str = "messages") -> list[Any]:
    """Return a field that is a list of at least one message or item. Raises RequestRefused."""
    value = body.get(field)
    if not isinstance(value, list) or not value:
        raise unexpected(field, value, "a list of at least one message")
    return value


def refusal(fault: Fault | RequestRefused) -> RequestRefused:
    """Return a fault as the refusal that clients get."""
    if isinstance(fault, RequestRefused):
        return fault
    return RequestRefused(str(fault), 400 if isinstance(fault, DataFault) else 503)


def body_of(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a request's body. Raises RequestRefused."""
    try:
        body = msgspec.json.decode(raw)
    except RecursionError:
        raise RequestRefused(f"the body: {TOO_DEEP}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        surrogate = " (or has a lone surrogate, which is no text)" if _SURROGATE.search(raw) else ""
        raise RequestRefused(f"the body is not JSON{surrogate}: {error}") from None
    if not isinstance(body, dict):
        raise RequestRefused(f"the body is {type(body).__name__}, expected a JSON object")
    if is_too_deep(body):
        raise RequestRefused(f"the body: {TOO_DEEP}")
    return body


def errors(
    largest: int, on_refusal: Callable[[web.Request, str], None] = lambda request, reason: None
) -> Any:
    """Return the middleware that answers errors. largest: bytes of a body that are taken.
    on_refusal: is told the status and the reason of each error."""

    @web.middleware
    async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except (RequestRefused, Fault) as error:
            refused = refusal(error)
        except web.HTTPException as error:
            reason = f"{request.method} {request.path}: {HTTPStatus(error.status).phrase}"
            if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                reason = f"the body is too long, expected at most {largest} bytes"
            refused = RequestRefused(reason, error.status)
        except web.RequestPayloadError as error:  # such as a body that is not compressed as it says
            refused = RequestRefused(f"the body cannot be read: {' '.join(str(error).split())}")
        except ConnectionResetError:  # the client has hung up
            raise
        except Exception:
            on_refusal(request, "500: the server failed (the log says more)")
            raise
        on_refusal(request, f"{refused.status}: {refused}")
        return web.json_response(refused.body(request.path), status=refused.status)

    return answered


_Kind = TypeVar("_Kind")


def converted(fields: Mapping[str, Any], kind: type[_Kind]) -> _Kind:
    """Return the fields as a struct. Raises RequestRefused, which names the first field that does
    not fit, its value and what was expected."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        expected, _, place = str(error).partition(" - at `$.")
        field = re.match(r"\w*", place)
        if field is None or field[0] not in fields:  # such as a field that is missing
            raise RequestRefused(str(error)) from None
        wish = expected.removeprefix("Expected ")
        raise unexpected(place.rstrip("`"), fields[field[0]], wish) from None
