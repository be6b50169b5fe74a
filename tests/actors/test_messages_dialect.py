"""The Messages dialect at the gateway, over HTTP: a conversation in it asks what the same chat
asks, and replies, streams and errors are in its words."""

import asyncio
import json
from typing import Any

import pytest

from coppice.actors.environments.base import Spent
from coppice.actors.serving import anthropic, replies
from coppice.actors.serving.conversations import chat_of
from coppice.actors.serving.replies import Reply
from coppice.common.dialogue import histories
from coppice.common.tool_calls import ToolCall
from tests.actors.conftest import Door

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA, "cache_control": {}}
USER = {"role": "user", "content": "hello"}
HELLO: dict[str, Any] = {"model": "claude-any", "max_tokens": 9, "messages": [USER]}
TEXTS = [{"type": "text", "text": text, "cache_control": {}} for text in ("1 + ", "2")]
REPLY = [
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "text", "text": "I add."},
    {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
    {"type": "tool_use", "id": "toolu_2", "name": "add", "input": {}},
]
RESULTS = [
    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "3"}]},
    {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no `a`", "is_error": True},
    {"type": "text", "text": "Go on."},
]
SAID = (("user", TEXTS), ("assistant", REPLY), ("user", RESULTS))
HISTORY = [{"role": role, "content": content} for role, content in SAID]
CALLS = [
    {"id": "c1", "function": {"name": "add", "arguments": '{"a":1}'}},
    {"id": "c2", "function": {"name": "add", "arguments": "{}"}},
]
SAME_CHAT = [
    {"role": "system", "content": "1 + 2"},
    {"role": "user", "content": "1 + 2"},
    {"role": "assistant", "content": "I add.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "tool", "tool_call_id": "c2", "content": "Error: no `a`"},
    {"role": "user", "content": "Go on."},
]


async def replied(door: Door, reply: Reply, body: dict[str, Any], **headers: str) -> str:
    return (await door.turn(reply, "messages", body, **headers))[1]


async def error(door: Door, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
    status, text = await door.post("messages", {**HELLO, **body}, **headers)
    assert json.loads(text)["type"] == "error" and not door.session.waiting
    return status, json.loads(text)["error"]


def test_a_conversation_in_blocks_is_the_same_history_as_the_chat_that_says_the_same() -> None:
    function = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    chat = chat_of({"messages": SAME_CHAT, "max_tokens": 9, "tools": tools})
    for given in (TEXTS, "1 + 2"):
        body = {**HELLO, "messages": HISTORY, "tools": [TOOL], "system": given}
        asked = chat_of(anthropic.chat_body(body))
        assert histories(asked.messages, asked.tools) == histories(chat.messages, chat.tools)
        assert (asked.tools, asked.choice, asked.most) == (chat.tools, "auto", 9)


async def test_a_reply_is_blocks_of_text_and_calls_with_its_thought_if_wanted(door: Door) -> None:
    reply = Reply("I add.", [ToolCall("add", '{"a": 1}')], Spent(10, 4, 3), "hm")
    for thinking in ({}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}):
        body, key = {**HELLO, "tools": [TOOL], **thinking}, {"x-api-key": door.session.key}
        message = json.loads(await replied(door, reply, body, **key))
        *thoughts, text, call = message["content"]
        assert [block["thinking"] for block in thoughts] == (["hm"] if thinking else [])
        assert text == {"type": "text", "text": "I add."}
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
        assert (message["model"], message["stop_reason"]) == ("claude-any", "tool_use")
        assert list(message["usage"].values()) == [6, 0, 4, 3]


async def test_a_stream_puts_together_the_whole_message(door: Door) -> None:
    body = {**HELLO, "tools": [TOOL], "thinking": {"type": "adaptive"}}
    calls = [ToolCall("add", '{"a": 1}'), ToolCall("add", "{}")]
    reply = Reply("I add.", calls, Spent(10, 4, 3), "hm")
    whole = json.loads(await replied(door, reply, body))
    *events, rest = (await replied(door, reply, {**body, "stream": True})).split("\n\n")
    decoded = [json.loads(event.partition("\ndata: ")[2]) for event in events]
    assert rest == ""
    for event, told in zip(events, decoded, strict=True):
        assert event.startswith(f"event: {told['type']}\n")
    begun = [event["content_block"] for event in decoded if "content_block" in event]
    assert [block["type"] for block in begun] == [block["type"] for block in whole["content"]]
    deltas = [event["delta"] for event in decoded if event["type"] == "content_block_delta"]
    for key, said in (("thinking", ["hm"]), ("text", ["I add."])):
        assert [delta[key] for delta in deltas if key in delta] == said
    inputs = [json.loads(delta["partial_json"]) for delta in deltas if "partial_json" in delta]
    assert inputs == [{"a": 1}, {}] and decoded[-1] == {"type": "message_stop"}
    last = decoded[-2]
    assert (last["delta"]["stop_reason"], last["usage"]) == ("tool_use", whole["usage"])


async def test_the_reason_of_the_end_is_in_its_words(door: Door) -> None:
    long, stopped = Reply("x", spent=Spent(1, 0, 1, "length")), Reply("x", stop="\n")
    for reply, reason in (
        (Reply("x"), "end_turn"),
        (long, "max_tokens"),
        (stopped, "stop_sequence"),
    ):
        message = json.loads(await replied(door, reply, HELLO))
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, reply.stop or None)


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
IMAGES = {"type": "tool_result", "content": [IMAGE]}
USE = {"type": "tool_use", "name": "add", "input": {}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [IMAGES]}]}, "tool_result"),
    ({"messages": [{"role": "assistant", "content": [{**USE, "input": 3}]}]}, "`input`"),
    ({"messages": [USER, {"role": "assistant", "content": "It is"}]}, "cannot be continued"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools of the provider"),
    ({"mcp_servers": [{"url": "x"}]}, "`mcp_servers`"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "`tool_choice`"),
    ({"tools": [TOOL], "tool_choice": {"type": []}}, "`tool_choice`"),
]


