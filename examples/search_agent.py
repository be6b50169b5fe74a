"""A search agent written with openai-agents, which knows nothing of Coppice.
configs/agent-tiny.toml trains it."""

import json
import os
import urllib.request

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def search(query: str) -> str:
    """Return the two passages that are nearest to a query."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/retrieve",
        json.dumps({"queries": [query], "topk": 2}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    (passages,) = json.load(urllib.request.urlopen(request))["result"]
    rows = [passage["contents"].split("\n", 1) for passage in passages]
    return "\n".join(
        f"Doc {i}(Title: {title[1:-1]}) {text}" for i, (title, text) in enumerate(rows, 1)
    )


async def run(task: dict) -> None:
    """Answer the question of a task. The judge of the run compares the last reply with the right
    answers."""
    agent = Agent("searcher", instructions="Answer the question.", model="policy", tools=[search])
    await Runner.run(agent, task["question"], max_turns=4)
