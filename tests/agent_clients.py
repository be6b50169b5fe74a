"""Agents written with the clients that people use, of which any may be missing. Each is called with
a task in a process of its own and returns a reward: whether it answers right."""
# pyright: reportMissingImports=false

import json
import os
import urllib.request
from typing import Any

ASKED = "Add with the tool: "
NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": ["a", "b"]}
PARAMETERS |= {"additionalProperties": False}
ADD: Any = {"name": "add", "description": "Adds.", "parameters": PARAMETERS, "strict": True}
TOOLS: Any = [{"type": "function", "function": ADD}]
FLAT: Any = [{"type": "function", **ADD}]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def right(task: dict[str, Any], answer: Any) -> float:
    return float(str(answer).strip() == task["golds"][0])


def total(arguments: str) -> str:
    return str(sum(json.loads(arguments).values()))


def asked(task: dict[str, Any]) -> list[Any]:
    """A conversation that begins with the task."""
    return [{"role": "user", "content": ASKED + task["question"]}]


def results(calls: list[Any]) -> list[dict[str, Any]]:
    """The results of calls of chat completions, as the SDK's objects have them."""
    texts = [(call.id, total(call.function.arguments)) for call in calls]
    return [{"role": "tool", "tool_call_id": name, "content": text} for name, text in texts]


def outputs(calls: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The results of calls of responses, by their ids and arguments."""
    kind = {"type": "function_call_output"}
    return [{**kind, "call_id": name, "output": total(arguments)} for name, arguments in calls]


def chat(task: dict[str, Any]) -> float:
    """openai's chat completions; history as the SDK's own objects."""
    import openai

    create: Any = openai.OpenAI().chat.completions.create
    messages = asked(task)
    while True:
        reply = create(model="gpt-any", messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        assert reply.choices[0].finish_reason == ("tool_calls" if message.tool_calls else "stop")
        assert reply.usage.total_tokens > reply.usage.completion_tokens > 0
        if not message.tool_calls:
            return right(task, message.content)
        messages += [message, *results(message.tool_calls)]


def chat_streamed(task: dict[str, Any]) -> float:
    """openai's streamed chat completions, put together by the SDK; history written anew, with other
    ids and null for no text."""
    import openai

    client, messages = openai.OpenAI(), asked(task)
    options: Any = {"stream_options": {"include_usage": True}, "tools": TOOLS}
    while True:
        request: Any = {"model": "gpt-any", "messages": messages, **options}
        with client.chat.completions.stream(**request) as stream:
            kinds = [event.type for event in stream]
            reply = stream.get_final_completion()
        message = reply.choices[0].message
        assert reply.usage is not None and reply.usage.completion_tokens > 0
        if not message.tool_calls:
            assert "content.done" in kinds
            return right(task, message.content)
        assert "tool_calls.function.arguments.done" in kinds
        calls, answers = list[Any](), results(message.tool_calls)
        for i, call in enumerate(message.tool_calls):
            function = call.function.model_dump()
            function = {"name": "add", "arguments": function["arguments"].replace(" ", "")}
            name = answers[i]["tool_call_id"] = f"x{len(messages)}{i}"
            calls.append({"id": name, "type": "function", "function": function})
        messages += [{"role": "assistant", "content": None, "tool_calls": calls}, *answers]


def responses(task: dict[str, Any]) -> float:
    """openai's responses."""
    import openai

    client, items = openai.OpenAI(), asked(task)
    fields: Any = {"model": "gpt-any", "instructions": "You add.", "tools": FLAT}
    while True:
        reply = client.responses.create(input=items, **fields)
        assert reply.status == "completed" and reply.usage.output_tokens > 0
        if not (calls := [item for item in reply.output if item.type == "function_call"]):
            return right(task, reply.output_text)
        items += [*reply.output, *outputs([(call.call_id, call.arguments) for call in calls])]


def responses_streamed(task: dict[str, Any]) -> float:
    """openai's streamed responses, put together by the SDK."""
    import openai

    client, items = openai.OpenAI(), asked(task)
    while True:
        with client.responses.stream(model="gpt-any", input=items, tools=FLAT) as stream:
            kinds = [event.type for event in stream]
            reply = stream.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        if not (calls := [item for item in reply.output if item.type == "function_call"]):
            assert "response.output_text.delta" in kinds
            return right(task, reply.output_text)
        for call in calls:
            written = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments}
            items.append({"type": "function_call", **written})
        items += outputs([(call.call_id, call.arguments) for call in calls])


def retried(task: dict[str, Any]) -> float:
    """openai's own retry after a time-out that is too short, on both endpoints."""
    import openai

    client = openai.OpenAI(timeout=1.0, max_retries=100)
    one: Any = [{"role": "user", "content": "one"}]
    first = client.chat.completions.create(model="any", messages=one)
    second = client.responses.create(model="any", input="two")
    return float((first.choices[0].message.content, second.output_text) == ("reply 1", "reply 2"))


