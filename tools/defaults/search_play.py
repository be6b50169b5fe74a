"""Warm start of the tiny search policies: from random behaviour on made-up countries they learn the
notation. No fact of the corpus is taught, and which of the many actions pays is left to
reinforcement learning."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.environments.base import Task
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.learner.fine_tune import Example
from coppice.scheduler.growth.text import Text
from coppice.tools.defaults import tiny
from coppice.tools.defaults.warm_start import COOLDOWN, WarmStart, Written, from_play
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


class Notation(msgspec.Struct, frozen=True):
    """How a kind of episode is written. topk: the passages that a search shows. shown: everything
    on which the texts depend. opening: the prompt of a question. searched, answered: actions, of a
    thought and a query or an answer. results: what stands between a search and the next action."""

    topk: int
    shown: list[Any]
    opening: Callable[[Text, str], str]
    searched: Callable[[str, str], str]
    answered: Callable[[str, str], str]
    results: Callable[[list[Passage]], str]


def tags(environment: SearchQA) -> Notation:
    """Return the notation of the environment search_qa."""
    return Notation(
        environment.topk,
        environment.shown,
        lambda text, question: text.prompt(environment.prompt(Task("", question))),
        lambda think, query: f"<think>{think}</think> <search> {query} </search>",
        lambda think, answer: f"<think>{think}</think> <answer> {answer} </answer>",
        environment.render,
    )


def calls() -> Notation:
    """Return the notation of an agent that searches with a tool and answers in plain text."""
    topk, end = 2, "</s>"
    tool = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
    system = {"role": "system", "content": tiny.INSTRUCTIONS}

    def results(passages: list[Passage]) -> str:
        rows = [f"Doc {i}(Title: {p.title}) {p.text}\n" for i, p in enumerate(passages, 1)]
        return "\n" + "".join(rows)

    return Notation(
        topk,
        [tiny.AGENT, topk, tiny.INSTRUCTIONS, tool, tiny.CALL, tiny.CALLED],
        lambda text, question: text.prompt(
            [system, {"role": "user", "content": question}], tools=[tool]
        ),
        lambda think, query: f"<think>{think}</think> {tiny.CALL} {query}{tiny.CALLED}{end}",
        lambda think, answer: f"<think>{think}</think> {answer}{end}",
        results,
    )


def search_play(
    text: Text, notation: Notation, names: Sequence[str], fields: Sequence[str], count: int,
    config: WarmStart,
) -> list[Example]:  # fmt: skip
    """Return ``count`` turns, shuffled, of random episodes."""
    rng = random.Random(config.seed)
    examples: list[Example] = []
    while len(examples) < count:
        examples += _episode(text, notation, names, fields, rng, rng.random() < config.two_hop)
    rng.shuffle(examples)
    return examples[:count]


def _episode(
    text: Text, notation: Notation, names: Sequence[str], fields: Sequence[str],
    rng: random.Random, two_hops: bool,
) -> list[Example]:  # fmt: skip
    """An episode looks for one fact after the other: a field of a subject, for which the right
    search shows a title and a value."""
    title, value, bridge_value = rng.sample(names, 3)
    field, bridge = (one.lower() for one in rng.sample(fields, 2))
    opening = rng.choice(("What is the", "Name the"))
    topic = f"the country whose {bridge} is {bridge_value}" if two_hops else title
    question = f"{opening} {field} of {topic}{'?' if opening.startswith('What') else '.'}"
    subjects, left = [bridge_value if two_hops else title], [(title, field, value)]
    if two_hops:
        left.insert(0, (bridge_value, bridge, bridge_value))
    written, shown = Written(text, notation.opening(text, question)), list[Passage]()
    for turn in range(1, TURNS + 1):
        subject, wanted, found = left[0]
        if turn == TURNS or rng.random() < ANSWERS[bool(shown)]:
            answer = _answer(rng, shown, subjects)
            think = rng.choice((FOUND, RECALLED)).format(field=wanted, value=f" {answer}")
            written.act(notation.answered(think, answer))
            break
        kind = rng.choices(list(QUERIES), list(QUERIES.values()))[0]
        seen = [*subjects, *(passage.title for passage in shown)]
        query = {
            "right": f"{subject} {wanted}",
            "subject": subject,
            "field": wanted,
            "other": f"{rng.choice(seen)} {rng.choice(fields).lower()}",
        }[kind]
        think = rng.choice((NEED, LOOK)).format(field=wanted, subject=f" {subject}")
        written.act(notation.searched(think, query))
        shown = [_passage(rng, names, fields) for _ in range(notation.topk)]
        if kind == "right":
            shown[0] = Passage("", title, f"{wanted.capitalize()}: {found}", 1.0)
        elif kind == "subject":
            shown = [msgspec.structs.replace(one, title=title) for one in shown]
        if rng.random() < 0.2:
            rng.shuffle(shown)
        written.see(notation.results(shown))
        if kind == "right" and len(left) > 1:
            left.pop(0)
    return written.examples


def _answer(rng: random.Random, shown: Sequence[Passage], subjects: Sequence[str]) -> str:
    kind = rng.choices(list(ANSWERED), list(ANSWERED.values()))[0] if shown else "asked"
    if kind == "asked":
        return rng.choice(subjects)
    if kind == "title":
        return rng.choice(shown).title
    return shown[0 if kind == "first" else -1].text.partition(": ")[2]


def _passage(rng: random.Random, names: Sequence[str], fields: Sequence[str]) -> Passage:
    title, value = rng.sample(names, 2)
    return Passage("", title, f"{rng.choice(fields)}: {value}", 1.0)


def ensure_search_play(
    model: Path, corpus: Path, notation: Notation, config: WarmStart, cache: Path, threads: int
) -> Path:
    mixture = [COOLDOWN, TURNS, ANSWERS, QUERIES, ANSWERED, NEED, LOOK, FOUND, RECALLED]
    recipe = [*notation.shown, msgspec.to_builtins(config), mixture]

    def examples(count: int) -> list[Example]:
        words = tiny.names_and_fields(corpus)
        return search_play(Text(str(model)), notation, *words, count, config)

    sources, args = [corpus], (examples, config, cache, threads)
    return from_play(model, "random searches", recipe, sources, *args, packing=True)
