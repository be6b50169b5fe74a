"""Question answering with a search tool: ``<think> .. </think>``, then ``<search> query
</search>`` or ``<answer> answer </answer>``. A search appends passages (methods.md 1.4, 1.5)."""

import re
from collections.abc import Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from coppice.actors.environments import base
from coppice.actors.environments.base import Action, Environment, Task, Tools, Transition
from coppice.common.numbers import Count, Natural
from coppice.wire.messages import TOPK_MOST, JudgedTurn, Passage

INVALID_NOTICE = (
    "\nThat action could not be used. Write <search> query </search> to look something up, or"
    " <answer> answer </answer> to finish, after a <think> block. Try once more.\n"
)

_OPENS = re.compile(r"\s*<think>")
_TURN = re.compile(r"</think>\s*<(search|answer)>")
"""The end of a thought and the beginning of a block."""
_BLOCK = re.compile(r"<(search|answer)>((?:(?!<\1>).)*?)</\1>", re.DOTALL)
_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_RETRIEVED_CHARACTERS = 300
"""The number of characters of an observation that the judge's context shows (methods.md 1.3)."""


class Step(msgspec.Struct, frozen=True):
    """One past step of an episode."""

    think: str
    query: str
    observation: str


class SearchState(msgspec.Struct, frozen=True):
    """Everything that happened in an episode so far."""

    question: str
    steps: tuple[Step, ...] = ()


