"""Conversations on a served model: prompts with tools, replies with calls, and the constraint that
makes a reply a call."""

import uuid
from typing import Any

import msgspec
import tokenizers

from coppice.actors.environments.base import Spent
from coppice.actors.serving import anthropic
from coppice.actors.serving.answers import Pieces, chat_logprobs
from coppice.actors.serving.conversations import Conversation, ResponseStore, chat_of, responses_of
from coppice.actors.serving.protocol import ChatFields, RequestRefused, read, unexpected
from coppice.actors.serving.replies import ChatForm, Form, Reply, ResponsesForm
from coppice.common.chat_template import ChatTemplate
from coppice.common.dialogue import Renderer
from coppice.common.tool_calls import MARKS, ToolCall, family_of, parse
from coppice.wire.messages import Constraint, GenerateResult, Sample

_CALLS = ("tools", "tool_choice", "parallel_tool_calls")
_SHOWN = ("name", "reasoning_content")
"""Fields of messages that some templates read."""
_SAMPLED = "model temperature top_p top_k seed stop stream chat_template_kwargs".split()
"""Fields of /v1/responses that mean what they mean in chat completions."""
_DEFINITIONS = ("$defs", "definitions")
"""Where schemas keep what they refer to."""


class ServedRequest(msgspec.Struct):
    """form: how to write the reply. plain: without tools and calls: its text is sent as it
    grows."""

    conversation: Conversation
    sampled: ChatFields
    form: Form
    plain: bool = False

    def __post_init__(self) -> None:
        self.form.id += uuid.uuid4().hex

    @property
    def constraint(self) -> Constraint | None:
        """What the reply must match: a call if one is required, else what is asked."""
        if not self.conversation.must_call:
            return self.sampled.constraint()
        if self.sampled.constraint() is not None:
            raise RequestRefused("`tool_choice`: a required call and a constraint: expected one")
        functions = [tool["function"] for tool in self.conversation.tools]
        offered = [one for one in functions if one["name"] in self.conversation.offered]
        return Constraint("json_schema", msgspec.json.encode(_one_of(offered)).decode())


def chat(body: dict[str, Any], name: str) -> ServedRequest:
    """Read a body of /v1/chat/completions. name: of the model. Raises RequestRefused."""
    conversation = chat_of(body, _SHOWN)
    sampled = read({key: value for key, value in body.items() if key not in _CALLS}, ChatFields)
    calls = any(m["role"] == "tool" or "tool_calls" in m for m in conversation.messages)
    plain = not calls and not conversation.tools
    return ServedRequest(conversation, sampled, ChatForm(sampled.model or name), plain)


def responses(body: dict[str, Any], name: str, store: ResponseStore) -> ServedRequest:
    """Read a body of /v1/responses. name: of the model. Raises RequestRefused."""
    conversation, keep = responses_of(body, store)
    fields = {key: body[key] for key in _SAMPLED if key in body}
    fields |= {"max_tokens": conversation.most or None, "response_format": _format(body)}
    sampled = read(fields, ChatFields)
    return ServedRequest(conversation, sampled, ResponsesForm(sampled.model or name, keep))


def messages(body: dict[str, Any], name: str, counted: bool = False) -> ServedRequest:
    """Read a body of /v1/messages. counted: only its tokens. Raises RequestRefused."""
    same = chat(anthropic.chat_body(body, counted), name)
    return ServedRequest(same.conversation, same.sampled, anthropic.MessagesForm(body, name))


class Conversing:
    """Prompts and replies of one model."""

    def __init__(self, template: ChatTemplate, tokenizer: tokenizers.Tokenizer):
        self.template, self.renderer = template, Renderer(template)
        self.tokenizer, self.family = tokenizer, family_of(template.source)
        added = tokenizer.get_added_tokens_decoder().items()
        self._hidden = {
            number for number, token in added if token.special and token.content not in MARKS
        }

    def prompt(self, request: ServedRequest) -> str:
        """Return the text before the reply. Raises RequestRefused when the template does."""
        if not self.template.available:
            model = request.form.model
            raise RequestRefused(f"model {model} has no chat template: use /v1/completions")
        conversation, switches = request.conversation, request.sampled.chat_template_kwargs
        try:
            if request.plain:
                return self.template.render(conversation.messages, switches)
            return self.renderer.whole(conversation.messages, conversation.tools, switches)
        except ValueError as error:
            raise RequestRefused(str(error)) from None

    def reply(self, request: ServedRequest, result: GenerateResult) -> Reply:
        """Return what was sampled. A call that cannot be read is text."""
        first, *others = [self._one(request, result, sample) for sample in result.samples]
        return msgspec.structs.replace(first, others=others)

    def _one(self, request: ServedRequest, result: GenerateResult, sample: Sample) -> Reply:
        tokens = [token for token in sample.tokens.tolist() if token not in self._hidden]
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        places = [(text.find(stop), stop) for stop in request.sampled.stops if stop in text]
        place, stop = min(places, default=(len(text), ""))
        text = text[:place]
        spent = Spent(result.prompt_tokens, result.cached_tokens, len(sample.tokens), sample.finish)
        logprobs = self._logprobs(sample) if request.sampled.logprobs else None
        if not request.conversation.must_call:
            parsed = parse(text, self.family, request.conversation.offered)
            return Reply(parsed.text, parsed.calls, spent, parsed.think, stop, logprobs)
        try:  # the reply is the call, unless the limit or a stop string has cut it
            call = msgspec.json.decode(text, type=_Call)
        except msgspec.DecodeError:
            return Reply(text, [], spent, "", stop, logprobs)
        calls = [ToolCall(call.name, bytes(call.arguments).decode())]
        return Reply("", calls, spent, "", stop, logprobs)

    def _logprobs(self, sample: Sample) -> dict[str, Any]:
        pieces, top = Pieces(self.tokenizer, ()), sample.top or [{}] * len(sample.tokens)
        tokens, logprobs = sample.tokens.tolist(), sample.logprobs.tolist()
        for token, logprob, likely in zip(tokens, logprobs, top, strict=True):
            pieces.feed(token, logprob, likely)
        return chat_logprobs(pieces.take())


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


def _one_of(functions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a call of one of the functions, with their definitions at the root."""
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
        call = {"type": "object", "properties": properties, "required": [*properties]}
        calls.append({**call, "additionalProperties": False})
    return {"anyOf": calls, **({"$defs": moved} if moved else {})}


def _format(body: dict[str, Any]) -> dict[str, Any] | None:
    """The form of the answer as chat completions name it."""
    text = body.get("text") or {}
    wanted = text.get("format") or {} if isinstance(text, dict) else None
    if not isinstance(wanted, dict):
        raise unexpected("text", body["text"], "an object with a `format`")
    if wanted.get("type") != "json_schema":
        return None if wanted.get("type") in (None, "text") else {"type": wanted["type"]}
    return {"type": "json_schema", "json_schema": {"schema": wanted.get("schema")}}
