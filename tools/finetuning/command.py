"""The command coppice sft. Each subcommand reads files and writes files, so that every stage can be
inspected and repeated."""

import argparse
import functools
import itertools
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from coppice.common.atomic import draft_of, write_whole
from coppice.common.options import command_parser, option
from coppice.tools.evaluating.examination import INTERRUPTED, conduct
from coppice.tools.evaluating.folder import keep, locked
from coppice.tools.evaluating.judge_bench import build, judging, record
from coppice.tools.evaluating.judge_bench.evaluate import (
    add_deadline,
    check_deadline,
    check_threshold,
)
from coppice.tools.evaluating.judge_bench.record import THRESHOLD, Labelled, Step, Trajectory
from coppice.tools.finetuning import training
from coppice.tools.finetuning.judge import label
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
            check_files(options)
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
    out, seed, graded = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    out.add_argument("--out", required=True, type=Path, help="what is written")
    seed.add_argument("--seed", type=int, default=0, help="of every random draw (default: 0)")
    graded.add_argument("labelled", nargs="+", type=Path, help="labelled or corrected trajectories")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words, run, options, *parents in (
        ("collect", "trajectories of search runs, from their journals", collect, _collect, out),
        ("label", "two judges score every step; steps on which they differ are dropped", label_, _label_options, out),
        ("review", "apply the corrections of an edited review file", review, _review, out),
        ("rows", "training rows of a process reward model", rows, _rows, graded, seed, out),
        ("bench", "a balanced benchmark of process judges", bench, _bench, graded, seed, out),
        ("train", "fine-tune a model on rows of {prompt or messages, completion}", training.train, _train, seed, out),
        ("warm-start", "the supervised warm start of a run's policy, as a folder", training.warm_start, _warm_start, out),
    ):  # fmt: skip
        one = commands.add_parser(name, help=words, parents=parents)
        options(one)
        one.set_defaults(run=run)
    return parser