@pytest.mark.parametrize(("body", "said"), REFUSED)
async def test_a_refusal_has_its_shape(door: Door, body: Any, said: str) -> None:
    status, refusal = await error(door, body)
    assert (status, refusal["type"]) == (400, "invalid_request_error")
    assert said in refusal["message"]


async def test_a_thread_is_answered_with_the_reason_to_send_it_whole(door: Door) -> None:
    """The tool runner of anthropic 2.13 reads this reason, and goes on with whole conversations."""
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg-1"}):
        status, refusal = await error(door, {"thread": thread})
        assert (status, refusal["details"]["error_code"]) == (400, "thread_unsupported_request")


async def test_an_unknown_key_and_a_refusal_in_a_stream_are_in_its_shape(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "KEEPALIVE_S", 0.01)
    status, refusal = await error(door, {}, **{"x-api-key": "nobody"})
    assert (status, refusal["type"]) == (401, "authentication_error")
    asking = asyncio.create_task(door.post("messages", {**HELLO, "stream": True}))
    await door.request()
    await asyncio.sleep(0.05)  # the stream has begun
    door.gateway.end(door.session, "the episode has ended")
    name, line = (await asking)[1].strip().split("\n")[-2:]
    assert name == "event: error" and "the episode has ended" in line


async def test_tokens_are_counted_by_whoever_has_the_tokenizer(door: Door) -> None:
    begun = {**HELLO, "messages": [*HELLO["messages"], {"role": "assistant", "content": "half"}]}
    status, text = await door.post("messages/count_tokens", begun)
    assert status == 404 and json.loads(text)["error"]["type"] == "not_found_error"
    door.session.count = lambda asked: len(asked.messages)
    assert await door.post("messages/count_tokens", begun) == (200, '{"input_tokens": 2}')
