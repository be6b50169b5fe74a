"""Agents in processes of their own before a scripted policy, with a real tree and journal."""

import random
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from coppice.actors.environments.agents.environment import AgentEnvironment
from coppice.actors.environments.base import Task
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Node, Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.wire import messages as wire

AGENT = '''
import json, os, threading, urllib.error, urllib.request

def post(path, body, headers={}):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], **headers}
    url, body = os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))

def user(text):
    return {"role": "user", "content": text}

def tool(name, **parameters):
    parameters = {"type": "object", **parameters}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}

def ask(messages, *tools, headers={}, **more):
    tools = [tool(name) for name in tools]
    return post("/chat/completions", {"messages": messages, "tools": tools, **more}, headers)

def call(messages, *tools, **more):
    return ask(messages, *tools, **more)["choices"][0]["message"]

def counting(task):
    """Calls a tool as long as the policy wants, and writes its history in its own way."""
    messages = [{"role": "system", "content": "Add."}, user(task["question"])]
    while (reply := call(messages, "add")).get("tool_calls"):
        calls, answers = [], []
        for i, one in enumerate(reply["tool_calls"]):
            arguments = json.loads(one["function"]["arguments"])
            written = {"name": "add", "arguments": json.dumps(arguments, indent=2)}
            calls.append({"id": f"mine{i}", "type": "function", "function": written})
            content = [{"type": "text", "text": str(sum(arguments.values()))}]
            answers.append({"role": "tool", "tool_call_id": f"mine{i}", "content": content})
        told = {"role": "assistant", "content": reply["content"] or "", "tool_calls": calls}
        messages += [told, *answers]
    return float(reply["content"].strip() == task["golds"][0])
'''
"""What the agents of all test modules begin with."""
TEMPLATE = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THINKING = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'tool' %}<tool_response>
{{ m.content }}
</tool_response>{% else %}{% if m.role == 'assistant' %}\
{{ m.content.split('</think>')[-1].lstrip('\\n') }}\
{% else %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}
<tool_call>
{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Knows tools, and leaves the thoughts of earlier replies out, as the templates of thinking models
do."""


class Policy:
    """An actor and a judge: ``reply`` gives the reply to a prompt, for each candidate; ``before``
    is awaited at every call. The first token of sample number i has the log-probability -(i + 1),
    so that a node tells which sample it is. ``asked``: the prompt of each sample."""

    def __init__(self, text: Text, reply: Callable[[str, int], str]):
        self.text, self.reply = text, reply
        self.prompts: list[str] = []
        self.asked: list[np.ndarray] = []
        self.samples: list[wire.Sample] = []
        self.before: Callable[[], Awaitable[Any]] | None = None
        (self.end,) = text.encode("</s>")

    async def call(self, service: str, request: Any, **_: Any) -> Any:
        if isinstance(request, wire.JudgeRequest):
            rewards = [float(len(turn.response)) for turn in request.turns]
            return wire.JudgeResult([wire.Judgement({"reward": reward}) for reward in rewards])
        assert isinstance(request, wire.GenerateRequest)
        if self.before is not None:
            await self.before()
        prompt = self.text.tokenizer.decode(request.tokens.tolist(), skip_special_tokens=False)
        self.prompts.append(prompt)
        drawn = []
        for i in range(request.n):
            tokens = np.append(self.text.encode(self.reply(prompt, i)), self.end).astype(np.int32)
            cut = tokens[: request.sampling.max_tokens]
            logprobs = np.linspace(-1, -0.1, len(cut), dtype=np.float32)
            logprobs[0] = -(len(self.samples) + 1)
            finish = "stop" if len(cut) == len(tokens) else "length"
            drawn.append(wire.Sample(cut, logprobs, np.zeros(len(cut), np.int32), finish))
            self.samples.append(drawn[-1])
            self.asked.append(request.tokens)
        return wire.GenerateResult(drawn, len(request.tokens), 0)

    def drew(self, node: Node) -> int:
        """Which sample a node is."""
        assert node.logprobs is not None
        return round(-float(node.logprobs[0])) - 1


class Staged:
    """A context over stand-in services, with a real tree, journal and tokenizer. groups: what was
    emitted."""

    def __init__(
        self, journal: Path, text: Text, services: Any, environment: Any, task: Task,
        settings: SchedulerConfig, **shared: Any,
    ):  # fmt: skip
        self.text, self.services, self.environment = text, services, environment
        self.task, self.settings = task, settings
        self.groups: list[list[wire.Turn]] = []
        self.counts: Counter[str] = Counter()
        self.journal = Journal(journal)
        self.runtime = Runtime(
            services, self.journal, text, environment, settings, self.counts, self.emit, **shared
        )
        self.tree = Tree(0, task.id)
        self.journal.start_tree(self.tree, 0, 0)

    def emit(self, tree: Tree, turns: list[wire.Turn]) -> None:
        self.journal.save_group(tree, len(self.groups), turns)
        self.groups.append(turns)

    def anew(self, tree: Tree | None = None, seed: int = 1) -> Context:
        """A new context of a tree, the stage's own if none is given."""
        return Context(self.runtime, self.task, tree or self.tree, random.Random(seed))

    async def grow(self, strategy: Any, tree: Tree | None = None, **options: Any) -> Tree:
        context = self.anew(tree)
        await context.plant()
        await strategy.grow(context.tree, context, **options)
        return context.tree

    def reread(self) -> Tree:
        """The only tree, as the journal has it."""
        (row,) = self.journal.trees()
        return self.journal.tree(row)


class Stage(Staged):
    """A context over an agent. name: of the agent in the module ``agents_of_a_test``, or
    "module:function"."""

    def __init__(
        self, folder: Path, llama: Path, reply: Callable[[str, int], str], name: str,
        template: str = TEMPLATE, **options: Any,
    ):  # fmt: skip
        model = folder / "model"
        if not model.exists():
            shutil.copytree(llama, model)
            (model / "chat_template.jinja").write_text(template.replace("<|im_end|>", "</s>"))
        function = name if ":" in name else f"agents_of_a_test:{name}"
        environment = AgentEnvironment(function, **options)
        text = Text(str(model), environment.marks)
        self.policy = Policy(text, reply)
        settings = SchedulerConfig(judge="any", max_action_tokens=400)
        task = Task("t", "1 + 2 + 4", ["7"])
        journal = folder / f"journal-{name.rpartition(':')[2]}"
        super().__init__(journal, text, self.policy, environment, task, settings)

    def read(self, tree: Tree, node: Node) -> str:
        """The text of all tokens up to the end of a node."""
        return self.text.tokenizer.decode(tree.prefix(node).tolist(), skip_special_tokens=False)

    def check(self, tree: Tree) -> None:
        """Every sample is one node, with the tokens and log-probabilities that were sampled, below
        exactly the tokens that the policy was given."""
        actions = [node for node in tree.nodes.values() if node.kind == "action"]
        samples = list(range(len(self.policy.samples)))
        assert sorted(map(self.policy.drew, actions)) == samples, "a sample is lost or twice there"
        for action in actions:
            number, above = self.policy.drew(action), tree.parent(action)
            sample = self.policy.samples[number]
            assert above is not None and action.logprobs is not None and action.sampled is not None
            np.testing.assert_array_equal(tree.prefix(above), self.policy.asked[number])
            np.testing.assert_array_equal(action.tokens, sample.tokens)
            np.testing.assert_array_equal(action.logprobs, sample.logprobs)
            assert action.sampled.all() and len(action.sampled) == len(sample.tokens)
        assert all(node.sampled is None for node in tree.nodes.values() if node.kind != "action")


Stages = Callable[..., Stage]


def adds(prompt: str, i: int) -> str:
    """Adds with the tool, twice, then answers; the second of several candidates thinks longer."""
    think = "Well. " * i
    results = prompt.count("<tool_response>")
    if results == 0:
        return think + '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    if results == 1:
        return think + '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
    return "7" if i == 0 else "8"
