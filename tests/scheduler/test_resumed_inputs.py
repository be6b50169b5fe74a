"""A resume grows no tree on that is damaged or of another task, and tells what the run's trees are
made from by now."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from coppice.scheduler.ledger import resume
from coppice.scheduler.ledger.journal import REMOVED, TreeRow
from coppice.tools.inspecting.audit import starts
from coppice.wire import messages as wire
from coppice.wire.faults import DataFault
from coppice.wire.service import Call
from tests.scheduler.test_begin import House, check, journal_of


class Halting(House):
    """A house whose learner keeps all groups, and whose actor keeps what follows ``most`` actions
    of training."""

    most, taken = 1, 0

    async def generate(self, request: wire.GenerateRequest, call: Call) -> wire.GenerateResult:
        self.taken += request.sampling.temperature > 0
        if self.taken > self.most and request.sampling.temperature:
            await asyncio.Event().wait()
        return await super().generate(request, call)

    async def train(self, group: wire.TrainGroup, call: Call) -> wire.Trained:
        return await asyncio.Event().wait()  # pyright: ignore[reportReturnType]


async def halted(folder: Path, model: Path, most: int) -> list[TreeRow]:
    """The trees of a run that died when ``most`` of them were grown, and more were not."""
    house = Halting(folder, model)
    house.most = most

    def half(_: Any) -> bool:
        grown = house.run.journal.tally().get("closed") == most and house.taken > most
        return grown and bool(house.run.journal.evaluations())

    await house.live(half)
    return trees(folder)


def trees(folder: Path) -> list[TreeRow]:
    return journal_of(folder).trees("split='train'")


async def test_no_tree_grows_on_with_the_task_of_another_seed(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await halted(tmp_path, llama, most=1)
    with pytest.raises(DataFault, match=r"seed \(77\) was 0 and is 77 now.*put the former one bac"):
        House(tmp_path, llama, seed=77)
    assert trees(tmp_path) == before and len(journal_of(tmp_path).starts()) == 1
    monkeypatch.setattr(resume, "DRAWN_BY", ())  # what an environment's edit may do as well
    resumed = House(tmp_path, llama, seed=77)
    await resumed.live()
    check(tmp_path)
    for old, new in zip(before, trees(tmp_path), strict=False):
        drawn = resumed.run.tasks.at(old.position).digest
        assert new.digest == (old.digest if old.status == "closed" else drawn)
        assert drawn != old.digest
    growing = [row for row in before if row.status == "growing"]
    assert resumed.run.counts["tree_retries"] == len(growing) > 0


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE nodes SET body=body || x'00' WHERE id=0",
        "DELETE FROM nodes WHERE id=0",
        "DELETE FROM nodes WHERE id=2",
        "UPDATE nodes SET tree=tree + 100 WHERE id=1",
        "UPDATE groups SET turns=substr(turns, 2) WHERE 1",
        # its checkpoints were lost since
        f"UPDATE trees SET reason='{REMOVED}' FROM groups WHERE tree=trees.id",
    ],
)
async def test_a_damaged_tree_grows_anew_and_is_trained_once(
    tmp_path: Path, llama: Path, damage: str
) -> None:
    await halted(tmp_path, llama, most=3)
    with sqlite3.connect(tmp_path / "journal.sqlite") as file:
        file.execute(f"{damage} AND tree IN (SELECT id FROM trees WHERE split='train')")
    file.close()
    resumed = House(tmp_path, llama)
    await resumed.live()
    check(tmp_path)
    assert resumed.run.counts["tree_retries"] == 3


def test_an_edited_file_is_told_or_refused(
    tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge, questions = tmp_path / "judge.py", tmp_path / "train.jsonl"
    inputs = {"judges.use.judge": str(judge), "data.train[0]": str(questions)}
    for path in (judge, questions):
        path.write_text("1")
    assert House(tmp_path, llama, inputs=inputs).run.notes == []
    judge.write_text("2")
    (note,) = House(tmp_path, llama, inputs=inputs).run.notes
    assert note.startswith(f"judges.use.judge ({judge}) was 6b86b273ff34 and is d4735e3a265e now")
    assert [line.partition(": ")[2] for line in starts(tmp_path)] == [note.partition(": older")[0]]
    questions.write_text("2")
    with pytest.raises(DataFault, match=r"data.train\[0\] .* put the former one back, or begin"):
        House(tmp_path, llama, inputs=inputs)
    assert len(journal_of(tmp_path).starts()) == 2


def test_nothing_that_a_resume_may_train_again_is_settled(tmp_path: Path) -> None:
    assert resume.settled(tmp_path, 5) == 0
    for version in (3, 6):
        (tmp_path / "checkpoints" / f"v{version:06d}").mkdir(parents=True)
    assert [resume.settled(tmp_path, version) for version in (2, 5, 9)] == [2, 3, 3]
