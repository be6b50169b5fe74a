"""How the bodies of a served model are sampled. Fields beyond OpenAI's own are ``top_k``,
``chat_template_kwargs``, and a constraint with the field names of SGLang (``regex``,
``json_schema``) or vLLM (``guided_regex``, ``guided_json``, ``structured_outputs``)."""

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import msgspec

from coppice.actors.serving.protocol import RequestRefused, converted
from coppice.wire.messages import Constraint, Sampling

_Stop = Annotated[str, msgspec.Meta(min_length=1)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

COMPLETION_TOKENS = 16
"""The max_tokens of a completion that sets none, as in the protocol."""
MOST_PROMPTS = 128
"""The most prompts of one completions request."""
_UNSUPPORTED = """
    guided_choice guided_grammar ebnf grammar structural_tag stop_regex allowed_token_ids lora_path
    logits_processors custom_logit_processor truncate_prompt_tokens chat_template
"""
"""Fields of other servers that change the answer whatever their value is."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_UNSUPPORTED.split(), ()),
    **dict.fromkeys("presence_penalty frequency_penalty min_p min_tokens".split(), (0,)),
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
    """How a body is sampled, as chat completions say it."""

    model: str = ""
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = 0
    n: _Positive = 1
    stop: _Stop | list[_Stop] = []
    seed: int | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] = 0
    response_format: _ResponseFormat | None = None
    regex: str | None = None
    json_schema: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_json: str | dict[str, Any] | None = None
    structured_outputs: _StructuredOutputs | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if 0 < self.temperature < 1e-3:  # float32 could not hold the scaled logits
            raise ValueError(f"`temperature`: {self.temperature}: expected 0 or at least 0.001")
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` has no effect without `stream`: true")
        most, also = self.max_tokens, self.max_completion_tokens
        if None not in (most, also) and most != also:
            raise ValueError(f"`max_tokens`: {most}, `max_completion_tokens`: {also}: expected one")
        if (top := self.top_logprobs) and not self.logprobs:
            raise ValueError(f"`top_logprobs`: {top}: has no effect without `logprobs`: true")

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def sampling(self, room: int, constraint: Constraint | None) -> Sampling:
        """Return how the engine must sample. room: tokens left of the context."""
        most = self.max_completion_tokens or self.max_tokens or max(1, room)
        t, p, k = self.temperature, self.top_p, max(0, self.top_k)
        return Sampling(most, t, p, k, self.stops, self.seed, constraint, self.top_logprobs)

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


def read(body: Mapping[str, Any], handled: Collection[str] = ()) -> SamplingFields:
    """Return how a body is sampled. handled: fields that others read. Raises RequestRefused, which
    names the field that cannot be served."""
    fields = {k: value for k, value in body.items() if value is not None and k not in handled}
    for name in filter(_NEUTRAL.__contains__, fields):
        value, neutral = fields[name], _NEUTRAL[name]
        same = [good for good in neutral if isinstance(value, bool) == isinstance(good, bool)]
        if value not in same:
            text = "NaN" if isinstance(value, float) and math.isnan(value) else _json(value)
            text = text if len(text) <= 80 else f"{text[:80]}..."
            expected = "".join(f"{_json(good)} or " for good in neutral)
            raise RequestRefused(f"`{name}`: {text}: not supported, expected {expected}nothing")
    return converted(fields, SamplingFields)


class _Completion(msgspec.Struct):
    """What a body of /v1/completions has of its own. No special token is put before a text."""

    prompt: str | list[str | _Token | list[_Token]]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    top_logprobs: Literal[0] | None = None


def completion_of(body: Mapping[str, Any]) -> tuple[list[str | list[int]], SamplingFields]:
    """Return the prompts of a body of /v1/completions, and how it is sampled. Raises
    RequestRefused."""
    own = converted(body, _Completion)
    parts: Any = [own.prompt] if isinstance(own.prompt, str) else own.prompt
    if len(kinds := {type(part) for part in parts}) > 1:
        raise RequestRefused("`prompt`: texts, token ids or lists of them, expected one kind")
    prompts = [parts] if kinds == {int} else parts
    if not 1 <= len(prompts) <= MOST_PROMPTS:
        raise RequestRefused(f"`prompt`: {len(prompts)} prompts, expected 1 to {MOST_PROMPTS}")
    if not all(prompts):
        raise RequestRefused("`prompt`: a prompt of 0 tokens, expected at least one")
    top = {"logprobs": own.logprobs is not None, "top_logprobs": own.logprobs or 0}
    most = COMPLETION_TOKENS if body.get("max_tokens") is None else body["max_tokens"]
    fields = {**body, **top, "max_tokens": most}
    return prompts, read(fields, ("max_completion_tokens", "chat_template_kwargs"))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
