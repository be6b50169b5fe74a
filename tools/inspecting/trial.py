"""Judges on trial (coppice trees --judge): do the scores of a run's turns agree with the outcomes
of the episodes that went through them? Another judge may score the same turns again, in this
process, by the requests that the run sent.

Agreement is the share of pairs of turns with unequal outcomes that the scores order alike, equal
scores counting one half: the area under the ROC curve of outcomes 0 and 1. Intervals are of 95%,
over questions.
"""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from coppice.actors.environments import registry
from coppice.judges.base import Judge
from coppice.judges.serve import Batcher, JudgeProcess, make_worker
from coppice.scheduler.concurrency import gather
from coppice.scheduler.config import SchedulerProcess
from coppice.scheduler.evaluation.evaluation import Estimate, estimate
from coppice.scheduler.growth import scoring, tasks
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.failures import brief
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.tools.evaluating.examination import table as aligned
from coppice.tools.inspecting import drawing, frames

AGAIN = "again: "
"""The prefix of the columns of the judge that scores the turns again."""
BINS = 5
"""The most rows of a table: quantiles where there are more different scores."""
OUTCOME = "outcome_below"


def columns(run: Path, turns: pl.DataFrame) -> list[str]:
    """Return the columns that the run's judges declare and the turns have, and the reward; every
    score of the turns where the run's files do not say."""
    file, declared = run / "processes" / "scheduler.json", {"reward"}
    scores = [name for name in turns.columns if name not in {*frames.NODE, *frames.TREE}]
    if file.is_file():
        judges = msgspec.json.decode(file.read_bytes(), type=SchedulerProcess).judges.values()
        declared |= {name for judge in judges for name in judge.columns} - {"outcome"}
    return [name for name in scores if name in declared] or scores


def report(
    turns: pl.DataFrame, every: pl.DataFrame, pairs: Sequence[tuple[str, str]], most: int
) -> list[str]:
    """Return a table for each pair of a column and ``OUTCOME`` or another judge's column, then the
    places where the pair that agrees least disagrees most. every: siblings of the turns, too."""
    lines, shares = list[str](), dict[tuple[str, str], float]()
    for first, second in pairs:
        both = turns.drop_nulls([first, second])
        known, names = both.drop_nulls(OUTCOME), [first, second][: 1 + (second != OUTCOME)]
        lines += [*_calibration(known, names), ""]
        if second != OUTCOME:
            lines[-1:] = [*_between(both, first, second), ""]
        if both[first].n_unique() > 1 or second != OUTCOME:
            shares[first, second] = _agreement(both, first, second).mean
    for first, second in sorted(shares, key=lambda pair: shares[pair])[:1]:
        lines += _disagreements(turns.drop_nulls([first, second]), every, first, second, most)
    return lines


def _calibration(turns: pl.DataFrame, names: Sequence[str]) -> list[str]:
    """A table of the turns with each score and the mean outcome below them."""
    scores = np.concatenate([turns[name].to_numpy() for name in names])
    values = np.unique(scores)
    labels = [f"{value:+.2f}" for value in values]
    if len(values) > BINS:
        values = np.unique(np.quantile(scores, np.arange(1, BINS + 1) / BINS))
        labels = [f"to {value:+.2f}" for value in values]
    rows = [[names[0]], *([label] for label in labels), ["agreement"]]
    for name in names:
        rows[0] += [name if name.startswith(AGAIN) else "turns", "outcome below"]
        place = np.searchsorted(values, turns[name].to_numpy())
        for number in range(len(values)):
            own = turns.filter(place == number)
            rows[number + 1] += [str(len(own)), _mean(own)]
        rows[-1] += [str(len(turns)), _shown(_agreement(turns, name, OUTCOME))]
    return aligned(rows)


def _mean(turns: pl.DataFrame) -> str:
    """The mean outcome below turns, each question counted once."""
    means = turns.group_by("task").agg(pl.col(OUTCOME).mean())[OUTCOME].drop_nulls()
    return _shown(estimate(means.to_list()))


