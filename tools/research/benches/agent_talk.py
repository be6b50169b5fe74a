"""The agent of the benchmark ``agent_calls``: a conversation over plain HTTP, without any library to import."""

import json
import os
import urllib.request
from typing import Any

TURNS = 10
ADDED = "Go on from there, and name three things that you have not named."
"""What it says after each reply, about 15 tokens of the default model."""


def talk(task: dict[str, Any]) -> float:
    """Ask ten times, each time with the whole history."""
    messages = [{"role": "system", "content": ADDED}, {"role": "user", "content": task["question"]}]
    for _ in range(TURNS):
        request = urllib.request.Request(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            json.dumps({"model": "policy", "messages": messages}).encode(),
            {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
        )
        reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
        messages += [reply, {"role": "user", "content": ADDED}]
    return 1.0
