"""The verdict on a run: did it learn, what held it back, and what to try. It rests on the updates'
records, the held-out results and the newest trees, so it suits live, stopped and old runs.

The weight of a statement is the share of the run's signal that its subject costs: of groups without
spread, of invalid actions; 1 for a judge that pays right ends less, 0.5 for one that pays all the
same. What changed on held-out tasks comes first, then the heaviest, whose remedy is what to try.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, variance
from typing import Any

import msgspec

from coppice.scheduler.growth.dynamic_sampling import COMPARED, EQUAL
from coppice.scheduler.growth.tree import Node
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.ledger.records import Record

NEWEST, FEWEST = 500, 10
"""The trees of each split that are read, within seconds; ends of a kind whose mean says something.
"""
HEAVY, STILL = 0.1, 1e-4
"""The weight that asks for a remedy. A policy hardly learns if its updates move the log-probability
of a token by less than STILL (nats)."""
LINES, WIDTH = 10, 80
"""The most lines and columns of the closing summary."""
EQUAL_SHARE, GAP = "share/equal_groups", "watch/engine_gap_p99"
"""EQUAL_SHARE is made here: the share of an update's new groups whose rewards are all equal."""
LOST = "quarantined_tasks crashed_episodes refused_episodes outgrown_trajectories invalid_outcomes"
AGED, FRESH = "watch/staleness_1/gap_mean", "watch/engine_gap_mean"


class Statement(msgspec.Struct, frozen=True):
    """What is said of a subject, in clauses. metrics: which show it, the best first. trees: what
    ``coppice trees RUN`` takes to list trees that show it. remedy: what to try."""

    subject: str
    words: str
    metrics: Sequence[str] = ()
    weight: float = 0.0
    trees: str = ""
    remedy: str = ""


def verdict(
    records: Sequence[Record], evaluations: Sequence[Mapping[str, Any]], config: Mapping[str, Any],
    journal: Journal | None,
) -> list[Statement]:  # fmt: skip
    """Return at most nine statements. records: of the updates. evaluations: the held-out results,
    in order. config: the run's, or empty. journal: with the trees, if it can be read."""
    trees = list[list[Node]]()
    for split in ("train", "heldout") if journal is not None else ():
        some = f"FROM trees WHERE split=? AND status!='growing' ORDER BY id DESC LIMIT {NEWEST}"
        for row in journal.trees(f"id IN (SELECT id {some})", split):
            with contextlib.suppress(ValueError):  # a damaged tree says nothing
                nodes = journal.tree(row).nodes.values()
                trees.append([node for node in nodes if node.kind == "action"])
    lost = len(journal.quarantined()) if journal is not None else 0
    of_room = (config.get(room, {}) for room in ("scheduler", "learner"))
    run = VerdictBasis(records or [{"version": 0.0}], trees, lost, *of_room)
    causes = [of(run) for of in (_judge, _episodes, _equal_groups, _time, _staleness, _numerics)]
    causes = sorted((of for of in causes if of.words), key=lambda cause: -cause.weight)
    return [*_learned(evaluations), *causes]


def lines(statements: Sequence[Statement], run: str) -> list[str]:
    """Return the closing summary, without the lightest statements and the last clauses of lines
    that are too long. A long path of the run makes the last line longer."""
    pointed = max(statements, key=lambda one: one.weight * bool(one.trees))
    told = [(one.subject, one.words) for one in statements[: LINES - 3]]
    told += [("try", remedy(statements)), ("trees", f"coppice trees RUN {pointed.trees}".strip())]
    rows = [f"{subject:<10}{words}" for subject, words in told]
    ends = [row.rfind("; ", 0, WIDTH + 1) if len(row) > WIDTH else -1 for row in rows]
    cut = [row[: end if end > 0 else WIDTH] for row, end in zip(rows, ends, strict=True)]
    return [*cut, f"{'report':<10}coppice report {run}"]


