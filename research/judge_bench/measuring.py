"""How often a process judge agrees with the labels of steps (methods.md 2.5). The judge is right
about a step if 1[S/M > threshold] equals the label. An output that cannot be read counts as
wrong."""

import argparse
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.common.atomic import write_whole
from coppice.common.numbers import Share
from coppice.common.options import option
from coppice.research.judge_bench.building import Item
from coppice.tools.evaluating import examination
from coppice.tools.evaluating.examination import Prepared, SampleMean, repeated, sample_mean
from coppice.tools.finetuning import judging, records
from coppice.tools.finetuning.judging import JudgeSpec
from coppice.tools.finetuning.records import THRESHOLD, label, named_steps
from coppice.wire.digest import file as file_digest

SHIPPED = Path(__file__).parent / "nvprocess-small.jsonl"
BASELINES = re.compile(r"majority|random|first-turn|constant (0|1|0?\.\d+)")


class BenchSettings(msgspec.Struct, frozen=True):
    """OUT/evaluation.json: the settings that a resumed evaluation must share with the first."""

    bench: str
    threshold: float
    judges: list[JudgeSpec]


class JudgeRow(msgspec.Struct, frozen=True):
    """The result of one judge. multi_step: the accuracy on trajectories of several steps, if there
    are any. valid: the share of outputs that could be read."""

    judge: str
    accuracy: SampleMean
    multi_step: SampleMean | None
    valid: float


class BenchResult(msgspec.Struct, frozen=True):
    """OUT/result.json."""

    bench: str
    items: int
    steps: int
    good_steps: int
    threshold: float
    rows: list[JudgeRow]


# ---------------------------------------------------------------------------------------- measuring


def measure(
    judge: str, items: Sequence[Item], scores: dict[str, float | None], threshold: float
) -> JudgeRow:
    """The row of a judge. scores: by step; None is an output that could not be read."""
    labels = {n: label(s, threshold) for n, s in scores.items() if s is not None}
    return _row(judge, items, labels.get)


def baseline(kind: str, items: Sequence[Item], threshold: float) -> JudgeRow:
    """The row of a rule without a judge. "majority": always the more frequent label. "random": a
    fair coin per step.

    "constant S": always the score S. "first-turn": the first turn is good, all others are bad;
    repetitive trajectories reward this rule.
    """
    steps = named_steps(items)
    most = int(2 * sum(step.label for _, _, step in steps) >= len(steps))
    first = {name for name, item, step in steps if step.context == item.question}
    says: dict[str, Callable[[str], int]] = {
        "majority": lambda name: most,
        "first-turn": lambda name: int(name in first),
        "random": lambda name: random.Random(f"nvprocess/{name}").getrandbits(1),
        "constant": lambda name: label(float(kind.split()[1]), threshold),
    }
    return _row(f"{kind} class" if kind == "majority" else kind, items, says[kind.split()[0]])


def _row(judge: str, items: Sequence[Item], verdict: Callable[[str], int | None]) -> JudgeRow:
    """Make the row of a judge. verdict: the label that the judge gives to a step, or None."""
    steps = named_steps(items)
    labels = {name: verdict(name) for name, _, _ in steps}
    right = [float(labels[name] == step.label) for name, _, step in steps]
    multi = [one for one, (_, item, _) in zip(right, steps, strict=True) if len(item.steps) > 1]
    valid = sum(label is not None for label in labels.values()) / len(labels)
    return JudgeRow(judge, sample_mean(right), sample_mean(multi) if multi else None, valid)


def table(result: BenchResult) -> str:
    """The result as a table for the terminal."""
    cells = [["judge", "accuracy ±95%", "multi-step", "valid"]]
    for row in result.rows:
        cells.append([row.judge, str(row.accuracy), str(row.multi_step or "-"), f"{row.valid:.3f}"])
    good = f"{result.good_steps} of them good (threshold {result.threshold:g})"
    head = f"{result.bench}: {result.items} trajectories, {result.steps} steps, {good}"
    return "\n".join([head, *examination.table(cells)])


# ------------------------------------------------------------------------------------- command line


