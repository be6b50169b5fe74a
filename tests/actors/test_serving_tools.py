"""Tools and /v1/responses of a served model: required calls are made by constraint, others are read
from the reply, streams are the same replayed."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.actors.test_openai_server import SETTINGS, Client, serving


def schema(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    fixed = {"type": "object", "required": [*properties], "additionalProperties": False}
    return {**fixed, "properties": properties, **more}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def called(answer: dict[str, Any]) -> tuple[str, Any]:
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    return call["function"]["name"], json.loads(call["function"]["arguments"])


LOOK = tool("look")
ADD = tool("add", parameters=schema({"a": {"enum": [1, 2]}, "b": {"enum": [3]}}))
ASKED = {"messages": [{"role": "user", "content": "1 + 3"}], "tools": [ADD], "max_tokens": 400}


@pytest.fixture
async def client(llama: Path) -> AsyncIterator[Client]:
    """A server of the tiny Llama, whose replies are noise and whose prompts with tools are long."""
    async with serving(llama, msgspec.structs.replace(SETTINGS, max_context=1024)) as opened:
        yield opened


@pytest.mark.parametrize("choice", ["required", tool("add")])
async def test_a_required_call_is_made_and_matches_its_schema(client: Client, choice: Any) -> None:
    answer = await client.chat(**ASKED, tool_choice=choice)
    assert [one["finish_reason"] for one in answer["choices"]] == ["tool_calls"]
    assert called(answer) in (("add", {"a": 1, "b": 3}), ("add", {"a": 2, "b": 3}))


@pytest.mark.second
async def test_definitions_of_several_tools_with_equal_names_are_kept_apart(client: Client) -> None:
    def nested(name: str, value: int) -> dict[str, Any]:
        definitions = {"Inner": schema({"v": {"enum": [value]}})}
        return tool(
            name, parameters=schema({"x": {"$ref": "#/$defs/Inner"}}, **{"$defs": definitions})
        )

    asked = ASKED | {"tools": [nested("one", 1), nested("two", 2)], "max_tokens": 190}
    for choice in (tool("two"), "required"):
        name, arguments = called(await client.chat(**asked, tool_choice=choice))
        assert arguments == {"x": {"v": {"one": 1, "two": 2}[name]}}


async def test_a_required_call_that_a_stop_string_cuts_is_text(client: Client) -> None:
    answer = await client.chat(**ASKED, tool_choice="required", stop=["arguments"])
    (one,) = answer["choices"]
    assert one["finish_reason"] == "stop"
    assert "".join(one["message"]["content"].split()) == '{"name":"add","'


async def test_responses_answer_in_their_own_words(client: Client) -> None:
    calling = {"tools": [{"type": "function", **ADD["function"]}], "tool_choice": "required"}
    body = {"input": "1 + 3", "instructions": "Add.", "max_output_tokens": 500}
    status, answer = await client.post("responses", body | calling)
    assert (status, answer["status"]) == (200, "completed"), json.dumps(answer)
    (item,) = answer["output"]
    assert (item["type"], item["name"]) == ("function_call", "add")
    status, answer = await client.post("responses", {"input": "hi", "max_output_tokens": 4})
    assert answer["output"][0]["type"] == "message"
    assert answer["usage"]["output_tokens"] <= 4
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": [7]}}}
    body = {"input": "hi", "max_output_tokens": 20, "text": form}
    status, answer = await client.post("responses", body)
    assert answer["output"][0]["content"][0]["text"] == "7"


@pytest.mark.second
async def test_one_allowed_tool_is_called_and_all_are_in_the_prompt(client: Client) -> None:
    required = {"mode": "required", "tools": [{"type": "function", "name": "add"}]}
    chat = ASKED | {"tools": [LOOK, ADD]}
    choice = {"type": "allowed_tools", "allowed_tools": required}
    answer = await client.chat(**chat, tool_choice=choice)
    free = await client.chat(**chat, tool_choice="none")
    assert called(answer)[0] == "add"
    assert answer["usage"]["prompt_tokens"] == free["usage"]["prompt_tokens"]


async def test_the_messages_dialect_is_served_with_calls_and_counts(client: Client) -> None:
    tools = [{"name": "add", "input_schema": ADD["function"]["parameters"]}]
    body = {"max_tokens": 400, "messages": ASKED["messages"], "tools": tools}
    body["tool_choice"] = {"type": "any"}
    status, message = await client.post("messages", body)
    (call,) = message["content"]
    assert (status, message["stop_reason"], call["name"]) == (200, "tool_use", "add")
    assert call["input"]["b"] == 3
    counted = (await client.post("messages/count_tokens", body))[1]["input_tokens"]
    assert counted == message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
    status, answer = await client.post("messages", body | {"model": "claude"})
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
