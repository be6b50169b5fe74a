"""A short SLATE run of the real processes on a real SGLang server that the actor starts, and that
takes its weights out of the learner's memory."""

import json
import re
from pathlib import Path

import pytest

from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from tests.e2e.test_run import (
    CONFIG,
    check_gradients,
    check_groups,
    finish,
    launch,
    left_over,
    prepare,
)
from tests.sglang_cpu import shared

UPDATES, QUESTIONS = 2, 2


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All weights train, so that each update is a whole one."""
    folder = tmp_path_factory.mktemp("sglang")
    prepare(folder)
    text = CONFIG.format(
        model=folder / "model", folder=folder, updates=UPDATES, questions=QUESTIONS
    )
    text = text.replace("k = 3", "k = 4").replace("questions = 4", "questions = 2")
    mine = '[actors]\nengine = "sglang"\ncount = 1\nmax_batch = 8\n'
    text = text.replace('[actors]\ncount = 2\ndtype = "float32"\nkv_cache_gib = 0.01\n', mine)
    text = text.replace(
        "lora = { rank = 4, alpha = 8.0 }", 'lora = { rank = 0 }\npublish = "memory"'
    )
    settings = shared.config()
    section = {"python": settings.python, "start_timeout_s": settings.start_timeout_s}
    lines = [f"{key} = {json.dumps(value)}" for key, value in section.items()]
    for name in ("arguments", "environment"):
        table = getattr(settings, name)
        lines += [
            f"[actors.sglang.{name}]",
            *(f"{key} = {json.dumps(value)}" for key, value in table.items()),
        ]
    path = folder / "sglang.toml"
    path.write_text(text + "[actors.sglang]\n" + "\n".join(lines) + "\n")
    return path


def test_slate_on_sglang(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = launch(config, run)
    out = finish(process)
    log = (
        (run / "logs" / "actor-0.log").read_text()
        if (run / "logs" / "actor-0.log").exists()
        else ""
    )
    assert process.returncode == 0, out + log[-3000:]
    check_groups(run, UPDATES, QUESTIONS)
    check_gradients(run, UPDATES)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [record for record in records if "learner/groups" in record]
    assert len(updates) == UPDATES
    # SGLang and the learner agree on the same weights
    assert updates[0]["learner/logprob_gap_max"] < 1e-3
    proofs = [
        line.rsplit(" ", 1)[1]
        for line in log.splitlines()
        if re.search("version [12] by tensor", line)
    ]
    # SGLang's checksums of two versions that the learner gave out of its memory
    assert len(set(proofs)) == 2
    journal = Journal(run / "journal.sqlite", readonly=True)
    trees = [journal.tree(row) for row in journal.trees("split='train'")]
    assert all(len(group) == 4 for tree in trees for group in siblings(tree))
    assert {version for tree in trees for version in versions(tree)} <= {0, 1, 2}
    checked = [check_cached(tree) for tree in trees]
    assert sum(checked) > 0
    assert not left_over(run)


def siblings(tree: Tree) -> list[list[int]]:
    """The sampled actions below each node, but for the answers that the budget forced."""
    below: dict[int, list[int]] = {}
    for node in tree.nodes.values():
        if node.kind == "action" and not node.forced:
            below.setdefault(node.parent, []).append(node.id)
    return list(below.values())


def versions(tree: Tree) -> set[int]:
    """All that sampled a token of it."""
    return {int(v) for n in tree.nodes.values() if n.versions is not None for v in n.versions}


def check_cached(tree: Tree) -> int:
    """A second step of one version finds all of the first in the cache but the last sampled token;
    how many steps were compared."""
    compared = 0
    for group in siblings(tree):
        first = tree.nodes[group[0]]
        node = tree.nodes[first.parent]
        if node.kind != "observation" or len(versions(tree)) > 1 or first.cached is None:
            continue
        before = len(tree.prefix(tree.nodes[node.parent]))
        assert first.cached >= before - 1
        compared += 1
    return compared