def _collect(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    split = "which tasks (default: train)"
    add("--split", choices=("train", "heldout"), default="train", help=split)
    prefix = "put before the ids, which begin with the folder's name (for runs of one name)"
    add("--prefix", default="", help=prefix)


def _label_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("trajectories", type=Path, help="file of `collect`")
    for side in "ab":
        judge = "a built-in judge or module:Class"
        add(f"--judge-{side}", required=True, metavar="SPEC", help=judge)
        add(
            f"--option-{side}", action="append", default=[], metavar="KEY=VALUE",
            help="its option, a TOML value",
        )  # fmt: skip
    most = "of two scores that count as equal (default: %(default)s)"
    add("--most-difference", type=float, default=label.MOST_DIFFERENCE, help=most)
    add_deadline(parser)
    add("--review", required=True, type=Path, help="the steps in a form to edit")


def _review(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("labelled", type=Path, help="file of `label`")
    add("review", type=Path, help="the review file, edited")


def _rows(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--balance", action="store_true", help="as many rows of good steps as of bad ones")
    add("--most", type=int, default=0, help="take at most so many rows at random (default: all)")


def _bench(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--size", required=True, type=int, help="trajectories in the benchmark")
    threshold = "good scores exceed it: a number, or mean (default: %(default)s)"
    add("--threshold", default=str(THRESHOLD), help=threshold)
    excluded = "leave out these labelled trajectories and every other trajectory of their questions"
    add("--exclude", type=Path, action="append", default=[], help=excluded)


def _train(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help="a model folder, a built-in name or a hub id")
    add("--rows", required=True, type=Path, help="JSONL file of `rows`, or of your own")
    length = parser.add_mutually_exclusive_group().add_argument
    length("--epochs", type=float, default=3, help="passes over the rows (default: %(default)s)")
    length("--steps", type=int, help="instead of epochs")
    add("--batch", type=int, default=32, help="rows per step (default: %(default)s)")
    add("--lr", type=float, default=2e-5, help="peak learning rate (default: %(default)s)")
    schedules = ("cosine", "constant", "linear")
    rate = "of the learning rate (default: cosine)"
    add("--schedule", choices=schedules, default="cosine", help=rate)
    warmup = "share of the steps (default: %(default)s)"
    add("--warmup-ratio", type=float, default=0.1, help=warmup)
    add("--lora-rank", type=int, default=0, help="0, the default, trains all weights")
    add("--lora-alpha", type=float, default=32.0, help="scale of LoRA (default: %(default)s)")
    switch = argparse.BooleanOptionalAction
    packing = "read a batch as one forest, shared prefixes once"
    add("--packing", action=switch, default=True, help=packing)
    forward = "tokens of one forward pass (default: %(default)s)"
    add("--forward-tokens", type=int, default=8192, help=forward)
    longest = "longer rows are left out and counted (default: the model's context)"
    add("--max-tokens", type=int, help=longest)
    held_out = "share to measure on, in whole groups (default: %(default)s)"
    add("--held-out", type=float, default=0.1, help=held_out)
    end = (
        "add the model's end token to completions (not useful for actions, which end by themselves)"
    )
    add("--end-token", action=switch, default=True, help=end)
    cores, threads = len(os.sched_getaffinity(0)), "compute threads (default: all, %(default)s)"
    add("--threads", type=int, default=cores, help=threads)


def _warm_start(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", required=True, type=Path, help="TOML file of the run to come")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key; repeatable")


# ----------------------------------------------------------------------------------------------
# files


def check_files(options: argparse.Namespace) -> None:
    """Raises ValueError if an output is an input or lies in an input folder, if two outputs are one
    file, or if one cannot be written."""
    _check_writable("--out", options.out)
    written = [("--out", options.out)]
    if options.command == "label":
        _check_writable("--review", options.review)
        written += [("--out with its answers", path) for path in _answers_of(options.out)]
        written.append(("--review", options.review))
    if options.command == "bench":
        written.append(("--out with its report", _report_of(options.out)))
    for (flag, path), read in itertools.product(written, _inputs(options)):
        if path.resolve().is_relative_to(read.resolve()):
            conflict = "lies in" if read.is_dir() else "would write over"
            raise ValueError(
                f"{flag} {path} {conflict} {read}, which this command reads: name another file"
            )
    for (other, earlier), (flag, path) in itertools.combinations(written, 2):
        if path.resolve() == earlier.resolve():
            raise ValueError(f"{flag} {path} is {other} too: name two files")


def _inputs(options: argparse.Namespace) -> list[Path]:
    """The files that the command reads, and the folders that it reads with all their contents."""
    if options.command == "collect":
        from coppice.tools.finetuning.judge.collect import (
            task_files,  # which imports the environments
        )

        return [*options.runs, *(path for folder in options.runs for path in task_files(folder))]
    if options.command == "label":
        return [options.trajectories]
    if options.command == "review":
        return [options.labelled, options.review]
    return [*options.labelled, *getattr(options, "exclude", [])]


def _answers_of(out: Path) -> list[Path]:
    """The answers, the settings and the lock that ``label`` keeps beside ``out``."""
    return [out.with_suffix(f".answers.{kind}") for kind in ("jsonl", "json", "lock")]


def _report_of(out: Path) -> Path:
    return out.with_name(out.name.removesuffix(".jsonl") + ".report.json")


def _check_writable(flag: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}, make it first")
    if path.exists() and not path.is_file():
        raise ValueError(f"{flag} {path} is no ordinary file: name a file")
    try:
        draft_of(path).touch()
        draft_of(path).unlink()
    except OSError as error:
        raise ValueError(
            f"{flag} {path} cannot be written ({error.strerror}): name another file"
        ) from None


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
    check_deadline(options.deadline)
    judges = [
        judging.JudgeSpec(name, spec, dict(map(option, texts)))
        for name, spec, texts in (
            ("a", options.judge_a, options.option_a),
            ("b", options.judge_b, options.option_b),
        )
    ]
    settings = label.Settings(record.digest(options.trajectories), judging.lasting(judges))
    _, settings_file, lock = _answers_of(options.out)
    with locked(lock, f"--out {options.out}"):
        keep(settings_file, settings, str(settings_file))
        return _label(options, trajectories, judges)


def _label(
    options: argparse.Namespace,
    trajectories: list[Trajectory[Step]],
    judges: list[judging.JudgeSpec],
) -> int:
    path = _answers_of(options.out)[0]
    session = functools.partial(judging.Session, judges, trajectories, path, options.deadline)
    kept = f"answered (in {path})"
    answers = conduct(session, "the same command", kept, "coppice sft label")
    if isinstance(answers, int):
        return answers
    steps, counts = label.labelled(trajectories, answers, "a", "b", options.most_difference)
    if not steps:
        raise ValueError(f"no step is left: {dict(counts)}")
    record.write(options.out, steps)
    record.write(options.review, label.to_review(steps))
    print(f"{len(steps)} trajectories in {options.out}, to be reviewed in {options.review}")
    _say("steps", counts)
    return 0


def review(options: argparse.Namespace) -> None:
    """Read labelled trajectories and an edited review file; write corrected trajectories."""
    records = record.read(options.labelled, Trajectory[Labelled])
    corrections = label.read_corrections(options.review, label.to_review(records))
    kept, counts = label.corrected(records, corrections)
    if not kept:
        raise ValueError("the review drops every step: there is nothing to write")
    record.write(options.out, kept)
    print(f"{len(kept)} trajectories in {options.out}")
    _say("steps", counts)


def rows(options: argparse.Namespace) -> None:
    """Read labelled trajectories; write training rows of a process reward model."""
    labelled = record.read_all(options.labelled, Trajectory[Labelled])
    training_rows, left_out = label.judgement_rows(
        labelled, options.most, options.seed, options.balance
    )
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
    report_path = _report_of(options.out)
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


def _say(heading: str, counts: Mapping[str, int]) -> None:
    for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"  {heading}: {count} {reason}")
