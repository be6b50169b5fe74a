"""Chats with tools on a served model: prompts with tools, replies with calls, and the constraint that makes a reply a call."""

import uuid
from typing import Any

import msgspec
import tokenizers

from actors.environments.base import Spent
from actors.serving.asked import Asked, body_of, chat_of, responses_of
from actors.serving.protocol import Chat, Refused, read
from actors.serving.replies import ChatForm, Form, Reply, ResponsesForm
from wire.chat_template import ChatTemplate
from wire.dialogue import Renderer
from wire.messages import Constraint, GenerateResult
from wire.tool_calls import MARKS, ToolCall, family_of, parse

_CALLS = ("tools", "tool_choice", "parallel_tool_calls")
_SAMPLED = ("model", "temperature", "top_p", "top_k", "seed", "stop", "stream", "chat_template_kwargs")
"""Fields that both endpoints have."""
_DEFINITIONS = ("$defs", "definitions")
"""Where schemas keep what they refer to."""


class Conversation(msgspec.Struct):
    """A request with tools, or to /v1/responses. sampled: how to sample it. form: how to write its reply."""

    asked: Asked
    sampled: Chat
    form: Form

    @property
    def constraint(self) -> Constraint | None:
        """What the reply must match: a call in JSON if one is required, otherwise what the request says."""
        if not self.asked.must_call:
            return self.sampled.constraint()
        if self.sampled.constraint() is not None:
            raise Refused("`tool_choice`: a required call and another constraint: expected one of them")
        offered = [tool["function"] for tool in self.asked.tools if tool["function"]["name"] in self.asked.offered]
        return Constraint("json_schema", msgspec.json.encode(_one_of(offered)).decode())


def conversation(raw: bytes, name: str, responses: bool = False) -> Conversation | None:
    """Return the conversation of a body, or None for a chat that has neither tools nor calls. name: of the model. Raises Refused."""
    body = body_of(raw)
    if not responses and not _has_calls(body):
        return None
    asked = responses_of(body) if responses else chat_of(body)
    fields = (
        {key: body[key] for key in _SAMPLED if key in body}
        if responses
        else {k: v for k, v in body.items() if k not in _CALLS}
    )
    if responses:
        fields |= {"max_tokens": asked.most or None, "response_format": _format(body)}
    sampled = read(msgspec.json.encode({**fields, "messages": [{"role": "user", "content": ""}]}), Chat)
    if sampled.n != 1 or sampled.wants_logprobs:
        raise Refused("`n` and `logprobs` are not supported with `tools`: expected 1 and false")
    form = ResponsesForm(sampled.model or name) if responses else ChatForm(sampled.model or name)
    form.id += uuid.uuid4().hex
    return Conversation(asked, sampled, form)


class Tools:
    """Prompts and replies of one model."""

    def __init__(self, template: ChatTemplate, tokenizer: tokenizers.Tokenizer):
        self.renderer, self.tokenizer, self.family = Renderer(template), tokenizer, family_of(template.source)
        added = tokenizer.get_added_tokens_decoder().items()
        self._unsaid = {number for number, token in added if token.special and token.content not in MARKS}

    def prompt(self, of: Conversation) -> str:
        """Return the text before the reply. Raises Refused when the template refuses the conversation."""
        try:
            return self.renderer.whole(of.asked.messages, of.asked.tools, of.sampled.chat_template_kwargs)
        except ValueError as error:
            raise Refused(str(error)) from None

    def reply(self, of: Conversation, result: GenerateResult) -> Reply:
        """Return what was sampled. A call that cannot be read is text."""
        (sample,) = result.samples
        text = self.tokenizer.decode(
            [t for t in sample.tokens.tolist() if t not in self._unsaid], skip_special_tokens=False
        )
        text = text[: min((place for stop in of.sampled.stops if (place := text.find(stop)) >= 0), default=len(text))]
        spent = Spent(result.prompt_tokens, result.cached_tokens, len(sample.tokens), sample.finish)
        if of.asked.must_call:
            return _called(text, spent)
        parsed = parse(text, self.family, of.asked.offered)
        return Reply(parsed.text, parsed.calls, spent, parsed.think)


def _has_calls(body: dict[str, Any]) -> bool:
    messages = body.get("messages")
    messages = [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    return bool(body.get("tools")) or any(m.get("tool_calls") or m.get("role") == "tool" for m in messages)


def _called(text: str, spent: Spent) -> Reply:
    """Return the call that a constrained reply is; text if the limit or a stop string has cut it."""
    try:
        call = msgspec.json.decode(text, type=_Call)
    except msgspec.DecodeError:
        return Reply(text, [], spent)
    return Reply("", [ToolCall(call.name, bytes(call.arguments).decode())], spent)


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


def _one_of(functions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a call of one of the functions. References in their parameters start at the root, so their definitions move there."""
    calls, moved = list[dict[str, Any]](), dict[str, Any]()
    for place, function in enumerate(functions):
        text = msgspec.json.encode(function.get("parameters") or {"type": "object"}).decode()
        for key in _DEFINITIONS:
            text = text.replace(f'"#/{key}/', f'"#/$defs/{place}.')
        parameters = msgspec.json.decode(text)
        for key in _DEFINITIONS:
            moved |= {f"{place}.{name}": value for name, value in parameters.pop(key, {}).items()}
        if '"$ref":"#"' in text:  # the parameters themselves
            moved[f"{place}."] = msgspec.json.decode(
                msgspec.json.encode(parameters).replace(b'"#"', f'"#/$defs/{place}."'.encode())
            )
            parameters = {"$ref": f"#/$defs/{place}."}
        properties = {"name": {"const": function["name"]}, "arguments": parameters}
        calls.append(
            {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        )
    return {"anyOf": calls, **({"$defs": moved} if moved else {})}


def _format(body: dict[str, Any]) -> dict[str, Any] | None:
    """The form of the answer as chat completions name it."""
    text = body.get("text") or {}
    wanted = text.get("format") or {} if isinstance(text, dict) else None
    if not isinstance(wanted, dict):
        raise Refused(f"`text`: {str(body['text'])[:80]}: expected an object with a `format`")
    if wanted.get("type") != "json_schema":
        return None if wanted.get("type") in (None, "text") else {"type": wanted["type"]}
    return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}
