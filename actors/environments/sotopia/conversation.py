"""A conversation of SOTOPIA: the five kinds of action, how they are read and written, when it ends,
and what each side is told."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from coppice.actors.environments.sotopia.scenarios import Agent, Rules

INSTRUCTIONS = (Path(__file__).parent / "prompt.txt").read_text().strip()
"""What a side is told. The text before {split} is the same in all turns of a conversation."""
KINDS = ("none", "speak", "non-verbal communication", "action", "leave")
DIMENSIONS = {
    "believability": (0, 10),
    "relationship": (-5, 5),
    "knowledge": (0, 10),
    "secret": (-10, 0),
    "social_rules": (-10, 0),
    "financial_and_material_benefits": (-5, 5),
    "goal": (0, 10),
}
"""The dimensions by which a side is judged, each with its least and its greatest score."""
QUIET = 3
"""A conversation ends after so many turns in a row in which nobody did anything."""
FAREWELLS = ("left", "leave", "bye", "have a good")
"""The words that end a conversation in OPRL's released code, wherever they stand in the last turn
(option ``word_endings``)."""
STRANGER = "the other person"
RELATIONSHIPS = (
    "You have never met before.",
    "You know each other by name only.",
    "You are acquainted with each other.",
    "You are friends.",
    "You are in a romantic relationship.",
    "You are family.",
)


class Turn(msgspec.Struct, frozen=True):
    """One turn. side: 0 or 1. argument: what was said or done, "" for none and leave."""

    side: int
    kind: str
    argument: str = ""


class Conversation(msgspec.Struct, frozen=True):
    """A finished conversation as a judge sees it. Pairs are in the order of the sides; trained: the
    side that is judged."""

    scenario: str
    names: tuple[str, str]
    profiles: tuple[str, str]
    goals: tuple[str, str]
    trained: int
    turns: tuple[Turn, ...]
    rules: tuple[Rules, Rules] | None = None


def read(text: str, side: int) -> Turn | None:
    """Return the turn that the last JSON object of a reply describes, None if it describes none.

    A kind is written exactly as in ``KINDS``. The three kinds with words need some; other keys,
    such as ``to``, are ignored.
    """
    decoder, last, place = json.JSONDecoder(), None, text.find("{")
    while place >= 0:
        try:
            last, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        place = text.find("{", end)
    if not isinstance(last, dict):
        return None
    kind, argument = last.get("action_type"), last.get("argument", "")
    if kind not in KINDS or not isinstance(argument, str):
        return None
    if kind in ("none", "leave"):
        return Turn(side, kind)
    words = " ".join(argument.split())  # a line break could imitate another turn of the history
    return Turn(side, kind, words) if words else None


def line(turn: Turn, name: str) -> str:
    """Return the turn in the words of SOTOPIA's history."""
    if turn.kind == "speak":
        return f'{name} said: "{turn.argument}"'
    if turn.kind in ("none", "leave"):
        return f"{name} {'did nothing' if turn.kind == 'none' else 'left the conversation'}"
    return f"{name} [{turn.kind}] {turn.argument}"


def history(turns: Sequence[Turn], names: Sequence[str]) -> str:
    """Return the turns, one per line, numbered from 1."""
    return "\n".join(
        f"Turn #{number}: {line(turn, names[turn.side])}" for number, turn in enumerate(turns, 1)
    )


def over(turns: Sequence[Turn], limit: int, word_endings: bool = False) -> bool:
    """Return whether the conversation has ended: at the limit, when a side left, or after ``QUIET``
    turns of nothing."""
    quiet = len(turns) >= QUIET and all(turn.kind == "none" for turn in turns[-QUIET:])
    last = turns[-1] if turns else Turn(0, "none")
    farewell = word_endings and any(word in last.argument.lower() for word in FAREWELLS)
    return len(turns) >= limit or last.kind == "leave" or quiet or farewell


def profile(agent: Agent, relationship: int, own: bool = False) -> str:
    """Return what somebody in this relationship knows of an agent. own: the agent itself, who knows
    everything and has a secret."""
    parts: list[str] = []
    if relationship >= 1:
        pronoun = f" ({agent.gender_pronoun})" if agent.gender_pronoun else ""
        parts.append(f"{agent.name}{pronoun}.")
    if relationship >= 2:
        parts += [f"Age {agent.age}, {agent.occupation}.", agent.public_info]
    if relationship >= 3:
        style = agent.decision_making_style
        parts.append(agent.personality_and_values)
        parts.append(f"Makes decisions in this way: {style}." if style else "")
    if own and agent.secret:
        parts.append(f"Secret, which nobody else knows: {agent.secret}")
    return " ".join(part for part in parts if part) or "You know nothing about this person."
