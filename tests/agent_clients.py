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


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def right(task: dict[str, Any], answer: Any) -> float:
    return float(str(answer).strip() == task["golds"][0])


def chat_streamed(task: dict[str, Any]) -> float:
    """openai's streamed chat completions, put together by the SDK; history written anew, with other
    ids and null for no text."""
    import openai

    client = openai.OpenAI()
    messages: list[Any] = [{"role": "user", "content": ASKED + task["question"]}]
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
        (call,) = message.tool_calls
        arguments = call.function.arguments.replace(" ", "")
        name, result = f"x{len(messages)}", str(sum(json.loads(arguments).values()))
        function = {"name": "add", "arguments": arguments}
        calls = [{"id": name, "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": name, "content": result})


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
