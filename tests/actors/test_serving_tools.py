"""Tools and /v1/responses of a served model: required calls are made by constraint, others are read from the reply, streams are the same replayed."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.serving import tools
from tests.actors import test_openai_server
from tests.actors.test_openai_server import SETTINGS, Client, serving

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
LOOK = {"type": "function", "function": {"name": "look"}}
ASKED = {"messages": [{"role": "user", "content": "1 + 3"}], "tools": [ADD], "max_tokens": 400}


@pytest.fixture
async def client(llama: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    """A server of the tiny Llama, whose replies are noise and whose prompts with tools are long."""
    monkeypatch.setattr(test_openai_server, "SETTINGS", msgspec.structs.replace(SETTINGS, max_context=1024))
    async with serving(llama) as opened:
        yield opened


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_a_required_call_is_made_and_matches_its_schema(client: Client, choice: Any) -> None:
    answer = await client.chat(**ASKED, tool_choice=choice)
    (one,) = answer["choices"]
    assert one["finish_reason"] == "tool_calls"
    (call,) = one["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["a"] in (1, 2)
    assert arguments["b"] == 3


async def test_a_named_tool_is_called_among_several(client: Client) -> None:
    fields = ASKED | {"tools": [LOOK, ADD]}
    answer = await client.chat(**fields, tool_choice={"type": "function", "function": {"name": "add"}})
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"


async def test_definitions_of_several_tools_with_equal_names_are_kept_apart(client: Client) -> None:
    """As pydantic writes nested parameters: references that start at the root of each tool's own schema."""

    def tool(name: str, value: int) -> dict[str, Any]:
        inner = {
            "type": "object",
            "properties": {"v": {"enum": [value]}},
            "required": ["v"],
            "additionalProperties": False,
        }
        parameters = {
            "type": "object", "$defs": {"Inner": inner}, "properties": {"x": {"$ref": "#/$defs/Inner"}},
            "required": ["x"], "additionalProperties": False,
        }  # fmt: skip
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    for name, value in (("one", 1), ("two", 2)):
        choice = {"type": "function", "function": {"name": name}}
        for tool_choice in (choice, "required"):
            answer = await client.chat(
                **(ASKED | {"tools": [tool("one", 1), tool("two", 2)], "max_tokens": 190}), tool_choice=tool_choice
            )
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            called = {"one": 1, "two": 2}[call["function"]["name"]]
            assert json.loads(call["function"]["arguments"]) == {"x": {"v": called}}
            assert tool_choice == "required" or called == value


async def test_parameters_that_refer_to_themselves_stay_their_own(client: Client) -> None:
    """A reference to the root is one to the tool's parameters, not to the list of tools."""
    properties = {"next": {"$ref": "#"}, "v": {"enum": [7]}}
    parameters = {"type": "object", "properties": properties, "required": ["v"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "tree", "parameters": parameters}}
    answer = await client.chat(
        **(ASKED | {"tools": [LOOK, tool], "max_tokens": 190}),
        tool_choice={"type": "function", "function": {"name": "tree"}},
    )
    found = answer["choices"][0]["message"].get("tool_calls")
    if found is None:  # nested until the limit: still by the schema
        assert answer["choices"][0]["message"]["content"].count('"next"') > 1
        return
    arguments = json.loads(found[0]["function"]["arguments"])
    while arguments:
        assert arguments["v"] == 7
        assert set(arguments) <= {"next", "v"}
        arguments = arguments.get("next")


async def test_a_required_call_that_a_stop_string_cuts_is_text(client: Client) -> None:
    answer = await client.chat(**ASKED, tool_choice="required", stop=["arguments"])
    (one,) = answer["choices"]
    assert one["finish_reason"] == "stop"
    assert "".join(one["message"]["content"].split()) == '{"name":"add","'


async def test_a_call_that_is_cut_is_no_call(client: Client) -> None:
    answer = await client.chat(**(ASKED | {"max_tokens": 3}), tool_choice="required")
    (one,) = answer["choices"]
    assert one["finish_reason"] == "length"
    assert "tool_calls" not in one["message"]


async def test_calls_and_their_results_are_read_and_a_reply_without_a_call_is_text(client: Client) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 3}'}}
    history = [
        *ASKED["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "4"},
    ]
    answer = await client.chat(messages=history, tools=[ADD], max_tokens=8)
    (one,) = answer["choices"]
    assert one["finish_reason"] in ("stop", "length")
    assert isinstance(one["message"]["content"], str)
    assert answer["usage"]["prompt_tokens"] > 0


async def test_a_stream_is_the_same_call_in_deltas(client: Client) -> None:
    chunks = await client.stream(
        "chat/completions", {**ASKED, "tool_choice": "required", "seed": 5, "stream_options": {"include_usage": True}}
    )
    whole = await client.chat(**ASKED, tool_choice="required", seed=5)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert call["function"] == whole["choices"][0]["message"]["tool_calls"][0]["function"]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


async def test_responses_answer_in_their_own_words(client: Client) -> None:
    flat = {"type": "function", **ADD["function"]}
    body = {
        "input": "1 + 3",
        "instructions": "Add.",
        "tools": [flat],
        "tool_choice": "required",
        "max_output_tokens": 500,
    }
    status, answer = await client.post("responses", body)
    assert (status, answer["status"]) == (200, "completed"), json.dumps(answer)
    (item,) = answer["output"]
    assert (item["type"], item["name"]) == ("function_call", "add")
    status, answer = await client.post("responses", {"input": "hi", "max_output_tokens": 4})
    assert answer["output"][0]["type"] == "message"
    assert answer["usage"]["output_tokens"] <= 4
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": [7]}}}
    status, answer = await client.post("responses", {"input": "hi", "max_output_tokens": 20, "text": form})
    assert answer["output"][0]["content"][0]["text"] == "7"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required", "regex": "a"}, "constraint"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"model": "another"}, "model"),
        ({"presence_penalty": 1}, "presence_penalty"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(client: Client, fields: dict[str, Any], word: str) -> None:
    status, answer = await client.post("chat/completions", ASKED | fields)
    assert status in (400, 404)
    assert word in answer["error"]["message"]


async def test_a_form_that_is_no_object_is_refused_by_name(client: Client) -> None:
    for text in ("plain", {"format": "json"}):
        status, answer = await client.post("responses", {"input": "hi", "text": text})
        assert status == 400
        assert "`text`" in answer["error"]["message"]


def test_a_chat_without_tools_is_none_of_this() -> None:
    assert tools.chat({"messages": ASKED["messages"], "tools": []}, "m").plain
