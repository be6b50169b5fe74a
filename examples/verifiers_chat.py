"""A harness of verifiers 0.4 that talks to the model in the process that plays the episode: it
needs no uv, no container and no other program.

It keeps a system prompt, goes on with a conversation that somebody else speaks in too (a game with
several roles), and calls the tools of MCP servers.
"""

import contextlib
import json
from typing import Any

import mcp  # pyright: ignore[reportMissingImports]
import openai  # pyright: ignore[reportMissingImports]
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]


class InProcessChat(vf.Harness[vf.HarnessConfig]):
    """Asks until a reply calls no tool."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any,
        data: Any, **more: Any,
    ) -> Any:  # fmt: skip
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += map(message_to_wire, prompt or [])
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        async with contextlib.AsyncExitStack() as stack:
            servers = {
                name: await stack.enter_async_context(mcp.Client(url))
                for name, url in mcp_urls.items()
            }
            places = {
                f"{name}_{tool.name}": (server, tool)
                for name, server in servers.items()
                for tool in (await server.list_tools()).tools
            }
            functions = [
                {
                    "name": name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                }
                for name, (_, tool) in places.items()
            ]
            tools: Any = [{"type": "function", "function": one} for one in functions]
            while True:
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=tools or openai.omit
                )
                reply: Any = answer.choices[0].message
                messages.append(reply.model_dump(exclude_none=True))
                if not reply.tool_calls:
                    return vf.ProgramResult(0, "", "")
                for call in reply.tool_calls:
                    server, tool = places[call.function.name]
                    result = await server.call_tool(tool.name, json.loads(call.function.arguments))
                    text = "".join(part.text for part in result.content if part.type == "text")
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


__all__ = ["InProcessChat"]
