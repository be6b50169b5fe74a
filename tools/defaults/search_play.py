"""Warm start of the tiny search policy: from random behaviour on made-up countries it learns the
notation, in exactly the tokens of a rollout. No fact of the corpus is taught, and which of the many
actions pays is left to reinforcement learning."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from coppice.actors.environments.base import Task
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.learner.fine_tune import Example
from coppice.scheduler.growth.text import Text
from coppice.tools.defaults.tiny_search import names_and_fields
from coppice.tools.defaults.warm_start import COOLDOWN, WarmStart, from_play
from coppice.wire.messages import Passage

TURNS = 4
"""The most turns of an episode; the last of them answers."""
ANSWERS = (0.05, 0.5)
"""The shares of turns that answer: before any passage was shown, and afterwards."""
QUERIES = {"right": 0.6, "subject": 0.15, "field": 0.1, "other": 0.15}
"""The shares of queries by what they name."""
ANSWERED = {"first": 0.65, "second": 0.12, "title": 0.1, "asked": 0.13}
"""The shares of answers by what they name: the value of the first or second passage shown, a title
shown, a name of the question."""
NEED, LOOK = " I need the {field} of{subject}. ", " I look it up. "
FOUND, RECALLED = " The {field} is{value}. ", " I know it. "


class WantedFact(msgspec.Struct):
    """The fact that has to be found next: a field of a subject (" Name"), with the title and value
    that the right search returns."""

    subject: str
    field: str
    title: str
    value: str


class Notation(Protocol):
    """How a kind of episode is written. topk: the passages that a search shows. shown: everything
    on which the texts depend."""

    topk: int
    shown: list[Any]

    def opening(self, text: Text, question: str) -> str: ...

    def searched(self, think: str, query: str) -> str: ...

    def results(self, passages: list[Passage]) -> str: ...

    def answered(self, think: str, answer: str) -> str: ...


class Tags:
    """The notation of the environment search_qa."""

    def __init__(self, environment: SearchQA):
        self.environment, self.topk, self.shown = environment, environment.topk, environment.shown

    def opening(self, text: Text, question: str) -> str:
        """Return the prompt."""
        return text.prompt(self.environment.prompt(Task("", question)))

    def searched(self, think: str, query: str) -> str:
        """Return the action that searches."""
        return f"<think>{think}</think> <search> {query} </search>"

    def results(self, passages: list[Passage]) -> str:
        """Return what stands between a search and the next action."""
        return self.environment.render(passages)

    def answered(self, think: str, answer: str) -> str:
        """Return the action that answers."""
        return f"<think>{think}</think> <answer> {answer} </answer>"


def search_play(
    text: Text, notation: Notation, names: Sequence[str], fields: Sequence[str], count: int,
    config: WarmStart,
) -> list[Example]:  # fmt: skip
    """Return ``count`` turns, shuffled, of random episodes."""
    rng = random.Random(config.seed)
    examples: list[Example] = []
    while len(examples) < count:
        examples += _Episode(text, notation, names, fields, rng).play(rng.random() < config.two_hop)
    rng.shuffle(examples)
    return examples[:count]


class _Episode:
    def __init__(
        self, text: Text, notation: Notation, names: Sequence[str], fields: Sequence[str],
        rng: random.Random,
    ):  # fmt: skip
        self.text, self.notation, self.rng = text, notation, rng
        self.names, self.fields = names, fields
        self.tokens: list[int] = []
        self.examples: list[Example] = []
        self.shown: list[Passage] = []

    def play(self, two_hops: bool) -> list[Example]:
        """Play one episode and return its turns as examples."""
        rng = self.rng
        question, subjects, left = self._question(two_hops)
        self.tokens = self.text.encode(self.notation.opening(self.text, question)).tolist()
        for turn in range(1, TURNS + 1):
            if turn == TURNS or rng.random() < ANSWERS[bool(self.shown)]:
                self._answer(left[0].field, subjects)
                break
            if self._search(left[0], subjects) and len(left) > 1:
                left.pop(0)
        return self.examples

    def _question(self, two_hops: bool) -> tuple[str, list[str], list[WantedFact]]:
        """Return the question, the names in it, and the wanted fact of each hop."""
        rng = self.rng
        title, value, bridge_value = rng.sample(self.names, 3)
        field, bridge = rng.sample(self.fields, 2)
        last = WantedFact(title, field.lower(), title, value)
        opening = rng.choice(("What is the", "Name the"))
        end = "?" if opening.startswith("What") else "."
        if not two_hops:
            return f"{opening} {field.lower()} of {title}{end}", [title], [last]
        first = WantedFact(bridge_value, bridge.lower(), title, bridge_value)
        country = f"the country whose {bridge.lower()} is {bridge_value}"
        question = f"{opening} {field.lower()} of {country}{end}"
        return question, [bridge_value], [first, last]

    def _search(self, wanted: WantedFact, subjects: list[str]) -> bool:
        """Search once. Return True if the search finds the wanted fact."""
        rng = self.rng
        kind = rng.choices(list(QUERIES), list(QUERIES.values()))[0]
        seen = [*subjects, *(passage.title for passage in self.shown)]
        query = {
            "right": f"{wanted.subject} {wanted.field}",
            "subject": wanted.subject,
            "field": wanted.field,
            "other": f"{rng.choice(seen)} {rng.choice(self.fields).lower()}",
        }[kind]
        think = rng.choice((NEED, LOOK)).format(field=wanted.field, subject=f" {wanted.subject}")
        self._act(self.notation.searched(think, query))
        passages = [self._passage() for _ in range(self.notation.topk)]
        if kind == "right":
            found = f"{wanted.field.capitalize()}: {wanted.value}"
            passages[0] = Passage("", wanted.title, found, 1.0)
        elif kind == "subject":
            passages = [msgspec.structs.replace(one, title=wanted.title) for one in passages]
        if rng.random() < 0.2:
            rng.shuffle(passages)
        self.shown = passages
        self.tokens += self.text.encode(self.notation.results(passages)).tolist()
        return kind == "right"

    def _answer(self, field: str, subjects: list[str]) -> None:
        rng = self.rng
        kind = rng.choices(list(ANSWERED), list(ANSWERED.values()))[0] if self.shown else "asked"
        values = [passage.text.partition(": ")[2] for passage in self.shown]
        answer = {
            "first": lambda: values[0],
            "second": lambda: values[-1],
            "title": lambda: rng.choice(self.shown).title,
            "asked": lambda: rng.choice(subjects),
        }[kind]()
        think = rng.choice((FOUND, RECALLED)).format(field=field, value=f" {answer}")
        self._act(self.notation.answered(think, answer))

    def _passage(self) -> Passage:
        title, value = self.rng.sample(self.names, 2)
        return Passage("", title, f"{self.rng.choice(self.fields)}: {value}", 1.0)

    def _act(self, action: str) -> None:
        ids = self.text.encode(action).tolist()
        self.examples.append(Example(self.tokens + ids, len(self.tokens)))
        self.tokens = self.tokens + ids


def ensure_search_play(
    model: Path, corpus: Path, notation: Notation, config: WarmStart, cache: Path, threads: int
) -> Path:
    """Return the warm-started model, cached by everything it depends on, or ``model`` itself when
    config.steps is 0."""
    mixture = [COOLDOWN, TURNS, ANSWERS, QUERIES, ANSWERED, NEED, LOOK, FOUND, RECALLED]
    recipe = [*notation.shown, msgspec.to_builtins(config), mixture]

    def examples(count: int) -> list[Example]:
        return search_play(Text(str(model)), notation, *names_and_fields(corpus), count, config)

    return from_play(model, "random searches", recipe, [corpus], examples, config, cache, threads)
