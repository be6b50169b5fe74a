"""The ways to answer a question: each one's generations and searches, in order."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coppice.actors.engines.endpoint import EndpointText
from coppice.actors.environments.base import Task
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.research.qa_methods import MOST_PASSAGES, REPEATED, USED_UP, spoken
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.evaluating.qa import methods
from coppice.tools.evaluating.qa.methods import How
from coppice.tools.evaluating.qa.scoring import score
from coppice.wire.messages import (
    GenerateRequest,
    GenerateResult,
    Passage,
    RetrieveRequest,
    RetrieveResult,
    Sample,
)

Answered = Callable[..., Any]
QUESTION = "Who wrote {documents} of Rome?"


class Noted(EndpointText):
    def __init__(self) -> None:
        self.asked: list[bool] = []

    def prompt(self, messages: Any, thinking: bool = True, tools: Any = ()) -> str:
        self.asked.append(thinking)
        return super().prompt(messages, tools=tools)


class Scripted:
    """An engine that says its lines one after the other, and a retriever of passages named after
    the query. log: what was asked."""

    def __init__(self, *lines: str):
        self.lines, self.text = list(lines), Noted()
        self.log: list[tuple[str, str]] = []
        self.stops: list[list[str]] = []

    async def call(self, service: str, request: Any, **_: Any) -> Any:
        if service == "retrieve":
            return self._found(request)
        asked: GenerateRequest = request
        self.log.append(("say", self.text.decode(asked.tokens)))
        self.stops.append(asked.sampling.stop)
        tokens = self.text.encode(self.lines.pop(0))
        n = len(tokens)
        sample = Sample(tokens, np.zeros(n, np.float32), np.zeros(n, np.int32), "stop")
        return GenerateResult([sample], 0, 0)

    def _found(self, request: RetrieveRequest) -> RetrieveResult:
        (query,) = request.queries
        self.log.append(("search", query))
        numbers = range(request.topk)
        found = [Passage(f"{query}-{i}", f"T{i}", f"of {query}", 1.0) for i in numbers]
        return RetrieveResult([found])

    @property
    def searches(self) -> list[str]:
        return [what for kind, what in self.log if kind == "search"]

    @property
    def prompts(self) -> list[str]:
        return [what for kind, what in self.log if kind == "say"]


@pytest.fixture
def answered(tmp_path: Path) -> Callable[..., Any]:
    """Runs a method on lines; gives the scripted services, the tree as the journal holds it, and
    its scores."""

    async def run(method: str, how: How, *lines: str) -> tuple[Scripted, Tree, dict[str, float]]:
        services: Any = Scripted(*lines)
        config = SchedulerConfig(budget=how.budget, judge="none")
        journal, counts = Journal(tmp_path / "journal.sqlite"), Counter[str]()
        text: Any = services.text
        runtime = Runtime(
            services, journal, text, SearchQA("short", how.topk), config, counts, lambda *_: None
        )
        tree = Tree(0, "t", "heldout")
        journal.start_tree(tree, 0, 0)
        context = Context(runtime, Task("t", QUESTION, ["Livy"]), tree, random.Random(0))
        await methods.load(method).answer(tree, context, how)
        assert not services.lines, "lines that were not asked for"
        (row,) = journal.trees()
        kept = journal.tree(row)
        journal.close()
        assert [n.text for n in kept.nodes.values()] == [n.text for n in tree.nodes.values()]
        assert [n.text for n in kept.actions()] == list(lines), "every generation is a node"
        return services, kept, score(kept, ["Livy"], counts["retrievals"])

    return run


@pytest.mark.parametrize("method", ["direct", "cot"])
async def test_without_retrieval_one_reply_is_all(answered: Answered, method: str) -> None:
    services, _, found = await answered(method, How(), "I think <answer>Livy</answer>")
    assert (len(services.prompts), services.searches) == (1, [])
    assert QUESTION in services.prompts[0]
    assert (found["em"], found["answered"], found["searches"]) == (1.0, 1.0, 0.0)
    assert found["em_two_blocks"] == 1.0, "the prompt shows an example block"


async def test_rag_searches_for_the_question_then_reads(answered: Answered) -> None:
    services, _, found = await answered("rag", How(topk=2), "<answer>Livy</answer>")
    assert [kind for kind, _ in services.log] == ["search", "say"]
    assert services.searches == [QUESTION]
    assert f"Doc 2(Title: T1) of {QUESTION}" in services.prompts[0]
    assert (found["em"], found["searches"]) == (1.0, 1.0)


async def test_ircot_searches_with_each_sentence_until_the_answer(answered: Answered) -> None:
    lines = ["Rome had historians. Many", "So the answer is: Livy."]
    lines.append("Livy it is. <answer>Livy</answer>")
    services, _, found = await answered("ircot", How(topk=1, budget=4), *lines)
    assert [kind for kind, _ in services.log] == ["search", "say", "search", "say", "say"]
    assert services.searches == [QUESTION, "Rome had historians."]
    assert "Reasoning so far: Rome had historians." in services.prompts[1]
    read = services.prompts[2]
    assert "of Rome had historians." in read
    assert "So the answer is: Livy" not in read, "the reader sees passages, not the reasoning"
    assert services.stops[2] == ["</answer>"]
    assert (found["em"], found["searches"]) == (1.0, 2.0)


async def test_ircot_ends_when_its_searches_are_used_up(answered: Answered) -> None:
    how = How(topk=8, budget=3)
    services, _, _ = await answered("ircot", how, "One.", "Two.", "<answer>x</answer>")
    assert services.searches == [QUESTION, "One.", "Two."]
    assert services.prompts[-1].count("(Title:") == MOST_PASSAGES < 3 * 8


async def test_iter_retgen_searches_with_its_reply_and_question(answered: Answered) -> None:
    lines = ("<think>Hm</think>Ovid? <answer>Ovid</answer>", "No. <answer>Livy</answer>")
    services, _, found = await answered("iter_retgen", How(topk=1, budget=2), *lines)
    assert [kind for kind, _ in services.log] == ["search", "say"] * 2
    # without the thought and the tags
    assert services.searches == [QUESTION, f"Ovid? Ovid {QUESTION}"]
    assert f"of Ovid? Ovid {QUESTION}" in services.prompts[1]
    assert f"of {QUESTION}" not in services.prompts[1], "passages of the round before are not kept"
    assert (found["em"], found["searches"]) == (1.0, 2.0)


async def test_search_o1_inserts_what_was_condensed_not_the_passages(answered: Answered) -> None:
    lines = ["I must know. <search> historians </search>", "Livy wrote it."]
    lines.append("So <answer>Livy</answer>")
    services, _, found = await answered("search_o1", How(topk=1), *lines)
    assert [kind for kind, _ in services.log] == ["say", "search", "say", "say"]
    assert services.searches == ["historians"]
    condensing, reasoning = services.prompts[1], services.prompts[2]
    assert all(part in condensing for part in ("I must know.", "of historians"))
    assert reasoning.endswith("</search>\n<result> Livy wrote it. </result>\n")
    assert "of historians" not in reasoning
    assert (found["em"], found["searches"]) == (1.0, 1.0)
    assert found["response_tokens"] == sum(map(len, lines))


async def test_search_o1_searches_no_query_twice_within_its_budget(answered: Answered) -> None:
    a, b, c = (f"<search>{query}</search>" for query in "abc")
    lines = (a, "found a", a, b, "found b", c, c)
    services, _, found = await answered("search_o1", How(budget=2), *lines)
    assert services.searches == ["a", "b"], "a query that is repeated costs no search"
    assert REPEATED in services.prompts[3]
    assert USED_UP in services.prompts[6]
    assert (found["answered"], found["searches"]) == (0.0, 2.0)


async def test_what_a_model_thinks_is_neither_a_query_nor_a_finding(answered: Answered) -> None:
    lines = ["\n\n<think>\n\n</think>\n\nRome fell. ", "<think>I wonder. "]
    lines.append("<think>so</think><answer>Livy</answer>")
    services, _, found = await answered("ircot", How(topk=1), *lines)
    assert services.searches == [QUESTION, "Rome fell."]
    assert (services.text.asked, found["em"]) == ([False, False, True], 1.0)


def test_a_tag_inside_a_reply_begins_no_thought() -> None:
    assert spoken("Livy, not <think>.") == "Livy, not <think>."


async def test_search_forces_an_answer_after_its_budget_or_not_at_all(answered: Answered) -> None:
    turn = "<think>t</think><search>a</search>"
    how = How(topk=1, budget=2, forced=True)
    services, tree, found = await answered("search", how, turn, turn, "Livy</answer>")
    assert services.searches == ["a", "a"]
    assert tree.actions()[-1].forced
    assert (found["em"], found["answered"], found["searches"]) == (1.0, 0.0, 2.0)


async def test_search_without_force_generates_last_without_a_search(answered: Answered) -> None:
    turn = "<think>t</think><search>a</search>"
    how = How(topk=1, budget=2, forced=False)
    services, tree, found = await answered("search", how, turn, turn)
    assert services.searches == ["a"], "the last turn's search is not made (methods.md 2.1)"
    assert tree.actions()[-1].kind == "action"
    assert (found["em"], found["answered"]) == (0.0, 0.0)