def remedy(statements: Sequence[Statement]) -> str:
    """Return what to try for the heaviest statement."""
    worst = max(statements, key=lambda one: one.weight)
    nothing = "more updates: nothing above takes a tenth of the signal"
    return f"{worst.remedy}, for {worst.subject}" if worst.weight >= HEAVY else nothing


def equal_shares(records: Sequence[Record]) -> dict[float, float]:
    """Return ``EQUAL_SHARE`` by version, where an update has new groups to compare."""
    records = _counted(records)
    totals = [(0.0, 0.0), *((_total(of, EQUAL), _total(of, COMPARED)) for of in records)]
    steps = zip(records, pairwise(totals), strict=True)
    return {of["version"]: (b[0] - a[0]) / (b[1] - a[1]) for of, (a, b) in steps if b[1] > a[1]}


def change(first: Sequence[float], last: Sequence[float]) -> tuple[float, float, str]:
    """Return the difference of two means, given with half widths, the half width of its 95%
    interval as of independent samples, and what that says."""
    by, half = last[0] - first[0], math.hypot(first[1], last[1])
    if math.isnan(half):
        return by, half, "no interval"
    moved = "rose beyond the interval" if by > 0 else "fell beyond the interval"
    return by, half, moved if abs(by) > half else "not beyond the interval"


# ----------------------------------------------------------------------------------------------
# statements


class VerdictBasis(msgspec.Struct, frozen=True):
    """What statements rest on. trees: the actions of each. lost: quarantined tasks."""

    records: Sequence[Record]
    trees: Sequence[Sequence[Node]]
    lost: int
    scheduler: Mapping[str, Any]
    learner: Mapping[str, Any]

    def mean(self, metric: str) -> float:
        """The mean over the updates that have the metric; 0 if none has."""
        return fmean([of[metric] for of in self.records if metric in of] or [0.0])

    def share(self, part: str, whole: str) -> tuple[float, float, float]:
        """The share of a count in another over the run and over the last tenth of the other, and
        the other. Counts may stand still in the last updates, whose trees have grown before."""
        counted = _counted(self.records)
        last, wholes = counted[-1], _total(counted[-1], whole)
        grown = (of for of in counted if wholes - _total(of, whole) >= wholes / 10)
        before = [{}, *grown][-1]
        late = (_total(last, part) - _total(before, part), wholes - _total(before, whole))
        return _total(last, part) / (wholes or 1), late[0] / (late[1] or 1), wholes


def _counted(records: Sequence[Record]) -> list[Record]:
    """Leave out records that a checkpoint gave back without counts, but return at least one."""
    counted = [of for of in records if any(name.startswith("count/") for name in of)]
    return counted or [*records[-1:]]


def _total(record: Record, prefix: str) -> float:
    return sum(n for name, n in record.items() if name.startswith(f"count/{prefix}"))


def _learned(evaluations: Sequence[Mapping[str, Any]]) -> list[Statement]:
    headline = evaluations[-1]["headline"] if evaluations else ""
    how = evaluations[-1].get("how") if evaluations else ""
    alike = [of for of in evaluations if of.get("how", how) == how]  # a resume may change it
    evaluations = [of for of in alike if headline in of["measures"]]
    if len(evaluations) < 2:
        few = f"unknown: {len(evaluations)} of the two held-out evaluations alike that it takes"
        return [Statement("learned", few)]
    first, last, best = evaluations[0]["measures"], evaluations[-1]["measures"], ""
    name, tasks = evaluations[-1]["headline"], evaluations[-1]["questions"]
    both = [of for of in last if of in first]
    moves = {of: change(*((p["mean"], p["half"]) for p in (first[of], last[of]))) for of in both}
    arrow = {of: f"{of} {first[of]['mean']:.3f} -> {last[of]['mean']:.3f}" for of in moves}
    by, half, said = moves.pop(name)
    top = max(evaluations, key=lambda result: result["measures"][name]["mean"])
    if top["measures"][name]["mean"] > last[name]["mean"]:
        best = f"; best {top['measures'][name]['mean']:.3f} (version {top['version']})"
    words = f"{arrow[name]}, {by:+.3f} ±{half:.3f}: {said}{best}; {tasks} tasks"
    weight, more = HEAVY * (abs(by) <= half), f"scheduler.evaluation.questions={4 * tasks}"
    learned = Statement("learned", words, [f"heldout/{name}"], weight, "--heldout", more)
    moved = [arrow[of] for of, (by, half, _) in moves.items() if abs(by) > half]
    return [learned, *([Statement("also", "; ".join(moved))] if moved else [])]


