"""The comparison with TRL: equal work on both sides, numbers by hand, and the whole small."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from coppice.research.any_text import AnyText, EpisodeShape, TextState
from coppice.research.benches import memory, peer
from coppice.research.benches.peer import DIGITS, LOADS, PeerLoad, Round, Update, prompts
from coppice.scheduler.growth.tasks import GeneratedTasks
from coppice.scheduler.growth.text import Text
from tests.tools.said import Patch

ONE = EpisodeShape(steps=1, shared=6, question=4, observation=0)
TWO = EpisodeShape(steps=2, shared=6, question=4, observation=3)
SMALL = {
    "groups": PeerLoad(ONE, questions=3, samples=4, action=5, rows=4),
    "slate": PeerLoad(TWO, questions=2, samples=3, action=5, rows=3),
}


@pytest.mark.parametrize("name", list(LOADS))
def test_the_peer_gets_a_runs_questions_and_prefixes_as_long(name: str, llama: Path) -> None:
    load, text = LOADS[name], Text(str(llama))
    environment = AnyText(load.shape, DIGITS)
    drawn = GeneratedTasks(environment.task, seed=7)
    given, peers = prompts(load, llama, 7, updates=2), AutoTokenizer.from_pretrained(llama)
    assert len(given) * load.samples == 2 * load.sequences
    for place, prompt in enumerate(given):
        update, rest = divmod(place, load.questions * load.shape.steps)
        step, question = divmod(rest, load.questions)
        task = drawn.at(update * load.questions + question)
        root = text.encode(text.prompt(environment.prompt(task, TextState(task.seed))))
        trunk = step * load.action
        for after in range(1, step + 1):
            trunk += len(text.encode(environment.observation(TextState(task.seed, after))))
        ids = peers(text=prompt)["input_ids"]
        assert ids[: len(root)] == root.tolist()
        assert len(ids) == len(root) + trunk


def test_the_first_update_only_starts_the_clock() -> None:
    updates = [Update(10.0, 999.0), Update(14.0, 100.0), Update(20.0, 100.0)]
    assert peer.rated(updates, 3.0) == Round(20.0, 5.0, 3.0)


@pytest.mark.slow
def test_both_trainers_run_on_equal_work(llama: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(memory, "INTERVAL_S", 0.05)
    monkeypatch.setattr(peer, "LOADS", SMALL)
    row = peer.run(str(llama), ("groups", "slate"), rounds=1)
    for name, load in SMALL.items():
        for (found,) in (row[name]["peer"], row[name]["ours"]):
            assert found["tokens_s"] * found["update_s"] == pytest.approx(load.tokens, rel=0.1)
            assert found["peak_gib"] > 0.1
        assert row["ratio"] <= row[name]["tokens_ratio"] / peer.GOALS[name]
        assert row["ratio"] <= 1 / row[name]["memory_ratio"]
