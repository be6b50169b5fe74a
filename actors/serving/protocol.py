"""Requests of the OpenAI-compatible protocol, checked: an unsupported field that would change the
answer is refused by its name.

Fields beyond OpenAI's own: ``top_k``, ``chat_template_kwargs``, and a constraint with the field
names of SGLang (``regex``, ``json_schema``) or vLLM (``guided_regex``, ``guided_json``,
``structured_outputs``). A field that is null counts as absent, and so does one that nobody knows.
"""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from coppice.wire.messages import Constraint, Sampling

_Stop = Annotated[str, msgspec.Meta(min_length=1)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

COMPLETION_TOKENS = 16
"""The max_tokens of a completion that sets none, as in the protocol."""
MOST_PROMPTS = 128
"""The most prompts of one completions request."""

_UNSUPPORTED = (
    "guided_choice", "guided_grammar", "ebnf", "grammar", "structural_tag", "stop_regex", "allowed_token_ids", "logits_processors",
    "custom_logit_processor", "truncate_prompt_tokens", "chat_template", "lora_path",
)  # fmt: skip
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
    """A request that is answered with ``status`` and the reason. code: its name in the protocol."""

    def __init__(self, reason: str, status: int = 400, code: str | None = None):
        super().__init__(reason)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """Return the error as the body of an answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


def shown(value: Any) -> str:
    """Return the beginning of a field's value, for the reason of a refusal."""
    return repr(value)[:80]


_Kind = TypeVar("_Kind")


def converted(fields: Mapping[str, Any], kind: type[_Kind]) -> _Kind:
    """Return the fields of a struct. Raises Refused, which names the first that does not fit, its
    value and what was expected."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        expected, _, place = str(error).partition(" - at `$.")
        field = re.match(r"\w*", place)
        if field is None or field[0] not in fields:  # such as a field that is missing
            raise Refused(str(error)) from None
        wish = expected.removeprefix("Expected ")
        raise unexpected(place.rstrip("`"), fields[field[0]], wish) from None


def unexpected(field: str, value: Any, expected: str) -> Refused:
    """Return the refusal of a field's value."""
    return Refused(f"`{field}`: {shown(value)}: expected {expected}")


class _JsonSchema(msgspec.Struct):
    schema: dict[str, Any] | bool


class ResponseFormat(msgspec.Struct):
    """The form of the answer. The type "json_schema" needs ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """A constraint with vLLM's names. Its other fields are constraints too: refused."""

    regex: str | None = None
    json: str | dict[str, Any] | None = None


class StreamOptions(msgspec.Struct):
    """include_usage: end a stream with the counts of tokens. include_obfuscation: no effect."""

    include_usage: bool = False
    include_obfuscation: bool = False


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
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def _sampling(self, max_tokens: int, top_logprobs: int) -> Sampling:
        return Sampling(
            max_tokens, self.temperature, self.top_p, max(0, self.top_k), self.stops, self.seed,
            self.constraint(), top_logprobs,
        )  # fmt: skip

    def constraint(self) -> Constraint | None:
        """Return the constraint of the request, if any. Raises Refused when there are several."""
        outputs = self.structured_outputs or StructuredOutputs()
        fields: dict[str, tuple[Literal["regex", "json_schema"], Any]] = {
            "regex": ("regex", self.regex),
            "guided_regex": ("regex", self.guided_regex),
            "structured_outputs.regex": ("regex", outputs.regex),
            "json_schema": ("json_schema", self.json_schema),
            "guided_json": ("json_schema", self.guided_json),
            "structured_outputs.json": ("json_schema", outputs.json),
            "response_format": ("json_schema", self._schema()),
        }
        constraints = {
            name: Constraint(kind, _text(value))
            for name, (kind, value) in fields.items()
            if value is not None
        }
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


class Chat(SamplingFields, kw_only=True):
    """How a body of /v1/chat/completions is sampled. ``conversations`` reads the rest."""

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
        """How many of the most probable tokens are reported with each sampled token."""
        return self.top_logprobs

    def sampling(self, room: int) -> Sampling:
        """Return how the engine must sample. room: tokens left of the context."""
        longest = self.max_completion_tokens or self.max_tokens or max(1, room)
        return self._sampling(longest, self.top_logprobs)


class Completion(SamplingFields, kw_only=True):
    """The body of POST /v1/completions. No special token is put before a text."""

    prompt: str | list[str | _Token | list[_Token]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def most_likely(self) -> int:
        """How many of the most probable tokens are reported with each sampled token."""
        return self.logprobs or 0

    def sampling(self, room: int) -> Sampling:
        """Return how the engine must sample. room: has no effect."""
        return self._sampling(self.max_tokens or COMPLETION_TOKENS, self.most_likely)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts. Raises Refused when there is none or too many, or one is empty."""
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


_Sampled = TypeVar("_Sampled", Chat, Completion)


def read(body: Mapping[str, Any], kind: type[_Sampled]) -> _Sampled:
    """Return the request of a body. Raises Refused, which names the field that cannot be served."""
    set_fields = {name: value for name, value in body.items() if value is not None}
    for name, value in set_fields.items():
        if name in _NEUTRAL and name not in kind.__struct_fields__:
            _check_neutral(name, value)
    return converted(set_fields, kind)


def _check_neutral(name: str, value: Any) -> None:
    neutral = _NEUTRAL[name]
    if not any(
        value == good and isinstance(value, bool) == isinstance(good, bool) for good in neutral
    ):
        expected = "".join(f"{_json(good)} or " for good in neutral)
        text = "NaN" if isinstance(value, float) and math.isnan(value) else _json(value)
        text = text if len(text) <= 80 else f"{text[:80]}..."
        raise Refused(
            f"`{name}`: {text}: this server does not support it, expected {expected}nothing"
        )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _text(schema: Any) -> str:
    return schema if isinstance(schema, str) else _json(schema)
