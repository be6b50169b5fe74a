"""Makes small run folders with the classes that write real ones."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from coppice.common.atomic import as_json
from coppice.common.shards import Shard
from coppice.scheduler.dispatch.calls import Event
from coppice.scheduler.evaluation.evaluation import Estimate, HeldOut
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.telemetry import report
from coppice.scheduler.telemetry.metrics import Metrics
from coppice.tools.launching import record
from coppice.tools.launching.config import DEFAULT_CONFIG, load
from coppice.wire.messages import Turn

GENERATED_S, WAITED_S = 1.0, 0.25


def make(
    folder: Path,
    rewards: Sequence[float] = (-0.5, 0.25, 1.0),
    exact: Mapping[int, float] = {0: 0.25, 3: 0.75},
    changes: Sequence[str] = (),
    text: str = "Paris",
    scores: bool = True,
    ended: bool = True,
    shard: Shard = Shard(),
) -> Path:
    """Write a run with an update and a tree of two candidates per reward. exact: the held-out exact
    match by version. text, scores: of the candidates. shard: whose ids the trees get."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(as_json(load(DEFAULT_CONFIG, list(changes))))
    record.write_environment(folder)
    journal, metrics = Journal(folder / "journal.sqlite"), Metrics(folder)
    # a worker whose clock runs ahead: a phase ends with its call
    at, phases, actor = metrics._start, {"prefill": 0.24, "decode": 9.0}, f"actor-{shard.number}"
    tree = -1
    for i, reward in enumerate(rewards):
        tree = shard.after(tree)
        _grow(journal, tree, i, reward, text, scores)
        times, caller = (at, at + GENERATED_S), f"tree {tree}, attempt 1 of 5"
        metrics.event(Event("generate", actor, *times, "ok", caller, phases=phases))
        at += GENERATED_S + WAITED_S
        metrics.event(Event("train", "learner", at - 0.21, at, "ok", version=i + 1))
        values = {"learner/groups": 1.0, "learner/seconds": 0.21, "time/update_forward": 0.1}
        values |= {"time/publish": 0.04, "time/run": 10.0 * i, "learner/entropy": 0.5}
        values |= {"count/compared_step_1": i + 1, "count/actions": 2 * i + 2}
        values |= {"count/equal_step_1": list(rewards[: i + 1]).count(0)}
        values |= {"watch/staleness_0/tokens": 30.0, "watch/staleness_1/tokens": 10.0} if i else {}
        metrics.record(i + 1, values | ({"score/reward": reward} if scores else {}))
    for version, mean in exact.items():
        name = "start" if version == 0 else f"v{version}"
        held = HeldOut(version, 16, "em", {"em": Estimate(mean, 0.1), "f1": Estimate(0.5, 0.2)})
        journal.save_evaluation(version, name, msgspec.to_builtins(held))
    if ended:
        phases, none = {"set-up": 1.0, "updates": 3.0}, Counter[str]()
        report.write(folder, journal, none, none, phases)
    journal.close()
    metrics.close()
    return folder


def _grow(
    journal: Journal, number: int, version: int, reward: float, text: str, scores: bool
) -> None:
    tree, question = Tree(number, f"task{number}"), f"What is the capital of country {number}?"
    root = tree.add(None, "prompt", np.array([1, 2], np.int32), question)
    for sign in (1, -1):
        judged = {"reward": sign * reward, "outcome": float(sign > 0), "valid": 1.0}
        tokens, given = np.array([3, 4, 5 + sign], np.int32), judged if scores else {}
        node = tree.add(root, "action", tokens, f"{text} {sign}", scores=given)
        node.chosen, node.finish = sign > 0, "stop"
    journal.start_tree(tree, number, version)
    journal.save_group(tree, number, [Turn(node.id, 0, 0, {"reward": reward})])
    journal.mark_trained(number, version + 1)
    journal.close_tree(tree)
