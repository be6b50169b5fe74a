"""Requests of the OpenAI-compatible protocol, checked: an unsupported field that would change the
answer is refused by its name.

Fields beyond OpenAI's own: ``top_k``, ``chat_template_kwargs``, and a constraint with the field
names of SGLang (``regex``, ``json_schema``) or vLLM (``guided_regex``, ``guided_json``,
``structured_outputs``). A field that is null counts as absent, and so does one that nobody knows.
"""

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from coppice.wire.messages import Constraint, Sampling

_Stop = Annotated[str, msgspec.Meta(min_length=1)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

COMPLETION_TOKENS = 16
"""The max_tokens of a completion that does not set it, as in the protocol. A chat gets the rest of
the context."""
MOST_PROMPTS = 128
"""The most prompts of one completions request."""

_UNSUPPORTED = (
    "guided_choice",
    "guided_grammar",
    "ebnf",
    "grammar",
    "structural_tag",
    "stop_regex",
    "allowed_token_ids",
    "logits_processors",
    "custom_logit_processor",
    "truncate_prompt_tokens",
    "chat_template",
    "lora_path",
)
"""Fields of other servers that change the answer whatever their value is."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "best_of": (1,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "use_beam_search": (False,),
    "prompt_logprobs": (False, 0),
    "bad_words": ([],),
    "documents": ([],),
    **dict.fromkeys(_UNSUPPORTED, ()),
}
"""Fields that other servers support, with the values that have no effect."""


class Refused(Exception):
    """A request that is answered with ``status`` and the reason. code: the protocol's short name of
    the reason."""

    def __init__(self, reason: str, status: int = 400, code: str | None = None):
        super().__init__(reason)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """Return the error as the body of an answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


def http_refused(method: str, path: str, status: int, largest: int) -> Refused:
    """Return an error of HTTP itself (no such path, a body of more than ``largest`` bytes) as a
    refusal in the protocol's form."""
    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return Refused(f"the body is too long, expected at most {largest} bytes", status)
    return Refused(f"{method} {path}: {HTTPStatus(status).phrase}", status)


def shown(value: Any) -> str:
    """Return the beginning of a field's value, for the reason of a refusal."""
    return repr(value)[:80]


class _JsonSchema(msgspec.Struct):
    schema: dict[str, Any] | bool


class ResponseFormat(msgspec.Struct):
    """The form of the answer. The type "json_schema" needs ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """A constraint with vLLM's field names. Its other fields are constraints too, so an unknown one
    is refused."""

    regex: str | None = None
    json: str | dict[str, Any] | None = None


class StreamOptions(msgspec.Struct):
    """include_usage: send one more chunk at the end with the counts of tokens. include_obfuscation:
    has no effect here."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Asked(msgspec.Struct, kw_only=True):
    """The fields that both kinds of request have."""

    model: str = ""
    max_tokens: _Positive | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = 0
    n: _Positive = 1
    stop: _Stop | list[_Stop] = []
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    json_schema: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_json: str | dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        if 0 < self.temperature < 1e-3:  # float32 could not hold the scaled logits
            raise ValueError(
                f"`temperature`: {self.temperature}: expected 0 (greedy) or at least 0.001"
            )
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` has no effect without `stream`: true")

    @property
    def wants_logprobs(self) -> bool:
        raise NotImplementedError

    @property
    def most_likely(self) -> int:
        """How many of the most probable tokens are reported with each sampled token."""
        raise NotImplementedError

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def longest(self, room: int) -> int:
        """Return the most new tokens when ``room`` tokens are left of the context."""
        raise NotImplementedError

    def sampling(self, room: int) -> Sampling:
        """Return how the engine must sample. room: tokens left of the context."""
        return Sampling(
            self.longest(room),
            self.temperature,
            self.top_p,
            max(0, self.top_k),
            self.stops,
            self.seed,
            self.constraint(),
            self.most_likely,
        )

    def constraint(self) -> Constraint | None:
        """Return the constraint of the request, if any. Raises Refused when there are several."""
        outputs = self.structured_outputs or StructuredOutputs()
        regexes = {
            "regex": self.regex,
            "guided_regex": self.guided_regex,
            "structured_outputs.regex": outputs.regex,
        }
        constraints = {
            name: Constraint("regex", text) for name, text in regexes.items() if text is not None
        }
        schemas: dict[str, Any] = {
            "json_schema": self.json_schema,
            "guided_json": self.guided_json,
            "structured_outputs.json": outputs.json,
            "response_format": self._schema(),
        }
        for name, schema in schemas.items():
            if schema is not None:
                text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
                constraints[name] = Constraint("json_schema", text)
        if len(constraints) > 1:
            raise Refused(
                f"{' and '.join(f'`{name}`' for name in constraints)}: expected one constraint"
            )
        return next(iter(constraints.values()), None)

    def _schema(self) -> dict[str, Any] | bool | None:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "object"}
        if wanted.json_schema is None:
            raise Refused(
                "`response_format`: of type json_schema, expected `json_schema`: {`schema`: ...}"
            )
        return wanted.json_schema.schema


class Chat(Asked, kw_only=True):
    """How the body of POST /v1/chat/completions is sampled. ``actors.serving.asked`` reads its
    messages and tools."""

    max_completion_tokens: _Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] = 0
    chat_template_kwargs: dict[str, Any] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise ValueError(
                f"`max_tokens`: {self.max_tokens} and `max_completion_tokens`: {self.max_completion_tokens}: expected one"
            )
        if self.top_logprobs and not self.logprobs:
            raise ValueError(
                f"`top_logprobs`: {self.top_logprobs}: has no effect without `logprobs`: true"
            )

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    @property
    def most_likely(self) -> int:
        return self.top_logprobs

    def longest(self, room: int) -> int:
        return self.max_completion_tokens or self.max_tokens or max(1, room)


class Completion(Asked, kw_only=True):
    """The body of POST /v1/completions. prompt: one or several, each a text or token ids. No
    special token is put before a text.

    logprobs: how many of the most probable tokens are reported with each sampled token.
    """

    prompt: str | list[str | _Token | list[_Token]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def most_likely(self) -> int:
        return self.logprobs or 0

    def longest(self, room: int) -> int:
        return self.max_tokens or COMPLETION_TOKENS

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts of the request. Raises Refused when there is none or too many, or when one is
        empty."""
        parts: Any = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        kinds = {type(part) for part in parts}
        if len(kinds) > 1:
            raise Refused("`prompt`: texts, token ids or lists of them mixed, expected one kind")
        prompts = [parts] if kinds == {int} else parts
        if not 1 <= len(prompts) <= MOST_PROMPTS:
            raise Refused(f"`prompt`: {len(prompts)} prompts, expected 1 to {MOST_PROMPTS}")
        if not all(prompts):
            raise Refused("`prompt`: a prompt of 0 tokens, expected at least one")
        return prompts


_Kind = TypeVar("_Kind", Chat, Completion)


def read(body: Mapping[str, Any], kind: type[_Kind]) -> _Kind:
    """Return the request of a body. Raises Refused, which names the field that cannot be served."""
    known = set(kind.__struct_fields__)
    left = {}
    for name, value in body.items():
        if value is not None and name in known:
            left[name] = value
        elif value is not None and name in _NEUTRAL:
            _check_neutral(name, value)
    try:
        return msgspec.convert(left, kind)
    except msgspec.ValidationError as error:
        raise Refused(str(error)) from None


def _check_neutral(name: str, value: Any) -> None:
    neutral = _NEUTRAL[name]
    if not any(
        value == good and isinstance(value, bool) == isinstance(good, bool) for good in neutral
    ):
        shown = "".join(f"{msgspec.json.encode(good).decode()} or " for good in neutral)
        raise Refused(
            f"`{name}`: {_short(value)}: this server does not support it, expected {shown}nothing"
        )


def _short(value: Any) -> str:
    text = (
        "NaN"
        if isinstance(value, float) and math.isnan(value)
        else msgspec.json.encode(value).decode()
    )
    return text if len(text) <= 80 else f"{text[:80]}..."
