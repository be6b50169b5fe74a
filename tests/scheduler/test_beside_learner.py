"""A scheduler that is started again beside a living learner: what the learner trained since its
checkpoint is told and recorded, once."""

import asyncio
from pathlib import Path

import msgspec

from coppice.common import frontier
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.ledger.records import UPDATE
from coppice.wire.messages import Trained, TrainGroup
from coppice.wire.service import Call
from tests.scheduler.test_begin import QUESTIONS, UPDATES, House, check


class OneUpdate(House):
    """A run whose learner answers one update and no other, however long the run lives on."""

    async def train(self, group: TrainGroup, call: Call) -> Trained:
        if self.trained:
            await asyncio.get_running_loop().create_future()
        return await super().train(group, call)


class Outlived(House):
    """A run beside a learner that has trained the groups ``known`` and has written no checkpoint."""

    known: dict[int, int] = {}
    again: list[int] = []

    async def train(self, group: TrainGroup, call: Call) -> Trained:
        if group.id not in self.known:
            return await super().train(group, call)
        self.again.append(group.id)
        weights = self.folder / "weights" / "v000001"
        return Trained(self.known[group.id], str(weights), "digest", {UPDATE: 2.0}, [])


async def test_an_update_whose_record_was_lost_is_recorded_and_its_trees_take_no_place_of_the_next(
    tmp_path: Path, llama: Path
) -> None:
    dead = OneUpdate(tmp_path, llama, held=lambda house: False)
    await dead.live(until=lambda house: house.run.stream.version == 1)
    journal = Journal(tmp_path / "journal.sqlite", readonly=True)
    rows = journal.trees("split='train'")[:QUESTIONS]
    trained = {group: 1 for row in rows for group, _ in journal.groups(row.id)}
    # a mark, and no record of it
    assert 1 in {version for row in rows for _, version in journal.groups(row.id)}
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    announced = msgspec.json.decode((tmp_path / "learner.json").read_bytes()) | {
        "trained": frontier.runs(trained)
    }
    (tmp_path / "learner.json").write_bytes(msgspec.json.encode(announced))
    resumed = Outlived(tmp_path, llama, held=lambda house: False, version=1)
    resumed.known, resumed.again, resumed.in_force = trained, [], 1
    await resumed.live(until=lambda house: False)
    check(tmp_path)
    assert sorted(resumed.again) == sorted(trained)
    lines = [
        msgspec.json.decode(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    ]
    told = [line for line in lines if not any(name.startswith("heldout/") for name in line)]
    assert [int(line["version"]) for line in told] == list(range(1, UPDATES + 1))
