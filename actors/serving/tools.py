"""Conversations on a served model: prompts with tools, replies with calls, and the constraint that
makes a reply a call."""

import uuid
from typing import Any

import msgspec
import tokenizers

from coppice.actors.environments.base import Spent
from coppice.actors.serving import anthropic
from coppice.actors.serving.answers import chat_logprobs
from coppice.actors.serving.asked import Asked, chat_of, responses_of
from coppice.actors.serving.pieces import Pieces
from coppice.actors.serving.protocol import Chat, Refused, read
from coppice.actors.serving.remembered import Remembered
from coppice.actors.serving.replies import ChatForm, Form, Reply, ResponsesForm
from coppice.common.chat_template import ChatTemplate
from coppice.common.dialogue import Renderer
from coppice.common.tool_calls import MARKS, ToolCall, family_of, parse
from coppice.wire.messages import Constraint, GenerateResult, Sample

_CALLS = ("tools", "tool_choice", "parallel_tool_calls")
_SHOWN = ("name", "reasoning_content")
"""Fields of messages that some templates read."""
_SAMPLED = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "stop",
    "stream",
    "chat_template_kwargs",
)
"""Fields of /v1/responses that mean what they mean in chat completions."""
_DEFINITIONS = ("$defs", "definitions")
"""Where schemas keep what they refer to."""


class Conversation(msgspec.Struct):
    """A request that is a conversation. sampled: how to sample it. form: how to write its reply.
    plain: it is a chat that has neither tools nor calls, so its texts can be sent while they
    grow."""

    asked: Asked
    sampled: Chat
    form: Form
    plain: bool = False

    @property
    def constraint(self) -> Constraint | None:
        """What the reply must match: a call in JSON if one is required, otherwise what the request
        says."""
        if not self.asked.must_call:
            return self.sampled.constraint()
        if self.sampled.constraint() is not None:
            raise Refused(
                "`tool_choice`: a required call and another constraint: expected one of them"
            )
        offered = [
            tool["function"]
            for tool in self.asked.tools
            if tool["function"]["name"] in self.asked.offered
        ]
        return Constraint("json_schema", msgspec.json.encode(_one_of(offered)).decode())


def chat(body: dict[str, Any], name: str) -> Conversation:
    """Return the conversation of a body of /v1/chat/completions. name: of the model. Raises
    Refused."""
    asked = chat_of(body, _SHOWN)
    sampled = read({key: value for key, value in body.items() if key not in _CALLS}, Chat)
    calls = any(m["role"] == "tool" or "tool_calls" in m for m in asked.messages)
    return _named(
        Conversation(asked, sampled, ChatForm(sampled.model or name), not calls and not asked.tools)
    )


def responses(body: dict[str, Any], name: str, remembered: Remembered) -> Conversation:
    """Return the conversation of a body of /v1/responses. name: of the model. remembered: what its
    ids refer to. Raises Refused."""
    asked, note = responses_of(body, remembered)
    fields = {key: body[key] for key in _SAMPLED if key in body}
    sampled = read(
        {**fields, "max_tokens": asked.most or None, "response_format": _format(body)}, Chat
    )
    return _named(Conversation(asked, sampled, ResponsesForm(sampled.model or name, note)))


def messages(body: dict[str, Any], name: str, counted: bool = False) -> Conversation:
    """Return the conversation of a body of /v1/messages. name: of the model. counted: only its
    tokens are asked for. Raises Refused."""
    talk = chat(anthropic.chat_body(body, counted), name)
    return _named(Conversation(talk.asked, talk.sampled, anthropic.MessagesForm(body, name)))


def _named(talk: Conversation) -> Conversation:
    talk.form.id += uuid.uuid4().hex
    return talk


class Tools:
    """Prompts and replies of one model."""

    def __init__(self, template: ChatTemplate, tokenizer: tokenizers.Tokenizer):
        self.template, self.renderer = template, Renderer(template)
        self.tokenizer, self.family = tokenizer, family_of(template.source)
        added = tokenizer.get_added_tokens_decoder().items()
        self._unsaid = {
            number for number, token in added if token.special and token.content not in MARKS
        }

    def prompt(self, of: Conversation) -> str:
        """Return the text before the reply. Raises Refused when the template refuses the
        conversation."""
        messages, switches = of.asked.messages, of.sampled.chat_template_kwargs
        try:
            if of.plain:
                return self.template.render(messages, switches)
            return self.renderer.whole(messages, of.asked.tools, switches)
        except ValueError as error:
            raise Refused(str(error)) from None

    def reply(self, of: Conversation, result: GenerateResult) -> Reply:
        """Return what was sampled. A call that cannot be read is text."""
        first, *others = [self._one(of, result, sample) for sample in result.samples]
        return msgspec.structs.replace(first, others=others)

    def _one(self, of: Conversation, result: GenerateResult, sample: Sample) -> Reply:
        text = self.tokenizer.decode(
            [t for t in sample.tokens.tolist() if t not in self._unsaid], skip_special_tokens=False
        )
        place, stop = min(
            ((place, stop) for stop in of.sampled.stops if (place := text.find(stop)) >= 0),
            default=(len(text), ""),
        )
        spent = Spent(result.prompt_tokens, result.cached_tokens, len(sample.tokens), sample.finish)
        reply = (
            _called(text[:place], spent)
            if of.asked.must_call
            else self._parsed(of, text[:place], spent)
        )
        return msgspec.structs.replace(reply, stop=stop, logprobs=self._logprobs(of, sample))

    def _parsed(self, of: Conversation, text: str, spent: Spent) -> Reply:
        parsed = parse(text, self.family, of.asked.offered)
        return Reply(parsed.text, parsed.calls, spent, parsed.think)

    def _logprobs(self, of: Conversation, sample: Sample) -> dict[str, Any] | None:
        if not of.sampled.wants_logprobs:
            return None
        pieces, top = Pieces(self.tokenizer, ()), sample.top or [{}] * len(sample.tokens)
        for token, logprob, likely in zip(
            sample.tokens.tolist(), sample.logprobs.tolist(), top, strict=True
        ):
            pieces.feed(token, logprob, likely)
        return chat_logprobs(pieces.take())


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
    """Return the schema of a call of one of the functions. References in their parameters start at
    the root, so their definitions move there."""
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
            {
                "type": "object",
                "properties": properties,
                "required": [*properties],
                "additionalProperties": False,
            }
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