def cut(task: dict[str, Any]) -> float:
    """What openai's SDK is told of replies that its own limit cuts, on both endpoints."""
    import openai

    client, request = openai.OpenAI(), {"model": "any"}
    chat: Any = {**request, "messages": [{"role": "user", "content": "long"}]}
    flat: Any = {**request, "input": "long"}
    told: Any = client.chat.completions.create(**chat, max_tokens=5)
    assert (told.choices[0].finish_reason, told.usage.completion_tokens) == ("length", 5)
    response: Any = client.responses.create(**flat, max_output_tokens=7)
    assert (response.status, response.usage.output_tokens) == ("incomplete", 7)
    assert response.incomplete_details.reason == "max_output_tokens"
    assert client.chat.completions.create(**chat).choices[0].finish_reason == "stop"
    return 1.0


def required(task: dict[str, Any]) -> float:
    """Requires a call twice: of any tool, then of a named one."""
    import openai

    create: Any = openai.OpenAI().chat.completions.create
    user = {"role": "user", "content": "call"}
    named: Any = {"type": "function", "function": {"name": "other"}}
    fields: Any = {"model": "any", "tools": [*TOOLS, named]}
    first = create(messages=[user], tool_choice="required", **fields)
    second = create(messages=[user, user], tool_choice=named, **fields)
    called = [bool(reply.choices[0].message.tool_calls) for reply in (first, second)]
    return float(called[0] + 2 * called[1])


async def agents_streamed(task: dict[str, Any]) -> float:
    """openai-agents at its default endpoint, streamed."""
    import agents

    agents.set_tracing_disabled(True)
    tools: Any = [agents.function_tool(add)]
    agent = agents.Agent(name="adder", instructions="You add.", tools=tools, model="any")
    result: Any = agents.Runner.run_streamed(agent, ASKED + task["question"])
    data: list[Any] = [getattr(event, "data", None) async for event in result.stream_events()]
    kind = "response.output_text.delta"
    deltas = [one.delta for one in data if getattr(one, "type", "") == kind]
    assert "".join(deltas) == result.final_output
    return right(task, result.final_output)


def pydantic_tool(task: dict[str, Any]) -> float:
    """pydantic-ai with a tool."""
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel

    agent: Any = pydantic_ai.Agent(OpenAIChatModel("any"), system_prompt="You add.")
    agent.tool_plain(add)
    return right(task, agent.run_sync(ASKED + task["question"]).output)


def langgraph(task: dict[str, Any]) -> float:
    """langgraph's ready agent over langchain's chat model."""
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model="any"), [add])
    result = agent.invoke({"messages": [("user", ASKED + task["question"])]})
    return right(task, result["messages"][-1].content)


def smol_tools(task: dict[str, Any]) -> float:
    """smolagents' agent that calls tools, of which one gives the answer."""
    import smolagents

    kinds: Any = smolagents
    base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    model = kinds.OpenAIModel("any", api_base=base, api_key=key)
    agent = kinds.ToolCallingAgent(tools=[kinds.tool(add)], model=model, verbosity_level=0)
    return right(task, agent.run(ASKED + task["question"]))


def messages(task: dict[str, Any]) -> float:
    """Anthropic's dialect as Claude Code speaks it: a system prompt of which a line differs in
    every call, and results in blocks."""
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    key = {"x-api-key": os.environ["ANTHROPIC_API_KEY"]}

    def post(path: str, body: Any) -> Any:
        request = urllib.request.Request(url + path, json.dumps(body).encode(), key)
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    tool = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}
    first = {"type": "text", "text": ASKED + task["question"]}
    history = list[Any]([{"role": "user", "content": [first]}])
    while True:
        lines = (f"x-anthropic-billing-header: cch={len(history)};", "You add.")
        system = [{"type": "text", "text": line} for line in lines]
        body = {"model": "claude-any", "max_tokens": 200, "system": system, "tools": [tool]}
        body["messages"] = history
        assert post("/count_tokens", body)["input_tokens"] > 0
        message = post("", body)
        calls = [block for block in message["content"] if block["type"] == "tool_use"]
        assert message["stop_reason"] == ("tool_use" if calls else "end_turn")
        if not calls:
            return right(task, message["content"][0]["text"])
        answers = list[Any]()
        for call in calls:
            content = [{"type": "text", "text": str(sum(call["input"].values()))}]
            answers.append({"type": "tool_result", "tool_use_id": call["id"], "content": content})
        history.append({"role": "assistant", "content": message["content"]})
        history.append({"role": "user", "content": answers})
