"""What /v1/responses has answered, for clients that refer to it by ids instead of sending it
again."""

from typing import Any

from coppice.actors.serving.protocol import Refused
from coppice.common.dialogue import Message


class Remembered:
    """The items of replies by their ids, and conversations by the id of the response that ended
    them. Of more than ``items`` items or ``responses`` conversations, the oldest are dropped.

    Each session of a run has its own, so that no episode can refer to what another one was
    answered.
    """

    def __init__(self, items: int = 4096, responses: int = 16):
        self._most = items, responses
        self._items: dict[str, dict[str, Any]] = {}
        self._turns: dict[str, tuple[list[Message], list[dict[str, Any]]]] = {}

    def note(self, response: dict[str, Any], before: list[Message]) -> None:
        """Keep an answer. response: its body. before: the conversation that it ended, without
        the instructions."""
        self._items |= {item["id"]: item for item in response["output"]}
        self._turns[response["id"]] = before, response["output"]
        for kept, most in zip((self._items, self._turns), self._most, strict=True):
            while len(kept) > most:
                del kept[next(iter(kept))]

    def item(self, name: Any) -> dict[str, Any]:
        """Return the item that has this id. Raises Refused if it is not there."""
        if not isinstance(name, str) or name not in self._items:
            raise Refused(
                f"`input`: item_reference {str(name)[:80]!r}: expected the id of an item that was answered here"
                " before; send the item itself"
            )
        return self._items[name]

    def conversation(self, name: Any) -> tuple[list[Message], list[dict[str, Any]]]:
        """Return a conversation and the items that answered it. name: of the response. Raises
        Refused if it is not there."""
        if not isinstance(name, str) or name not in self._turns:
            raise Refused(
                f"`previous_response_id`: {str(name)[:80]!r}: expected one of the last {self._most[1]} responses that"
                " were answered here; send the whole input"
            )
        return self._turns[name]

    def clear(self) -> None:
        """Forget everything."""
        self._items.clear()
        self._turns.clear()
