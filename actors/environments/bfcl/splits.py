"""Which tasks of the leaderboard are held out."""

import hashlib
import random
from collections.abc import Sequence

from coppice.actors.environments.bfcl.leaderboard import ANSWERED, MULTI_TURN, Leaderboard

PARTS = 4
"""One of so many groups of tasks is held out."""


def divided(
    board: Leaderboard, categories: Sequence[str], everything: bool
) -> tuple[list[str], list[str]]:
    """Return the ids of the training and of the held-out tasks, each in a random order that stays
    the same. An id is on the same side whatever the categories are. everything: is held out."""
    groups, sides = {} if everything else _groups(board), ([], [])
    for name in (name for category in categories for name in board.entries(category)):
        category, _, number = name.rpartition("_")
        # one number of the categories of several turns is one scenario
        group = f"multi_turn_{number}" if category in MULTI_TURN else groups.get(name, name)
        place = int(hashlib.sha256(group.encode()).hexdigest(), 16) % PARTS
        sides[everything or not place].append(name)
    for side in sides:
        random.Random(0).shuffle(side)
    return sides


def _groups(board: Leaderboard) -> dict[str, str]:
    """Return a group for each task of one turn with answers: tasks are in one group if a chain of
    tasks that share an answering function joins them."""
    entries = (entry for category in ANSWERED for entry in board.entries(category).values())
    names = {entry.id: [name for call in entry.answer for name in call] for entry in entries}
    root: dict[str, str] = {}

    def top(name: str) -> str:
        while root.setdefault(name, name) != name:
            name = root[name]
        return name

    for first, *others in names.values():
        for other in others:
            kept, joined = sorted((top(first), top(other)))
            root[joined] = kept
    return {task: top(first) for task, (first, *_) in names.items()}
