"""Scenarios and agents of SOTOPIA in the plain JSON layout of its data, and twenty of our own,
which a rule judge can judge."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from coppice.common.jsonl import whole

OWN = Path(__file__).with_name("scenarios.json")
_FILES = {"agents": "agents.json", "envs": "envs.json", "combos": "env_agent_combos.json"}
"""The file of each field of a ``Library``."""
_LAYOUT = f"scenarios: a file with agents, envs and combos, or a folder with {[*_FILES.values()]}"
_VIEWED = re.compile(r"<p viewer=[\"'](\w+)[\"']>(.*?)</p>", re.DOTALL)
_TAG = re.compile(r"</?(?:extra_info|strategy_hint|clarification_hint)>")


class Agent(msgspec.Struct, frozen=True):
    """A person. Fields of the layout that no prompt shows are left out."""

    first_name: str
    last_name: str
    age: int
    occupation: str
    gender_pronoun: str = ""
    public_info: str = ""
    personality_and_values: str = ""
    decision_making_style: str = ""
    secret: str = ""

    @property
    def name(self) -> str:
        return f"{self.first_name} {self.last_name}".strip()


class GoalCondition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkable part of a goal: exactly one of says, never and agreed, which are regular
    expressions in any case.

    by: whose spoken words count. says: they match (with "each", those of either side match). never:
    they do not match. agreed: the last number that the group of the expression catches is the same
    on both sides and lies in [least, most].
    """

    by: Literal["self", "partner", "each"] = "self"
    says: str = ""
    never: str = ""
    agreed: str = ""
    least: float = -1e9
    most: float = 1e9


class Rules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the rule judge checks of one agent. goal: all must hold. secret: an expression of the
    words that reveal the agent's secret."""

    goal: tuple[GoalCondition, ...]
    secret: str = ""


class Scenario(msgspec.Struct, frozen=True):
    """A situation with two private goals. relationship: 0 strangers, 1 known by name, 2
    acquaintances, 3 friends, 4 romantic, 5 family."""

    scenario: str
    agent_goals: tuple[str, str]
    relationship: Annotated[int, msgspec.Meta(ge=0, le=5)]
    codename: str = ""
    rules: tuple[Rules, Rules] | None = None


class Combo(msgspec.Struct, frozen=True):
    """A scenario with its two agents, by the keys of both."""

    pk: str
    env_id: str
    agent_ids: tuple[str, str]


class Library(msgspec.Struct, frozen=True):
    """Agents and scenarios by key, and the episodes that can be played."""

    agents: dict[str, Agent]
    envs: dict[str, Scenario]
    combos: list[Combo]


def load(path: str) -> Library:
    """Read one JSON file with the keys agents, envs and combos, or a folder of three files; ""
    reads our own scenarios.

    Raises FileNotFoundError, or ValueError that names the file, for what is not in the layout.
    """
    place = Path(path) if path else OWN
    if place.is_dir():
        read = {key: whole(place / name, Any, _LAYOUT) for key, name in _FILES.items()}
        try:
            library = msgspec.convert(read, Library)
        except msgspec.ValidationError as error:
            raise ValueError(f"scenarios: {place}: {error}") from None
    else:
        library = whole(place, Library, _LAYOUT)
    for combo in library.combos:
        if combo.env_id not in library.envs or not set(combo.agent_ids) <= set(library.agents):
            missing = f"{combo.env_id!r} and {combo.agent_ids}, which are missing"
            raise ValueError(f"{place}: combo {combo.pk!r} names {missing}")
    if not library.combos:
        wish = "expected at least one, a scenario with two agents"
        raise ValueError(f"{place} has no combos: {wish}")
    for key, scenario in library.envs.items():
        for rules in scenario.rules or ():
            for condition in (GoalCondition(says=rules.secret or "."), *rules.goal):
                _check(condition, f"{place}: scenario {key!r}: {condition}")
    return library


def shown(text: str, viewer: str) -> str:
    """Return the text as ``viewer`` ("agent_0", "agent_1" or "environment") sees it, without the
    tags of the layout."""
    text = _VIEWED.sub(lambda part: part[2] if part[1] == viewer else "", text)
    return " ".join(_TAG.sub("", text).split())


def _check(condition: GoalCondition, where: str) -> None:
    """Raises ValueError for a condition that the rule judge could not apply."""
    patterns = list(filter(None, (condition.says, condition.never, condition.agreed)))
    try:
        groups = [re.compile(pattern).groups for pattern in patterns]
    except re.error as error:
        raise ValueError(f"{where} has no regular expression: {error}") from None
    if len(patterns) != 1 or (condition.agreed and groups != [1]):
        wish = "expected exactly one of says, never and agreed, and one group in agreed"
        raise ValueError(f"{where}: {wish}")