def _equal_groups(run: VerdictBasis) -> Statement:
    """Of groups, the siblings of one place: a tree has several."""
    share, late, number = run.share(EQUAL, COMPARED)
    places = [(of, parent) for of in run.trees for parent in {action.parent for action in of}]
    groups = [[action for action in of if action.parent == parent] for of, parent in places]
    rewards = [{action.scores.get("reward") for action in group} for group in groups]
    alike = [len({action.text for action in group}) == 1 for group in groups]
    several = zip(groups, rewards, alike, strict=True)
    equal = [one for of, pay, one in several if len(of) > 1 == len(pay) and None not in pay]
    words = f"{share:.0%} of {number:.0f} groups had equal rewards, {late:.0%} at last"
    words += f"; one text in {fmean(equal):.0%}" if equal else ""
    advice = f"scheduler.dynamic_sampling_budget={run.scheduler.get('questions_per_update', 16)}"
    if width := run.scheduler.get("strategy_options", {}).get("k"):
        advice = f"scheduler.strategy_options.k={width + 3}"
    if sum(equal) * 2 > len(equal):
        advice = f"scheduler.temperature={run.scheduler.get('temperature', 1.0) + 0.2:.2g}"
    metrics = (EQUAL_SHARE, "learner/zero_advantage_share", "learner/entropy")
    where = '--groups --where "spread = 0"'
    return Statement("spread", words * bool(number), metrics, late, where, advice)


def _judge(run: VerdictBasis) -> Statement:
    """Does the reward of an episode's end follow its outcome?"""
    scores = [action.scores for actions in run.trees for action in actions]
    ends = [(of["outcome"], of["reward"]) for of in scores if {"outcome", "reward"} <= of.keys()]
    middle = fmean([outcome for outcome, _ in ends] or [0.0])
    right, wrong = ([pay for x, pay in ends if (x > middle) == of] for of in (True, False))
    newest = _counted(run.records)[-1]
    judged, bad = (_total(newest, of) for of in ("judged_scores", "invalid_judgements"))
    weight, words = bad / (judged or 1), [f"{bad / (judged or 1):.1%} of scores invalid"]
    advice, where = "the form and max_tokens of the judge", "judge_invalid > 0"
    if min(len(right), len(wrong)) >= FEWEST:
        half = 1.96 * math.sqrt(sum(variance(of) / len(of) for of in (right, wrong)))
        a, b = fmean(right), fmean(wrong)
        words = [f"right ends earn {a:+.2f}, wrong {b:+.2f} (±{half:.2f})", *words]
        if a - b <= half:
            weight, advice = 0.5 + 0.5 * (b - a > half), "mend the judge: right ends earn no more"
            where = f"outcome <= {middle:.2g} AND reward > {a:.2g}"
    words = "; ".join(words if judged else words[:-1])
    metrics = ("score/reward", "rollout/outcome", "score/judge_valid")
    return Statement("judge", words, metrics, weight, f'--where "{where}"', advice)


