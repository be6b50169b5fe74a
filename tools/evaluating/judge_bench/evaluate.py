"""The command coppice evaluate nvprocess measures how often a process judge agrees with the labels of
steps (methods.md 2.5).

The judge is right about a step if 1[S/M > threshold] equals the label. An output that cannot be
read counts as wrong. Every answer is kept in OUT/answers.jsonl, so that an interrupted evaluation
can be continued.
"""

import argparse
import functools
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.common.atomic import write_whole
from coppice.common.options import command_parser, option
from coppice.scheduler.evaluation.evaluation import estimate
from coppice.tools.evaluating.folder import Measured, claim, conduct, own_folder
from coppice.tools.evaluating.judge_bench import judging, record
from coppice.tools.evaluating.judge_bench.judging import Answers, Asked
from coppice.tools.evaluating.judge_bench.record import CATEGORIES, THRESHOLD, Item

COMMAND = "coppice evaluate nvprocess"
SHIPPED = Path(__file__).parent / "nvprocess-small.jsonl"
BASELINES = ("majority", "random", "first-turn", "constant")


class Settings(msgspec.Struct, frozen=True):
    """OUT/evaluation.json: the settings that a resumed evaluation must share with the first."""

    bench: str
    threshold: float
    judges: list[Asked]


class Row(msgspec.Struct, frozen=True):
    """The result of one judge. valid: the share of outputs that could be read. by_category,
    by_steps: the accuracy on parts of the set."""

    judge: str
    accuracy: Measured
    valid: float
    by_category: dict[str, Measured]
    by_steps: dict[str, Measured]


class Result(msgspec.Struct, frozen=True):
    """OUT/result.json."""

    bench: str
    items: int
    steps: int
    good_steps: int
    threshold: float
    rows: list[Row]


# ----------------------------------------------------------------------------------------------
# measuring


def measure(
    judge: str, items: Sequence[Item], scores: dict[str, float | None], threshold: float
) -> Row:
    """The row of a judge. scores: by step; None is an output that could not be read."""
    return _row(
        judge,
        items,
        lambda name: None if (s := scores[name]) is None else record.label(s, threshold),
    )


def baseline(kind: str, items: Sequence[Item], threshold: float) -> Row:
    """The row of a rule without a judge. "majority": always the more frequent label. "random": a
    fair coin per step.

    "constant S": always the score S. "first-turn": the first turn is good, all others are bad;
    repetitive trajectories reward this rule.
    """
    labels = [step.label for item in items for step in item.steps]
    most = int(2 * sum(labels) >= len(labels))
    steps = [
        (record.step_id(item, n), item, step)
        for item in items
        for n, step in enumerate(item.steps, 1)
    ]
    first = {name for name, item, step in steps if step.context == item.question}
    says: dict[str, Callable[[str], int]] = {
        "majority": lambda name: most,
        "first-turn": lambda name: int(name in first),
        "random": lambda name: random.Random(f"nvprocess/{name}").getrandbits(1),
    }
    if kind in says:
        return _row(f"{kind} class" if kind == "majority" else kind, items, says[kind])
    return _row(kind, items, lambda name: record.label(float(kind.split()[1]), threshold))


def _row(judge: str, items: Sequence[Item], verdict: Callable[[str], int | None]) -> Row:
    """Make the row of a judge. verdict: the label that the judge gives to a step, or None."""
    right: list[tuple[Item, float]] = []
    valid = []
    for item in items:
        for number, step in enumerate(item.steps, 1):
            label = verdict(record.step_id(item, number))
            valid.append(label is not None)
            right.append((item, float(label == step.label)))

    def part(holds: Callable[[Item], bool]) -> Measured:
        values = [value for item, value in right if holds(item)]
        accuracy = estimate(values)
        return Measured(accuracy.mean, accuracy.half, len(values))

    multi = [len(item.steps) > 1 for item in items]
    return Row(
        judge,
        part(lambda item: True),
        sum(valid) / len(valid),
        {
            name: part(lambda i, n=name: i.category == n)
            for name in CATEGORIES
            if any(i.category == name for i in items)
        },
        {
            **({"single-step": part(lambda i: len(i.steps) == 1)} if not all(multi) else {}),
            **({"multi-step": part(lambda i: len(i.steps) > 1)} if any(multi) else {}),
        },
    )


