"""What belongs to one of several schedulers that share a learner: its draws of the task stream, its
ids and its folder. All shards together draw what a single scheduler would have drawn."""

import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec


class Shard(msgspec.Struct, frozen=True):
    """Shard ``number`` of ``count``; a run with one scheduler has one shard.

    Example: shard 1 of 3 numbers its trees and groups 1, 4, 7, and draws one task of each three
    consecutive positions.
    """

    number: int = 0
    count: int = 1

    def owns(self, identity: int) -> bool:
        return identity % self.count == self.number

    def own(self, trained: Mapping[int, int]) -> dict[int, int]:
        """Return the groups of this shard, with the versions that trained them."""
        return {group: version for group, version in trained.items() if self.owns(group)}

    def after(self, identity: int) -> int:
        """Return the shard's first id above ``identity`` (-1 for its very first)."""
        return identity + 1 + (self.number - identity - 1) % self.count

    def position(self, draw: int) -> int:
        """Return the position, in the stream of tasks, of this shard's draw 0, 1, ...

        A hash of the draw deals its ``count`` consecutive positions, one to each shard: so none
        falls behind, and none meets the same questions in every epoch.
        """
        return draw * self.count + (self.number + zlib.crc32(draw.to_bytes(8))) % self.count

    def draws(self, position: int) -> int:
        """Return how many draws this shard has made if ``position`` is the first above all of its
        own."""
        return -(-position // self.count)


def folder(run: Path, number: int) -> Path:
    """Return the folder in which a shard keeps its journal, endpoint, keys and records. The first
    shard has the run's own."""
    return run / "shards" / str(number) if number else run


def homes(run: Path) -> list[Path]:
    """Return the folders of all schedulers of a run that have begun, in order."""
    return [run, *sorted(run.glob("shards/[0-9]*"), key=lambda home: int(home.name))]


def journals(run: Path) -> tuple[Path, list[Path]]:
    """Return the journal of the first scheduler, and those of the others that are there."""
    first, *others = [home / "journal.sqlite" for home in homes(run)]
    return first, [path for path in others if path.is_file()]


def called(process: str, number: int) -> str:
    """Return the name that a process of this kind has in a shard: "judges", "judges-1"."""
    return f"{process}-{number}" if number else process
