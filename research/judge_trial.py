"""Judges on trial (coppice trees --judge): do the scores of a run's turns agree with the outcomes
of the episodes that went through them? Another judge may score the same turns again, in this
process, by the requests that the run sent.

Agreement is the share of pairs of turns with unequal outcomes that the scores order alike, equal
scores counting one half: the area under the ROC curve of outcomes 0 and 1. Intervals are of 95%,
over questions.
"""

import argparse
import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import polars as pl

from coppice.actors.environments import registry
from coppice.common.concurrency import gather
from coppice.common.options import option
from coppice.judges.base import Judge, checked
from coppice.judges.serve import make_worker
from coppice.scheduler.config import SchedulerProcess
from coppice.scheduler.evaluation.evaluation import Estimate, estimate
from coppice.scheduler.growth import scoring, tasks
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.failures import brief
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.evaluating.examination import table as aligned
from coppice.tools.inspecting import drawing, dump, frames
from coppice.wire.messages import Judgement

AGAIN = "again: "
"""The prefix of the columns of the judge that scores the turns again."""
BINS = 5
"""The most rows of a table: quantiles where there are more different scores."""
OUTCOME = "outcome_below"


def tried(
    journal: Journal, turns: pl.DataFrame, every: pl.DataFrame, options: argparse.Namespace
) -> list[str]:
    """Return how scores agree with outcomes, or two judges. every: all nodes of the turns' trees.
    options: of coppice trees."""
    lines, names = [], [options.judge] if options.judge else columns(options.run, turns)
    dump.check_columns("--judge", names, turns.select(pl.col(pl.Float64)))
    pairs = [(name, OUTCOME) for name in names]
    if options.again:
        judge = options.run, options.again, dict(map(option, options.option))
        scores, faults = asyncio.run(again(journal, turns, *judge))
        turns, every = (one.join(scores, ["tree", "node"], "left") for one in (turns, every))
        own = [name.removeprefix(AGAIN) for name in scores.columns[2:]]
        own = [options.judge] if options.judge in own else own
        pairs = [(name if name in turns.columns else names[-1], AGAIN + name) for name in own]
        lines = [f"{len(scores)} turns judged again, {faults.total()} not because of faults"]
        lines += [f"  {count} times: {reason}" for reason, count in faults.most_common(3)]
    return [*lines, report(turns, every, pairs, options.limit or 3)]


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
) -> str:
    """Return a table for each pair of a column and ``OUTCOME`` or another judge's column, then the
    places where the pair that agrees least disagrees most. every: the turns and their siblings."""
    lines, shares = list[str](), dict[tuple[str, str], float]()
    for pair in pairs:
        first, second = pair
        both = turns.drop_nulls(pair)
        lines += _calibration(both.drop_nulls(OUTCOME), [name for name in pair if name != OUTCOME])
        alike, higher = agreement(both, *pair), (both[second] - both[first]).sign()
        if second != OUTCOME:
            equal = f"{(higher == 0).sum()} equal scores, order alike {alike}"
            lines.append(f"{len(both)} turns of both judges: {equal}")
        for word, own in (("more", both.filter(higher > 0)), ("less", both.filter(higher < 0))):
            if second == AGAIN + first and len(own):
                below = f"outcome below {own[OUTCOME].count()} of them: {_mean(own)}"
                lines.append(f"{len(own)} turns got {word} from the other judge; {below}")
        if (higher != 0).any() if second != OUTCOME else both[first].n_unique() > 1:
            shares[pair] = 0.0 if math.isnan(alike.mean) else alike.mean
        lines.append("")
    for pair in sorted(shares, key=lambda pair: shares[pair])[:1]:
        lines += _disagreements(turns.drop_nulls(pair), every, pair, most)
    return "\n".join(lines).replace("nan ±nan", "-        ")


def _calibration(turns: pl.DataFrame, names: Sequence[str]) -> list[str]:
    """A table of the turns with each score and the mean outcome below them."""
    scores = np.concatenate([turns[name].to_numpy() for name in names])
    values = np.unique(scores)
    few = len(values) <= BINS
    if not few:
        values = np.unique(np.quantile(scores, np.arange(1, BINS + 1) / BINS))
    rows = [[names[0]], *([f"{'' if few else 'to '}{value:+.2f}"] for value in values)]
    agreements = ["agreement"]
    for name in names:
        rows[0] += [name if name.startswith(AGAIN) else "turns", "outcome below"]
        place = np.searchsorted(values, turns[name].to_numpy())
        for number, row in enumerate(rows[1:]):
            own = turns.filter(place == number)
            row += [str(len(own)), _mean(own)]
        agreements += [str(len(turns)), str(agreement(turns, name, OUTCOME))]
    return aligned([*rows, agreements])


def _mean(turns: pl.DataFrame) -> str:
    """The mean outcome below turns, each question counted once."""
    means = turns.group_by("task").agg(pl.col(OUTCOME).mean())[OUTCOME].drop_nulls()
    return str(estimate(means.to_list()))