def _shown(value: Estimate) -> str:
    return "-" if math.isnan(value.mean) else str(value)


def _agreement(turns: pl.DataFrame, first: str, second: str) -> Estimate:
    turns = turns.drop_nulls([first, second])
    values = (turns[name].to_numpy() for name in (first, second))
    return agreement(*values, turns["task"].to_list())


def agreement(first: np.ndarray, second: np.ndarray, questions: Sequence[str]) -> Estimate:
    """Return the share of pairs with unequal values in ``second`` that ``first`` orders alike, ties
    counting one half; nan without such pairs. All are [turns]. The interval sums each question's
    first-order terms, so that turns of one question are not taken for independent."""
    row, column = (np.unique(x, return_inverse=True)[1] for x in (first, second.round(2)))
    counts = np.zeros((row.max(initial=0) + 1, column.max(initial=0) + 1))
    np.add.at(counts, (row, column), 1)
    below = np.pad(counts.cumsum(0).cumsum(1), ((1, 0), (1, 0)))  # of [:row, :column]
    lower, higher = below[:-1, :-1], len(row) - below[1:, -1:] - below[-1:, 1:] + below[1:, 1:]
    alike = lower + higher + (counts.sum(1, keepdims=True) - counts) / 2
    unequal = np.broadcast_to(len(row) - counts.sum(0), counts.shape)
    pairs = float((counts * unequal).sum()) / 2
    if not pairs:
        return Estimate(math.nan, math.nan)
    share = float((counts * alike).sum()) / 2 / pairs
    _, cluster = np.unique(questions, return_inverse=True)
    sums = np.bincount(cluster, (alike - share * unequal)[row, column])
    few = len(sums) / max(1, len(sums) - 1)
    return Estimate(share, 1.96 * math.sqrt(few * float((sums**2).sum())) / pairs)


def _between(both: pl.DataFrame, first: str, second: str) -> list[str]:
    """What two judges' columns say of the turns that both have scored."""
    equal = (both[first] == both[second]).sum()
    alike = _shown(_agreement(both, first, second))
    lines = [f"{len(both)} turns of both judges: {equal} equal scores, the same order {alike}"]
    higher = both[second] - both[first]
    for word, differs in (("more", higher > 0), ("less", higher < 0)):
        own = both.filter(differs)
        known = f"{own[OUTCOME].count()} of them: {_mean(own)}"
        if len(own) and second == AGAIN + first:
            lines.append(f"{len(own)} turns got {word} from the other; outcome below {known}")
    return lines


def _disagreements(
    turns: pl.DataFrame, every: pl.DataFrame, first: str, second: str, most: int
) -> list[str]:
    """The places whose turn has the most different values, one per question, first those whose text
    did so most often; with all candidates. Two judges' values of one column are compared as they
    are, others after each is stretched from 0 to 1."""
    values = [turns[name] for name in (first, second)]
    if second != AGAIN + first:
        values = [(x - x.min()) / ((x.max() - x.min()) or 1.0) for x in values]
    apart = turns.with_columns(apart=(values[0] - values[1]).abs())
    apart = apart.with_columns(times=pl.len().over("task", "text", "apart"))
    order = apart.sort("apart", "times", "tree", descending=True).filter(pl.col("apart") > 0)
    shown = list(dict.fromkeys([first, second, OUTCOME]))
    lines = [f"most apart, as TREE:NODE; columns: {', '.join(shown)}; * was continued"]
    for turn in order.unique("task", keep="first", maintain_order=True).head(most).to_dicts():
        place = every.filter(frames.ACTION, tree=turn["tree"], parent=turn["parent"])
        often = f"{turn['times']} times" if turn["times"] > 1 else "once"
        where = f"{turn['tree']}:{turn['node']}, step {turn['step']}, {often}"
        lines += [f"{where}: {turn['question']}", *drawing.candidates(place.to_dicts(), shown, 80)]
    return lines


