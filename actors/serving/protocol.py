"""What servers of OpenAI's and Anthropic's protocols share: how bodies are read and checked, how a
request is refused, and how streams are written.

Fields beyond OpenAI's own are ``top_k``, ``chat_template_kwargs``, and a constraint with the field
names of SGLang (``regex``, ``json_schema``) or vLLM (``guided_regex``, ``guided_json``,
``structured_outputs``). A field that is null counts as absent, and an unknown field is ignored.
"""

import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from aiohttp import web

from coppice.common.dialogue import TOO_DEEP, is_too_deep
from coppice.wire.faults import DataFault, Fault
from coppice.wire.messages import Constraint, Sampling

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Stop = Annotated[str, msgspec.Meta(min_length=1)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

COMPLETION_TOKENS = 16
"""The max_tokens of a completion that sets none, as in the protocol."""
MOST_PROMPTS = 128
"""The most prompts of one completions request."""
UNTHREADED = "thread_unsupported_request"
"""After this reason Anthropic's clients send the whole conversation."""
_ANTHROPIC_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_UNSUPPORTED = """
    guided_choice guided_grammar ebnf grammar structural_tag stop_regex allowed_token_ids lora_path
    logits_processors custom_logit_processor truncate_prompt_tokens chat_template
"""
"""Fields of other servers that change the answer whatever their value is."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_UNSUPPORTED.split(), ()),
    **dict.fromkeys(
        "presence_penalty frequency_penalty min_p min_tokens top_logprobs".split(), (0,)
    ),
    **dict.fromkeys("repetition_penalty length_penalty best_of".split(), (1,)),
    **dict.fromkeys("tools functions stop_token_ids bad_words documents".split(), ([],)),
    **dict.fromkeys("echo ignore_eos include_stop_str_in_output".split(), (False,)),
    **dict.fromkeys("continue_final_message add_special_tokens use_beam_search".split(), (False,)),
    **dict.fromkeys("skip_special_tokens spaces_between_special_tokens".split(), (True,)),
    "add_generation_prompt": (True,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "prompt_logprobs": (False, 0),
}
"""Fields that other servers support, with the values that have no effect."""


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


def refusal(fault: Fault) -> RequestRefused:
    """Return a fault as the refusal that clients get."""
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
        except RequestRefused as error:
            refused = error
        except Fault as fault:
            refused = refusal(fault)
        except web.HTTPException as error:
            reason = f"{request.method} {request.path}: {HTTPStatus(error.status).phrase}"
            if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
                reason = f"the body is too long, expected at most {largest} bytes"
            refused = RequestRefused(reason, error.status)
        except Exception:
            on_refusal(request, "500: the server failed (the log says more)")
            raise
        on_refusal(request, f"{refused.status}: {refused}")
        return web.json_response(refused.body(request.path), status=refused.status)

    return answered


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


def sse(value: dict[str, Any], name: str = "") -> bytes:
    """Return a server-sent event of a name, or without one."""
    event = b"event: " + name.encode() + b"\n" if name else b""
    return event + b"data: " + msgspec.json.encode(value) + b"\n\n"


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


class _JsonSchema(msgspec.Struct):
    schema: dict[str, Any] | bool


class _ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class _StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """A constraint with vLLM's names. Its other fields are constraints too, so they are refused."""

    regex: str | None = None
    json: str | dict[str, Any] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class SamplingFields(msgspec.Struct, kw_only=True):
    """The fields that chats and completions have in common."""

    model: str = ""
    max_tokens: _Positive | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = 0
    n: _Positive = 1
    stop: _Stop | list[_Stop] = []
    seed: int | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    response_format: _ResponseFormat | None = None
    regex: str | None = None
    json_schema: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_json: str | dict[str, Any] | None = None
    structured_outputs: _StructuredOutputs | None = None

    def __post_init__(self) -> None:
        if 0 < self.temperature < 1e-3:  # float32 could not hold the scaled logits
            raise ValueError(f"`temperature`: {self.temperature}: expected 0 or at least 0.001")
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` has no effect without `stream`: true")

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def sampling(self, room: int) -> Sampling:
        """Return how the engine must sample. room: tokens left of the context."""
        raise NotImplementedError

    def _sampling(self, most: int, top: int) -> Sampling:
        t, p, k = self.temperature, self.top_p, max(0, self.top_k)
        return Sampling(most, t, p, k, self.stops, self.seed, self.constraint(), top)

    def constraint(self) -> Constraint | None:
        """Return the constraint of the request, if any. Raises RequestRefused for several."""
        outputs, schema = self.structured_outputs or _StructuredOutputs(), None
        if (wanted := self.response_format) and wanted.type == "json_object":
            schema = {"type": "object"}
        elif wanted and wanted.type == "json_schema":
            if wanted.json_schema is None:
                raise RequestRefused("`response_format`: expected `json_schema`: {`schema`: ...}")
            schema = wanted.json_schema.schema
        fields: dict[str, tuple[Literal["regex", "json_schema"], Any]] = {
            "regex": ("regex", self.regex),
            "guided_regex": ("regex", self.guided_regex),
            "structured_outputs.regex": ("regex", outputs.regex),
            "json_schema": ("json_schema", self.json_schema),
            "guided_json": ("json_schema", self.guided_json),
            "structured_outputs.json": ("json_schema", outputs.json),
            "response_format": ("json_schema", schema),
        }
        fields = {name: field for name, field in fields.items() if field[1] is not None}
        if len(fields) > 1:
            names = " and ".join(f"`{name}`" for name in fields)
            raise RequestRefused(f"{names}: expected one constraint")
        for kind, value in fields.values():
            return Constraint(kind, value if isinstance(value, str) else _json(value))
        return None


class ChatFields(SamplingFields, kw_only=True):
    """How a body of /v1/chat/completions is sampled. ``conversations`` reads the rest."""

    max_completion_tokens: _Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] = 0
    chat_template_kwargs: dict[str, Any] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        most, also = self.max_tokens, self.max_completion_tokens
        if None not in (most, also) and most != also:
            raise ValueError(f"`max_tokens`: {most}, `max_completion_tokens`: {also}: expected one")
        if (top := self.top_logprobs) and not self.logprobs:
            raise ValueError(f"`top_logprobs`: {top}: has no effect without `logprobs`: true")

    def sampling(self, room: int) -> Sampling:
        longest = self.max_completion_tokens or self.max_tokens or max(1, room)
        return self._sampling(longest, self.top_logprobs)


class CompletionFields(SamplingFields, kw_only=True):
    """The body of POST /v1/completions. No special token is put before a text."""

    prompt: str | list[str | _Token | list[_Token]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None

    def sampling(self, room: int) -> Sampling:
        return self._sampling(self.max_tokens or COMPLETION_TOKENS, self.logprobs or 0)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts. Raises RequestRefused for none, too many, or an empty one."""
        parts: Any = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        kinds = {type(part) for part in parts}
        if len(kinds) > 1:
            raise RequestRefused("`prompt`: texts, token ids or lists of them, expected one kind")
        prompts = [parts] if kinds == {int} else parts
        if not 1 <= len(prompts) <= MOST_PROMPTS:
            raise RequestRefused(f"`prompt`: {len(prompts)} prompts, expected 1 to {MOST_PROMPTS}")
        if not all(prompts):
            raise RequestRefused("`prompt`: a prompt of 0 tokens, expected at least one")
        return prompts


_Sampled = TypeVar("_Sampled", ChatFields, CompletionFields)


def read(body: Mapping[str, Any], kind: type[_Sampled]) -> _Sampled:
    """Return the request of a body. Raises RequestRefused, which names the field that cannot be
    served."""
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if name not in _NEUTRAL or name in kind.__struct_fields__:
            continue
        neutral = _NEUTRAL[name]
        same = [good for good in neutral if isinstance(value, bool) == isinstance(good, bool)]
        if value not in same:
            text = "NaN" if isinstance(value, float) and math.isnan(value) else _json(value)
            text = text if len(text) <= 80 else f"{text[:80]}..."
            expected = "".join(f"{_json(good)} or " for good in neutral)
            raise RequestRefused(f"`{name}`: {text}: not supported, expected {expected}nothing")
    return converted(fields, kind)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
