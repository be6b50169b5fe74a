"""An agent of ten lines that needs no library (docs/agents.md)."""

import json
import os
from urllib.request import Request, urlopen


def ask(messages: list) -> dict:
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    with urlopen(
        Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    ) as answer:
        return json.load(answer)["choices"][0]["message"]


def run(task: dict) -> float:
    messages = [{"role": "user", "content": task["question"]}]
    messages += [ask(messages), {"role": "user", "content": "Are you sure? Answer again."}]
    return float(ask(messages)["content"].strip() in task["golds"])