def agreement(turns: pl.DataFrame, first: str, second: str) -> Estimate:
    """Return the share of pairs of turns with unequal values in ``second`` that ``first`` orders
    alike, ties counting one half; nan without such pairs. The interval sums each question's
    first-order terms, so that turns of one question are not taken for independent."""
    columns = turns[first].to_numpy(), turns[second].to_numpy().round(2)
    row, column = (np.unique(x, return_inverse=True)[1] for x in columns)
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
    _, cluster = np.unique(turns["task"].to_list(), return_inverse=True)
    sums = np.bincount(cluster, (alike - share * unequal)[row, column])
    few = len(sums) / max(1, len(sums) - 1)
    return Estimate(share, 1.96 * math.sqrt(few * float((sums**2).sum())) / pairs)


def _disagreements(
    turns: pl.DataFrame, every: pl.DataFrame, pair: tuple[str, str], most: int
) -> list[str]:
    """The places whose turn has the most different values, one per question, with all candidates.
    First come, against an outcome, turns near the end, and else those whose text did so most often.
    Two judges' values of one column are compared as they are, others stretched from 0 to 1."""
    values = [turns[name].to_numpy() for name in pair]
    if pair[1] != AGAIN + pair[0]:
        values = [(x - x.min()) / (np.ptp(x) or 1.0) for x in values]
    last = every.filter(pl.col("chosen")).group_by("tree").agg(last=pl.col("step").max())
    distant = turns.with_columns(distance=np.abs(values[0] - values[1])).join(last, "tree", "left")
    often, near = pl.len().over("task", "text", "distance"), pl.col("step") - pl.col("last")
    first = near if pair[1] == OUTCOME else often
    order = distant.filter(pl.col("distance") > 0).sort("distance", first, "tree", descending=True)
    shown = list(dict.fromkeys([*pair, OUTCOME]))
    lines = [f"most apart, as TREE:NODE; columns: {', '.join(shown)}; * was continued"]
    for turn in order.unique("task", keep="first", maintain_order=True).head(most).to_dicts():
        place = every.filter(frames.ACTION, tree=turn["tree"], parent=turn["parent"])
        lines += ["{tree}:{node}, step {step}: {question}".format(**turn)]
        lines += drawing.candidates(place.to_dicts(), shown, 80)
    return lines


# ------------------------------------------------------------------------------------ judging again


async def again(
    journal: Journal, turns: pl.DataFrame, run: Path, spec: str, options: dict[str, Any]
) -> tuple[pl.DataFrame, Counter[str]]:
    """Have turns judged again by a judge of the run, with its options there, or another one: each
    place's turns in one request, as the run sent them. Returns tree, node and the judge's columns
    with the prefix ``AGAIN``, and how many turns have none, by the reason. Raises ValueError or
    OSError without the judge, the run's files or its tasks."""
    files = (run / "processes" / f"{name}.json" for name in ("scheduler", "judges"))
    process, judges = map(msgspec.json.decode, (file.read_bytes() for file in files))
    process = msgspec.convert(process, SchedulerProcess)
    judge = make_worker(spec, judges["judges"].get(spec, {}) | options)
    if not isinstance(judge, Judge):
        raise ValueError(f"--again {spec}: expected a judge, and it is none")
    environment = registry.load(process.environment, process.options)
    training, heldout, _ = tasks.load(process, environment)
    held, none = {task.id: task for task in heldout}, cast(Any, None)
    settings = environment, process.scheduler, Counter[str](), lambda *_: None
    runtime = Runtime(none, journal, none, *settings)  # nothing is called or tokenized
    if not environment.rewarded_by_judge and "valid" in turns.columns:
        turns = turns.filter(pl.col("valid") > 0)  # as ``growth.rewards.judge`` asks
    answers, faults = list[dict[str, Any]](), Counter[str]()
    room = asyncio.Semaphore(judge.concurrency)

    async def answer(tree: int, nodes: list[int]) -> None:
        (row,) = journal.trees("id=?", tree)
        task = training.at(row.position) if row.split == "train" else held[row.task]
        if task.id != row.task or row.digest not in ("", task.digest):
            raise ValueError(f"the task files have another task {row.task} than the run had")
        context = Context(runtime, task, Journal.tree(journal, row), random.Random(0))
        context.state_type = type(environment.initial(task))
        turns_sent = []
        for node in map(context.tree.nodes.__getitem__, nodes):
            turn = scoring.judged_turn(context, node)
            if "judge_valid" not in node.scores:  # only PPR's turns were judged after their search
                turn = msgspec.structs.replace(turn, observation=None)
            turns_sent.append(turn)
        judgements = list[Judgement]()
        async with asyncio.timeout(process.scheduler.judge_deadline_s):
            for at in range(0, len(turns_sent), judge.batch):
                part = turns_sent[at : at + judge.batch]
                judgements += checked(judge, part, await judge.score(part))
        for node, judgement in zip(nodes, judgements, strict=True):
            scores = {AGAIN + name: judgement.scores.get(name) for name in judge.columns}
            answers.append({"tree": tree, "node": node, **scores})

    async def counted(tree: int, _: int, nodes: list[int]) -> None:
        async with room:
            try:
                await answer(tree, nodes)
            except Exception as error:  # noqa: BLE001
                faults[brief(error)] += len(nodes)  # of the judge or of the task

    await judge.start()
    try:
        places = turns.group_by("tree", "parent", maintain_order=True).agg("node")
        await gather(counted(*place) for place in places.rows())
    finally:
        await judge.close()
    names = dict.fromkeys((AGAIN + name for name in judge.columns), pl.Float64)
    return pl.DataFrame(answers, schema={"tree": pl.Int64, "node": pl.Int64, **names}), faults
