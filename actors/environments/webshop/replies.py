"""Reading a reply: the thought and the action of ``<think> .. </think><action> search[..] or
click[..] </action>``."""

import re
from typing import Literal

from coppice.actors.environments.base import Action

Think = Literal["required", "optional"]

_BLOCK = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL | re.IGNORECASE)
_COMMAND = re.compile(r"(search|click)\[(.+)\]", re.DOTALL)
_CHINESE = re.compile("[\u4e00-\u9fff]")


def command_of(text: str) -> str:
    """Return the first action block of a reply in lower case, "none" if there is none."""
    block = _BLOCK.search(text.lower())
    return block[1].strip() if block else "none"


def read_reply(text: str, clickables: list[str], think: Think) -> Action:
    """Return the action of a reply. Case does not matter, and the first action block counts.

    "search" has ``query``, the words. "click" has ``move``, the place in ``clickables``, or no move
    if the name cannot be clicked: such an action is readable, but it does nothing. "invalid": no
    block, no thought where one is required, a Chinese character, or another form.
    """
    lowered = text.lower()
    block, thought = _BLOCK.search(lowered), _THOUGHT.search(text)
    if block is None or (think == "required" and thought is None) or _CHINESE.search(text):
        return Action("invalid", text)
    reason, command = (
        (thought[1].strip() if thought else None),
        _COMMAND.fullmatch(block[1].strip()),
    )
    if command is None or not (argument := command[2].strip()):
        return Action("invalid", text, reason)
    if command[1] == "search":
        return Action("search", text, reason, query=argument)
    reachable = argument in clickables and argument != "search"
    return Action("click", text, reason, move=(clickables.index(argument),) if reachable else None)