class _Judge(argparse.Action):
    """Collects --judge, --option and --name. An option or a name belongs to the judge before it."""

    def __call__(self, parser: Any, flags: Any, values: Any, flag: Any = None) -> None:
        judges: list[dict[str, Any]] = flags.judges
        if self.dest == "judge":
            judges.append({"spec": values, "options": {}, "name": ""})
        elif not judges:
            parser.error(f"{flag} {values} belongs to a judge: give --judge before it")
        elif self.dest == "name":
            judges[-1]["name"] = values
        else:
            try:
                key, value = option(values)
            except ValueError as error:
                parser.error(str(error))
            else:
                judges[-1]["options"][key] = value


def judges_of(flags: argparse.Namespace) -> list[JudgeSpec]:
    """The judges of a command line. Raises ValueError if two have the same name."""
    judges = []
    for one in flags.judges:
        options: dict[str, Any] = one["options"]
        tables = [value for value in options.values() if isinstance(value, dict)]
        title = [one["spec"], *(str(value["model"]) for value in tables if "model" in value)]
        title += [f"{k}={value}" for k, value in options.items() if not isinstance(value, dict)]
        judges.append(JudgeSpec(one["name"] or " ".join(title), one["spec"], options))
    if twice := repeated([one.name for one in judges]):
        raise ValueError(f"two judges are called {twice!r}: tell them apart with --name")
    return judges


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of coppice dev judge-bench measure."""
    add = parser.add_argument
    add("--bench", type=Path, default=SHIPPED, help="JSONL records (default: the shipped set)")
    parser.set_defaults(judges=[])
    judge = "a built-in judge or module:Class; may be repeated"
    add("--judge", action=_Judge, metavar="SPEC", help=judge)
    words = "option of the judge before it; repeatable"
    add("--option", action=_Judge, metavar="KEY=VALUE", help=words)
    name = "table name of the judge before it (default: its spec and options)"
    add("--name", action=_Judge, help=name)
    kinds = "random, first-turn, or constant S; may be repeated (majority is always added)"
    add("--baseline", nargs="+", action="append", default=[], metavar=("KIND", "VALUE"), help=kinds)
    threshold = "good steps score above it (default: %(default)s)"
    add("--threshold", type=Share, default=THRESHOLD, help=threshold)
    add("--deadline", **judging.DEADLINE)
    failed = "steps an endpoint refuses or fails on count as wrong (default: the command fails)"
    add("--count-failed", action="store_true", help=failed)
    examination.add_output(parser, "nvprocess")


def baselines_of(flags: argparse.Namespace) -> list[str]:
    """The baselines of a command line, after "majority". Raises ValueError for an unknown one."""
    kinds = ["majority", *(" ".join(words) for words in flags.baseline)]
    for kind in kinds:
        if not BASELINES.fullmatch(kind):
            expected = "expected majority, random, first-turn, or constant S, a score such as 0.5"
            raise ValueError(f"--baseline {kind}: {expected}")
    return list(dict.fromkeys(kinds))


def prepare(flags: argparse.Namespace) -> Prepared:
    """The evaluation of a command line. Raises ValueError or OSError with the remedy."""
    items = records.read([flags.bench], Item, "--bench")
    judges, kinds = judges_of(flags), baselines_of(flags)
    digest = file_digest(flags.bench, False)[:16]
    settings = BenchSettings(digest, flags.threshold, judging.lasting(judges))

    async def work(out: Path) -> BenchResult:
        answers = await judging.ask_all(
            judges, items, out / "answers.jsonl", flags.deadline, flags.count_failed
        )
        result = _result(flags, items, judges, kinds, answers)
        write_whole(out / "result.json", result)
        return result

    return Prepared("nvprocess", settings, work, table)


def _result(
    flags: argparse.Namespace, items: list[Item], judges: list[JudgeSpec], kinds: list[str],
    answers: judging.Answers,
) -> BenchResult:  # fmt: skip
    threshold, bench = flags.threshold, flags.bench.name
    rows = [baseline(kind, items, threshold) for kind in kinds]
    for judge in judges:
        found = {step: a.score for (name, step), a in answers.found.items() if name == judge.name}
        rows.append(measure(judge.name, items, found, threshold))
    steps = [step for item in items for step in item.steps]
    if other := sum(step.label != label(step.score, threshold) for step in steps):
        told = f"{other} of {len(steps)} labels of {bench} were made with another threshold than"
        remedy = f"{threshold:g}: give the threshold of its report (--threshold)"
        print(f"{told} {remedy}", file=sys.stderr)
    good = sum(step.label for step in steps)
    return BenchResult(bench, len(items), len(steps), good, threshold, rows)
