"""The command coppice sft. Each subcommand reads files and writes files, so that every stage can be
inspected and repeated."""

import argparse
import functools
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from coppice.common.atomic import write_whole
from coppice.common.options import command_parser, option
from coppice.tools.evaluating.folder import INTERRUPTED, conduct, keep, locked
from coppice.tools.evaluating.judge_bench import build, judging, record
from coppice.tools.evaluating.judge_bench.evaluate import add_deadline, check_threshold
from coppice.tools.evaluating.judge_bench.record import THRESHOLD, Labelled, Step, Trajectory
from coppice.tools.finetuning import training
from coppice.tools.finetuning.judge import files, label
from coppice.wire.faults import Fault

MODEL_MAKERS = ("train", "warm-start")
"""The commands whose --out is a new folder. The --out of the other commands is a file."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parser().parse_args(arguments)
    # SIGTERM cleans up as Ctrl-C does
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if options.command not in MODEL_MAKERS:
            files.check(options)
        return options.run(options) or 0
    except KeyboardInterrupt:
        print(f"coppice sft {options.command}: stopped; {_left(options)}", file=sys.stderr)
        return INTERRUPTED
    except (Fault, OSError, ValueError, MemoryError) as error:
        print(f"coppice sft {options.command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, Fault) else 2
    finally:
        signal.signal(signal.SIGTERM, before)


def _left(options: argparse.Namespace) -> str:
    if options.command not in MODEL_MAKERS:
        return "give the same command again"
    return f"the model is whole in {options.out}" if options.out.exists() else "nothing was saved"


EXAMPLES = """\
  coppice sft collect RUN --out trajectories.jsonl
  coppice sft label trajectories.jsonl --judge-a slate --judge-b slate_rules \\
    --out labelled.jsonl --review review.txt
  coppice sft review labelled.jsonl review.txt --out corrected.jsonl
  coppice sft rows corrected.jsonl --balance --out rows.jsonl
  coppice sft bench corrected.jsonl --size 100 --out bench.jsonl
  coppice sft train --model FOLDER --rows rows.jsonl --out FOLDER --epochs 2
  coppice sft warm-start --config configs/slate-tiny.toml --out FOLDER"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice sft."""
    parser = command_parser(
        "coppice sft", "Make a fine-tuned judge from trajectories of runs (docs/sft.md).", EXAMPLES
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_stages(commands)
    _add_training(commands)
    return parser


def _add_stages(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    one = commands.add_parser("collect", help="trajectories of search runs, from their journals")
    one.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    one.add_argument(
        "--split",
        choices=("train", "heldout"),
        default="train",
        help="which tasks (default: train)",
    )
    one.add_argument(
        "--prefix",
        default="",
        help="put before the ids, which begin with the folder's name (for runs of one name)",
    )
    one.add_argument("--out", required=True, type=Path, help="what is written")
    one.set_defaults(run=collect)

    one = commands.add_parser(
        "label", help="two judges score every step; steps on which they differ are dropped"
    )
    one.add_argument("trajectories", type=Path, help="file of `collect`")
    for side in "ab":
        one.add_argument(
            f"--judge-{side}",
            required=True,
            metavar="SPEC",
            help="a built-in judge or module:Class",
        )
        one.add_argument(
            f"--option-{side}",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="its option, a TOML value",
        )
    one.add_argument(
        "--most-difference",
        type=float,
        default=label.MOST_DIFFERENCE,
        help="of two scores that count as equal (default: %(default)s)",
    )
    add_deadline(one)
    one.add_argument("--out", required=True, type=Path, help="what is written")
    one.add_argument("--review", required=True, type=Path, help="the steps in a form to edit")
    one.set_defaults(run=label_)

    one = commands.add_parser("review", help="apply the corrections of an edited review file")
    one.add_argument("labelled", type=Path, help="file of `label`")
    one.add_argument("review", type=Path, help="the review file, edited")
    one.add_argument("--out", required=True, type=Path, help="what is written")
    one.set_defaults(run=review)

    one = commands.add_parser("rows", help="training rows of a process reward model")
    one.add_argument("labelled", nargs="+", type=Path, help="labelled or corrected trajectories")
    one.add_argument(
        "--balance", action="store_true", help="as many rows of good steps as of bad ones"
    )
    one.add_argument(
        "--most", type=int, default=0, help="take at most so many rows at random (default: all)"
    )
    one.add_argument("--seed", type=int, default=0, help="of every random draw (default: 0)")
    one.add_argument("--out", required=True, type=Path, help="what is written")
    one.set_defaults(run=rows)

    one = commands.add_parser("bench", help="a balanced benchmark of process judges")
    one.add_argument("labelled", nargs="+", type=Path, help="labelled or corrected trajectories")
    one.add_argument("--size", required=True, type=int, help="trajectories in the benchmark")
    one.add_argument(
        "--threshold",
        default=str(THRESHOLD),
        help="good scores exceed it: a number, or mean (default: %(default)s)",
    )
    excluded = "leave out these labelled trajectories and every other trajectory of their questions"
    one.add_argument("--exclude", type=Path, action="append", default=[], help=excluded)
    one.add_argument("--seed", type=int, default=0, help="of every random draw (default: 0)")
    one.add_argument("--out", required=True, type=Path, help="what is written")
    one.set_defaults(run=bench)


def _add_training(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    one = commands.add_parser(
        "train", help="fine-tune a model on rows of {prompt or messages, completion}"
    )
    one.add_argument("--model", required=True, help="a model folder, a built-in name or a hub id")
    one.add_argument(
        "--rows", required=True, type=Path, help="JSONL file of `rows`, or of your own"
    )
    one.add_argument("--out", required=True, type=Path, help="what is written")
    length = one.add_mutually_exclusive_group()
    length.add_argument(
        "--epochs", type=float, default=3, help="passes over the rows (default: %(default)s)"
    )
    length.add_argument("--steps", type=int, help="instead of epochs")
    one.add_argument("--batch", type=int, default=32, help="rows per step (default: %(default)s)")
    one.add_argument(
        "--lr", type=float, default=2e-5, help="peak learning rate (default: %(default)s)"
    )
    one.add_argument(
        "--schedule",
        choices=("cosine", "constant", "linear"),
        default="cosine",
        help="of the learning rate (default: cosine)",
    )
    one.add_argument(
        "--warmup-ratio", type=float, default=0.1, help="share of the steps (default: %(default)s)"
    )
    one.add_argument("--lora-rank", type=int, default=0, help="0, the default, trains all weights")
    one.add_argument(
        "--lora-alpha", type=float, default=32.0, help="scale of LoRA (default: %(default)s)"
    )
    one.add_argument(
        "--packing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read a batch as one forest, shared prefixes once",
    )
    one.add_argument(
        "--forward-tokens",
        type=int,
        default=8192,
        help="tokens of one forward pass (default: %(default)s)",
    )
    one.add_argument(
        "--max-tokens",
        type=int,
        help="longer rows are left out and counted (default: the model's context)",
    )
    one.add_argument(
        "--held-out",
        type=float,
        default=0.1,
        help="share to measure on, in whole groups (default: %(default)s)",
    )
    one.add_argument(
        "--end-token",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="add the model's end token to completions (not useful for actions, which end by themselves)",
    )
    one.add_argument("--seed", type=int, default=0, help="of every random draw (default: 0)")
    one.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="compute threads (default: all, %(default)s)",
    )
    one.set_defaults(run=training.train)

    one = commands.add_parser(
        "warm-start", help="the supervised warm start of a run's policy, as a folder"
    )
    one.add_argument("--config", required=True, type=Path, help="TOML file of the run to come")
    one.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key; repeatable"
    )
    one.add_argument("--out", required=True, type=Path, help="what is written")
    one.set_defaults(run=training.warm_start)


# ----------------------------------------------------------------------------------------------
# stages


def collect(options: argparse.Namespace) -> None:
    """Read journals and write trajectories."""
    from coppice.tools.finetuning.judge.collect import collect as collected

    trajectories, skipped = collected(options.runs, options.split, options.prefix)
    record.write(options.out, trajectories)
    steps = sum(len(one.steps) for one in trajectories)
    right = sum(one.outcome for one in trajectories)
    print(
        f"{len(trajectories)} trajectories ({right} with a correct answer), {steps} turns to judge, in {options.out}"
    )
    _say("skipped", skipped)


def label_(options: argparse.Namespace) -> int:
    """Read trajectories; write labelled trajectories and a file to review. Returns the exit status."""
    if options.review.exists():
        raise ValueError(
            f"--review {options.review} exists: it may hold corrections; move it away first"
        )
    if not 0 <= options.most_difference <= 1:
        raise ValueError(
            f"--most-difference {options.most_difference:g}: expected a difference of scores, 0 to 1"
        )
    trajectories = record.read(options.trajectories, Trajectory[Step])
    if options.deadline <= 0:
        raise ValueError(f"--deadline {options.deadline:g}: expected more than 0 seconds")
    asked = [
        _asked("a", options.judge_a, options.option_a),
        _asked("b", options.judge_b, options.option_b),
    ]
    settings = label.Settings(record.digest(options.trajectories), judging.lasting(asked))
    _, settings_file, lock = files.answers_of(options.out)
    with locked(lock, f"--out {options.out}"):
        keep(settings_file, settings, str(settings_file))
        return _label(options, trajectories, asked)


def _label(
    options: argparse.Namespace, trajectories: list[Trajectory[Step]], asked: list[judging.Asked]
) -> int:
    answers = judging.Answers(files.answers_of(options.out)[0])
    session = functools.partial(judging.Session, asked, trajectories, answers, options.deadline)
    failed = conduct(
        session, "the same command", f"answered (in {answers.path})", "coppice sft label"
    )
    if isinstance(failed, int):
        return failed
    if failed:
        judging.say_failed(failed, "coppice sft label")
        print(
            f"the answers so far are kept in {answers.path}; go on with the same command",
            file=sys.stderr,
        )
        return 1
    kept, counts = label.labelled(trajectories, answers, "a", "b", options.most_difference)
    if not kept:
        raise ValueError(f"no step is left: {dict(counts)}")
    record.write(options.out, kept)
    record.write(options.review, label.to_review(kept))
    print(f"{len(kept)} trajectories in {options.out}, to be reviewed in {options.review}")
    _say("steps", counts)
    return 0


def review(options: argparse.Namespace) -> None:
    """Read labelled trajectories and an edited review file; write corrected trajectories."""
    from coppice.tools.finetuning.judge.review import corrected, read_corrections

    records = record.read(options.labelled, Trajectory[Labelled])
    kept, counts = corrected(records, read_corrections(options.review, label.to_review(records)))
    if not kept:
        raise ValueError("the review drops every step: there is nothing to write")
    record.write(options.out, kept)
    print(f"{len(kept)} trajectories in {options.out}")
    _say("steps", counts)


def rows(options: argparse.Namespace) -> None:
    """Read labelled trajectories; write training rows of a process reward model."""
    from coppice.tools.finetuning.judge.rows import judgement_rows

    labelled = record.read_all(options.labelled, Trajectory[Labelled])
    training_rows, left_out = judgement_rows(labelled, options.most, options.seed, options.balance)
    if not training_rows:
        raise ValueError(
            f"no row can be made; left out: {dict(left_out)} (label with judges that explain)"
        )
    record.write(options.out, training_rows)
    print(f"{len(training_rows)} rows in {options.out}")
    _say("left out", left_out)


def bench(options: argparse.Namespace) -> None:
    """Read labelled trajectories; write a balanced benchmark and its report."""
    if options.size < 1:
        raise ValueError(f"--size {options.size}: expected 1 trajectory or more")
    pool = record.read_all(options.labelled, Trajectory[Labelled])
    excluded = [
        one
        for path in options.exclude
        for one in record.read(path, Trajectory[Labelled], "--exclude")
    ]
    items, report = build.build(
        pool, options.size, _threshold(options.threshold), options.seed, excluded
    )
    record.write(options.out, items)
    report_path = files.report_of(options.out)
    write_whole(report_path, report)
    print(
        f"{len(items)} trajectories in {options.out}, {report.multi_step} of several steps; {report.good_steps} of {report.steps} steps are good"
    )
    _say("taken", report.taken)
    _say("in the pool", report.pool)
    _say("dropped", report.dropped)
    if report.missing:
        print(f"the pool has {report.missing} fewer than asked for")
    print(f"report {report_path}")


def _threshold(text: str) -> float | None:
    if text == "mean":
        return None
    try:
        threshold = float(text)
    except ValueError:
        raise ValueError(f"--threshold {text}: expected a number from 0 to 1, or mean") from None
    check_threshold(threshold)
    return threshold


def _asked(name: str, spec: str, options: Sequence[str]) -> judging.Asked:
    return judging.Asked(name, spec, dict(option(text) for text in options))


def _say(heading: str, counts: Mapping[str, int]) -> None:
    for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"  {heading}: {count} {reason}")