def _episodes(run: VerdictBasis) -> Statement:
    share, late, number = run.share("invalid_actions", "actions")
    lost = {of: _total(_counted(run.records)[-1], of) for of in LOST.split()}
    lost["quarantined_tasks"] = run.lost
    words = [f"{share:.1%} of {number:.0f} actions invalid, {late:.1%} at last"] * bool(number)
    words += [f"{count:.0f} {of.replace('_', ' ')}" for of, count in lost.items() if count]
    trees = sum(of.get("learner/questions", 0) for of in run.records)
    ended = sum(of.get("rollout/outcomes", 0) for of in run.records) or trees
    costs = {of: count / (ended + count or 1) for of, count in lost.items()}
    grown = _total(_counted(run.records)[-1], "quarantined")  # without rows and held-out tasks
    costs["quarantined_tasks"] = grown / (trees + grown or 1)
    worst = max(costs, key=lambda of: costs[of])
    weight, where = max(late, costs[worst]), "invalid > 0"
    where = "crashed_max = 1" if lost["crashed_episodes"] else where
    advice = "coppice sft first" if late <= share else f"learner.lr={run.learner.get('lr', 0) / 2}"
    advice = f"to mend the {worst.replace('_', ' ')}" if costs[worst] > late else advice
    words = "; ".join(words)
    return Statement("episodes", words, ["score/valid"], weight, f'--where "{where}"', advice)


def _staleness(run: VerdictBasis) -> Statement:
    most, over = run.scheduler.get("max_staleness", 1), run.mean("learner/over_stale")
    trees, mean = run.mean("learner/questions"), run.mean("learner/staleness_mean")
    cut, n = run.mean("learner/clip_share") + run.mean("learner/mask_share"), len(run.records)
    words = f"tokens {mean:.2f} updates old; {over * n:.0f} of {trees * n:.0f} trees overtaken"
    words = f"{words}; {cut:.1%} of tokens cut" * bool(trees)
    weight, where = max(cut, over / (trees or 1)), f'--where "trained_by - version > {most + 1}"'
    metrics = ("watch/sample_share", "learner/staleness_mean")
    fewer = f"scheduler.max_staleness={max(0, most - 1)}"
    return Statement("staleness", words, metrics, weight, where, fewer)


def _numerics(run: VerdictBasis) -> Statement:
    """A run whose self-check fails has no record. What updates move is the difference of tokens one
    update old beyond that of fresh ones, which equal weights have too."""
    gaps = [of[GAP] for of in run.records if GAP in of]
    moves = max(0.0, run.mean(AGED) - run.mean(FRESH))
    limit = run.mean("watch/engine_gap_limit") or math.inf
    moved = f"updates move a token {moves:.2g} nats; " * bool(run.mean(AGED))
    words = f"{moved}engine and learner {fmean(gaps or [0]):.0e} apart" * bool(gaps)
    weight, advice = fmean([gap > limit for gap in gaps] or [0]), "learner.correction=tis"
    metrics = GAP, "learner/kl"
    # rounding hides small steps where even equal weights differ
    if run.mean(AGED) and moves < STILL and run.mean(FRESH) < 10 * STILL:
        metrics = metrics[::-1]
        factor = 100 * STILL / moves if moves > run.mean(FRESH) else 10.0
        weight, advice = 1.0, f"learner.lr={min(1e-3, run.learner.get('lr', 1e-6) * factor):.0e}"
    return Statement("numerics", words, metrics, weight, "", advice)


def _time(run: VerdictBasis) -> Statement:
    """Waiting costs time and no signal, so it weighs nothing."""
    learner, actors = run.mean("busy/learner"), run.mean("busy/engine")
    words = "updates waited for rollouts" if learner < actors else "rollouts waited for updates"
    words = "neither waited much for the other" if abs(learner - actors) < HEAVY else words
    words = "both waited, for judges or tools" if max(learner, actors) < 0.5 else words
    words = f"learner busy {learner:.0%}, actors {actors:.0%}: {words}"
    return Statement("time", words * bool(learner + actors), ("busy/learner", "busy/engine"))
