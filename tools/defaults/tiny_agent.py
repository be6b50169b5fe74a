"""The tiny search policy for agents: it calls a tool instead of writing search tags, and answers in
plain text. Its warm start is that of ``search_play`` in this notation."""

from pathlib import Path
from typing import Any

import tokenizers

from coppice.scheduler.growth.text import Text
from coppice.tools.defaults.tiny_search import make_tiny_search, names_and_fields, tokenizer
from coppice.wire.messages import Passage

NAME = "tiny-agent"
"""The value of ``model.name`` that selects this policy."""
INSTRUCTIONS = "Answer the question."
"""The system message of the warm start. An agent that sends another one begins with a policy that
has never read it."""
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
CALL, CALLED = '<tool_call>{"name": "search", "arguments": {"query": "', '"}}</tool_call>'
"""What stands around a query. Each is one token of plain text, which decoding keeps."""
TEMPLATE = (
    "{% for tool in tools or [] %}Tool: {{ tool['function']['name'] }}{{ '\\n' }}{% endfor %}"
    "{% for m in messages %}{{ m['content'] }}{% for call in m['tool_calls'] or [] %}"
    "<tool_call>{{ {'name': call['function']['name'],"
    " 'arguments': call['function']['arguments']} | tojson }}</tool_call>"
    "{% endfor %}{{ '\\n' }}{% endfor %}"
)
"""Names the tools, and ends each message with a newline."""
TOPK = 2
"""Passages that a search of the warm start shows."""
END = "</s>"
"""Ends a reply."""


def make_tiny_agent(folder: Path, corpus: Path) -> Path:
    """Write a model folder with random weights, tokenizer and chat template, of about 0.6 million
    parameters."""
    words = tokenizer(*names_and_fields(corpus), f"Tool: search {INSTRUCTIONS}")
    tokens: Any = [tokenizers.AddedToken(text, normalized=False) for text in (CALL, CALLED)]
    words.add_tokens(tokens)
    words.chat_template = TEMPLATE
    return make_tiny_search(folder, corpus, words=words)


class Calls:
    """The notation of an agent that searches with a tool and answers in plain text
    (``search_play.Notation``)."""

    def __init__(self):
        self.topk, self.shown = TOPK, [NAME, TOPK, INSTRUCTIONS, SEARCH, CALL, CALLED]

    def opening(self, text: Text, question: str) -> str:
        """Return the prompt, as an agent's first request is rendered."""
        system = {"role": "system", "content": INSTRUCTIONS}
        return text.prompt([system, {"role": "user", "content": question}], tools=[SEARCH])

    def searched(self, think: str, query: str) -> str:
        """Return the reply that calls the tool."""
        return f"<think>{think}</think> {CALL} {query}{CALLED}{END}"

    def results(self, passages: list[Passage]) -> str:
        """Return what stands between a call and the next reply."""
        rows = [f"Doc {i}(Title: {p.title}) {p.text}\n" for i, p in enumerate(passages, 1)]
        return "\n" + "".join(rows)

    def answered(self, think: str, answer: str) -> str:
        """Return the reply that ends the episode."""
        return f"<think>{think}</think> {answer}{END}"