# ----------------------------------------------------------------------------------------------
# judging again


class InThisProcess:
    """Answers the judge calls of trees, in place of the dispatcher."""

    def __init__(self, judge: Judge):
        nobody: Any = None
        self.handle = partial(Batcher(judge).handle, call=nobody)

    async def call(self, _: str, request: Any, *, deadline: float, **__: object) -> Any:
        """Return the judge's answer to a request. Raises whatever the judge raises."""
        async with asyncio.timeout(deadline):
            return await self.handle(request)


def make(run: Path, spec: str, given: dict[str, Any]) -> Judge:
    """Return a judge of the run with its options there, or another one. Raises ValueError."""
    file = run / "processes" / "judges.json"
    own = msgspec.json.decode(file.read_bytes(), type=JudgeProcess).judges if file.is_file() else {}
    judge = make_worker(spec, own.get(spec, {}) | given)
    if not isinstance(judge, Judge):
        raise ValueError(f"--again {spec}: expected a judge, and it is none")
    return judge


async def again(
    run: Path, journal: Journal, turns: pl.DataFrame, judge: Judge
) -> tuple[pl.DataFrame, Counter[str]]:
    """Have turns judged again, each place's in one request, as the run sent them. Returns tree,
    node and the judge's columns with the prefix ``AGAIN``; and how many turns have none, by the
    reason. Raises ValueError or OSError without the run's files and tasks."""
    file = run / "processes" / "scheduler.json"
    process = msgspec.json.decode(file.read_bytes(), type=SchedulerProcess)
    environment = registry.load(process.environment, process.options)
    training, heldout, _ = tasks.load(process, environment)
    held = {task.id: task for task in heldout}
    services: Any = InThisProcess(judge)
    text: Any = None  # nothing is tokenized
    rest = process.scheduler, Counter[str](), lambda *_: None
    runtime = Runtime(services, journal, text, environment, *rest)
    if not environment.rewarded_by_judge and "valid" in turns.columns:
        turns = turns.filter(pl.col("valid") > 0)  # as ``growth.rewards.judge`` asks
    answers, faults = list[dict[str, Any]](), Counter[str]()
    room = asyncio.Semaphore(judge.concurrency)

    def reading(row: TreeRow) -> Context:
        task = training.at(row.position) if row.split == "train" else held[row.task]
        if task.id != row.task or row.digest not in ("", task.digest):
            raise ValueError(f"the task files have another task {row.task} than the run had")
        context = Context(runtime, task, Journal.tree(journal, row), random.Random(0))
        context.state_type = type(environment.initial(task))
        return context

    async def of_place(row: TreeRow, nodes: list[int]) -> None:
        context, asked = reading(row), []
        for node in map(context.tree.nodes.__getitem__, nodes):
            turn = scoring.judged_turn(context, node)
            if "judge_valid" not in node.scores:  # only PPR's turns were judged after their search
                turn = msgspec.structs.replace(turn, observation=None)
            asked.append(turn)
        judgements = await context.services.judgements(judge.name, asked)
        for node, judgement in zip(nodes, judgements, strict=True):
            scores = {AGAIN + name: judgement.scores.get(name) for name in judge.columns}
            answers.append({"tree": row.id, "node": node, **scores})

    async def of_tree(own: pl.DataFrame) -> None:
        async with room:
            (row,) = journal.trees("id=?", own["tree"][0])
            for _, place in own.group_by("parent", maintain_order=True):
                try:
                    await of_place(row, place["node"].sort().to_list())
                except Exception as error:  # noqa: BLE001
                    faults[brief(error)] += len(place)  # of the judge or of the task

    await judge.start()
    try:
        await gather(map(of_tree, turns.partition_by("tree", maintain_order=True)))
    finally:
        await judge.close()
    kinds = dict.fromkeys(["tree", "node"], pl.Int64())
    kinds |= dict.fromkeys((AGAIN + name for name in judge.columns), pl.Float64())
    return pl.DataFrame(answers, schema=kinds), faults
