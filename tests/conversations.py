"""Conversations for whole runs with an untrained policy, named "tests.conversations:AnyWords" in
data.environment."""

import zlib

from coppice.actors.environments.base import Action
from coppice.actors.environments.sotopia.environment import Sotopia, SotopiaState

WORDS = (
    "Amber and fox: 42 euros, 9 percent, 7 hours, 8 o'clock.",
    "I am sorry. On Friday, Saturday or Sunday?",
    "No.",
)


class AnyWords(Sotopia):
    """SOTOPIA in which every text is speech, the one its checksum picks."""

    def read(self, state: SotopiaState, text: str) -> Action:
        return Action("speak", text, WORDS[zlib.crc32(text.encode()) % len(WORDS)])