def table(result: Result) -> str:
    """The result as a table for the terminal."""
    parts = [*result.rows[0].by_category, *result.rows[0].by_steps]
    cells = [["judge", "accuracy ±95%", "valid", *parts]]
    for row in result.rows:
        each = {**row.by_category, **row.by_steps}
        cells.append(
            [
                row.judge,
                _shown(row.accuracy),
                f"{row.valid:.3f}",
                *(_shown(each[name]) for name in parts),
            ]
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    rows = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    head = f"{result.bench}: {result.items} trajectories, {result.steps} steps, {result.good_steps} of them good (threshold {result.threshold:g})"
    return "\n".join([head, *rows])


def _shown(m: Measured) -> str:
    return f"{m.mean:.3f} ±{m.half:.3f}"


# ----------------------------------------------------------------------------------------------
# command line


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


def add_judges(parser: argparse.ArgumentParser) -> None:
    """Add --judge SPEC [--option KEY=VALUE ..] [--name NAME], which may be repeated; ``judges_of``
    reads them."""
    parser.set_defaults(judges=[])
    parser.add_argument(
        "--judge",
        action=_Judge,
        metavar="SPEC",
        help="a built-in judge or module:Class; may be repeated",
    )
    parser.add_argument(
        "--option",
        action=_Judge,
        metavar="KEY=VALUE",
        help="option of the judge before it; repeatable",
    )
    parser.add_argument(
        "--name",
        action=_Judge,
        help="table name of the judge before it (default: its spec and options)",
    )


def add_deadline(parser: argparse.ArgumentParser) -> None:
    """Add --deadline, the time that a judge may take for one step."""
    parser.add_argument(
        "--deadline", type=float, default=judging.DEADLINE_S, metavar="SECONDS", help="seconds for one step with all its attempts (default: %(default)g)"
    )  # fmt: skip


def check_threshold(threshold: float) -> None:
    """Raises ValueError if ``threshold`` is not between 0 and 1, as scores are."""
    if not 0 <= threshold <= 1:
        raise ValueError(f"--threshold {threshold:g}: expected a score, 0 to 1")


def judges_of(flags: argparse.Namespace) -> list[Asked]:
    """The judges of a command line. Raises ValueError if two have the same name."""
    judges = [
        Asked(j["name"] or _title(j["spec"], j["options"]), j["spec"], j["options"])
        for j in flags.judges
    ]
    names = [one.name for one in judges]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two judges are called {twice[0]!r}: tell them apart with --name")
    return judges


def _title(spec: str, options: dict[str, Any]) -> str:
    plain = [f"{key}={value}" for key, value in options.items() if not isinstance(value, dict)]
    models = [
        str(value["model"])
        for value in options.values()
        if isinstance(value, dict) and "model" in value
    ]
    return " ".join([spec, *models, *plain])


EXAMPLES = """\
  coppice evaluate nvprocess --judge slate_rules --baseline random
  coppice evaluate nvprocess --judge my_judge:Brevity --name mine --bench f.jsonl"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice evaluate nvprocess."""
    parser = command_parser(
        "coppice evaluate nvprocess",
        "Measure process judges on steps labelled good or bad.",
        EXAMPLES,
    )
    parser.add_argument(
        "--bench", type=Path, default=SHIPPED, help="JSONL records (default: the shipped set)"
    )
    add_judges(parser)
    parser.add_argument(
        "--baseline", nargs="+", action="append", default=[], metavar=("KIND", "VALUE"), help="random, first-turn, or constant S; may be repeated (majority is always added)"
    )  # fmt: skip
    parser.add_argument(
        "--threshold",
        type=float,
        default=THRESHOLD,
        help="good steps score above it (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder; an evaluation in it is continued (default: evaluations/nvprocess-TIME)",
    )
    add_deadline(parser)
    parser.add_argument(
        "--count-failed", action="store_true", help="steps an endpoint refuses or fails on count as wrong (default: the command fails)"
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON instead of a table"
    )
    return parser


def baselines_of(flags: argparse.Namespace) -> list[str]:
    """The baselines of a command line, after "majority". Raises ValueError for an unknown one."""
    kinds = ["majority"]
    for kind, *values in flags.baseline:
        if kind not in BASELINES or len(values) != (kind == "constant"):
            raise ValueError(
                f"--baseline {' '.join([kind, *values])}: expected majority, random, first-turn, or constant S"
            )
        if kind == "constant" and not _is_score(values[0]):
            raise ValueError(
                f"--baseline constant {values[0]}: expected a score, a number from 0 to 1"
            )
        kinds += [" ".join([kind, *values])] if kind != "majority" else []
    return list(dict.fromkeys(kinds))


def _is_score(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns its exit status."""
    flags = parser().parse_args(arguments)
    try:
        check_threshold(flags.threshold)
        if flags.deadline <= 0:
            raise ValueError(f"--deadline {flags.deadline:g}: expected more than 0 seconds")
        items = record.read(flags.bench, Item, "--bench")
        asked, kinds = judges_of(flags), baselines_of(flags)
        lasting = judging.lasting(asked)
        out = flags.out or own_folder("nvprocess")
        lock = claim(out, Settings(record.digest(flags.bench), flags.threshold, lasting))
    except (OSError, ValueError) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2
    with lock:
        return _evaluate(flags, items, asked, kinds, out)


def _evaluate(
    flags: argparse.Namespace, items: list[Item], asked: list[Asked], kinds: list[str], out: Path
) -> int:
    again = f"the same command and --out {out}"
    try:
        answers = Answers(out / "answers.jsonl")
    except (OSError, ValueError) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 1
    session = functools.partial(judging.Session, asked, items, answers, flags.deadline)
    failed = conduct(session, again, "answered", COMMAND)
    if isinstance(failed, int):
        return failed
    if failed and not flags.count_failed:
        judging.say_failed(failed, COMMAND)
        print(f"go on with: {again}, or count them as wrong with --count-failed", file=sys.stderr)
        return 1
    rows = [baseline(kind, items, flags.threshold) for kind in kinds]
    names = [
        record.step_id(item, number) for item in items for number in range(1, len(item.steps) + 1)
    ]
    for one in asked:
        by_step = {name: answers.found.get((one.name, name)) for name in names}
        scores = {
            name: answer.score if answer is not None else None for name, answer in by_step.items()
        }
        rows.append(measure(one.name, items, scores, flags.threshold))
    steps = [step for item in items for step in item.steps]
    if other := sum(step.label != record.label(step.score, flags.threshold) for step in steps):
        print(
            f"{other} of {len(steps)} labels of {flags.bench.name} were made with another threshold than"
            f" {flags.threshold:g}: give the threshold of its report (--threshold)",
            file=sys.stderr,
        )
    good = sum(step.label for item in items for step in item.steps)
    result = Result(flags.bench.name, len(items), len(names), good, flags.threshold, rows)
    try:
        write_whole(out / "result.json", result)
    except OSError as error:
        print(f"{COMMAND}: {error}\ngo on with: {again}", file=sys.stderr)
        return 1
    print(
        msgspec.json.encode(result).decode()
        if flags.json
        else f"{table(result)}\nresult {out / 'result.json'}"
    )
    return 0