class SearchQA(Environment):
    """The search-QA rules. prompt: the name of a .txt file beside this one, or a path. topk: the
    number of passages that a search shows.

    think: with "required" (SLATE), a block without a think block right before it is invalid; with
    "optional" (Search-R1, PPR), the first search or answer block counts, whatever precedes it.
    newlines: line feeds before and after an information block (SLATE 1, PPR 2).
    """

    name = "search_qa"
    stop = ["</search>", "</answer>"]
    forced_prefix = "\n<answer>"
    outcome_judge = "exact_match"
    headline = "em"
    fresh = False
    searches = True
    rewarded_by_judge = False

    def __init__(
        self,
        prompt: str = "search_r1",
        topk: Annotated[int, msgspec.Meta(ge=1, le=TOPK_MOST)] = 3,
        max_observation_characters: Count = 2000,
        think: Literal["required", "optional"] = "required",
        newlines: Natural = 1,
    ):
        path, self.template = base.prompt_template(prompt, Path(__file__).parent)
        if "{question}" not in self.template:
            raise ValueError(f"prompt file {path} has no {{question}} placeholder")
        self.topk, self.max_observation_characters = topk, max_observation_characters
        self.think, self.newlines = think, newlines

    @property
    def shown(self) -> list[Any]:
        """Everything, besides question, actions and passages, on which the text of an episode
        depends."""
        return [self.template, self.topk, self.max_observation_characters, self.newlines]

    def initial(self, task: Task) -> SearchState:
        return SearchState(task.question)

    def prompt(self, task: Task, state: SearchState | None = None) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.template.replace("{question}", task.question)}]

    def read(self, state: SearchState | None, text: str) -> Action:
        """Return the action in generated text: a think block (unless optional), then a search or
        answer block; otherwise it is invalid."""
        parts = _strict(text) if self.think == "required" else _free(text)
        if parts is None:
            return Action("invalid", text)
        think, kind, content = (part.strip() for part in parts)
        return Action(kind, text, content, think=think)

    def parse_forced(self, text: str) -> Action:
        """Return the answer: the text from the last opening tag to the closing tag."""
        return Action("answer", text, _last(text.split("</answer>")[0], "answer").strip())

    async def step(self, state: SearchState, action: Action, tools: Tools) -> Transition:
        """An answer ends the episode, a search shows passages, and an invalid action shows a
        notice. Each of them uses one step."""
        if action.kind == "answer":
            return Transition(state, "", True)
        query, observation = action.argument or "", INVALID_NOTICE
        if action.kind == "search":
            observation = self.render(await tools.retrieve(query, self.topk))
        steps = (*state.steps, Step(action.think or "", query, observation))
        return Transition(msgspec.structs.replace(state, steps=steps), observation, False)

    def render(self, passages: list[Passage]) -> str:
        """Return the information block of methods.md 1.5, cut at the most characters."""
        lines = "\n".join(f"Doc {i}(Title: {p.title}) {p.text}" for i, p in enumerate(passages, 1))
        lines = lines[: self.max_observation_characters] or "No results found."
        around = "\n" * self.newlines
        return f"{around}<information>{lines}</information>{around}"

    @staticmethod
    def context(state: SearchState) -> str:
        """Return the judge's context of methods.md 1.3: the bare question, then each past step."""
        lines = [f"Question: {state.question}"]
        for step in state.steps:
            bare = step.observation.replace("<information>", "").replace("</information>", "")
            retrieved = bare.strip()[:_RETRIEVED_CHARACTERS]
            lines += [f"Thinking: {step.think}", f"Query: {step.query}", f"Retrieved: {retrieved}"]
        return "\n".join(lines)

    def judged(
        self, task: Task, state: SearchState, action: Action, step: int, budget: int
    ) -> JudgedTurn:
        return msgspec.structs.replace(
            super().judged(task, None, action, step, budget),
            context=self.context(state),
            think=action.think,
            query=action.argument if action.kind == "search" else None,
            answer=action.argument if action.kind == "answer" else None,
            past_queries=[s.query for s in state.steps if s.query],
            past_observations=[s.observation for s in state.steps],
            evidence=task.evidence,
        )

    def measures(self, task: Task, turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        """Return em (also by hops), f1, valid actions, answered (without force), turns and
        searches.

        If turns have rewards, also return their sum as "return". If turns were judged after their
        search (PPR), also return their process and judge_valid.
        """
        own = [turn for turn in turns if not turn["forced"]]
        em, last = [turns[-1].get("outcome", 0.0)], own[-1]
        answered, searches = not turns[-1]["forced"], sum("query" in turn for turn in own)
        results = {
            "em": em,
            f"em_{task.hops}_hop": em,
            "f1": [turns[-1].get("f1", 0.0)],
            "valid": [turn.get("valid", 0.0) for turn in own],
            "answered": [last.get("answered", float(answered))],
            "turns": [float(len(own))],
            "searches": [last.get("searches", float(searches))],
        }
        for name in ("process", "judge_valid", "response_tokens"):
            if values := [turn[name] for turn in own if name in turn]:
                results[name] = values
        if any("reward" in turn for turn in own):
            results["return"] = [fsum(turn.get("reward", 0.0) for turn in own)]
        return results


def _strict(text: str) -> tuple[str, str, str] | None:
    """Return think, kind and content of a text that has a think block and then a search or answer
    block, None for any other text.

    The block ends at its first closing tag and begins at the last opening tag before that tag, as
    ``judges.exact_match`` reads answers.
    """
    if (opened := _OPENS.match(text)) is None:
        return None
    closed = {kind: text.rfind(f"</{kind}>") for kind in ("search", "answer")}
    for turn in _TURN.finditer(text, opened.end()):
        kind, begin = turn[1], turn.end()
        if closed[kind] >= begin:
            content = text[begin : text.index(f"</{kind}>", begin)]
            return text[opened.end() : turn.start()], kind, _last(content, kind)
    return None


def _free(text: str) -> tuple[str, str, str] | None:
    """Return the same for the first search or answer block, whatever precedes it, with the last
    think block before it, if any."""
    if (block := _BLOCK.search(text)) is None:
        return None
    # text that no tag closes is not searched
    thoughts, closing, _ = text[: block.start()].rpartition("</think>")
    thinks = _THINK.findall(thoughts + closing)
    return thinks[-1] if thinks else "", block[1], block[2]


def _last(content: str, kind: str) -> str:
    """Return the text after the last opening tag in a block. An earlier tag, left open or only
    mentioned, is not part of the answer."""
    return content.rsplit(f"<{kind}>", 1)[-1]
