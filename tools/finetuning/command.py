"""The command coppice sft. Each subcommand reads files and writes files, so that every stage can be
inspected and repeated."""

import argparse
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coppice.common.atomic import draft_of, drafted
from coppice.common.hardware import cores
from coppice.common.numbers import Count, Discount, Natural, Positive, Share
from coppice.common.options import command_parser, gave_up, option
from coppice.common.process import locked
from coppice.tools.evaluating.examination import INTERRUPTED, conduct
from coppice.tools.evaluating.folder import IN_USE, keep
from coppice.tools.evaluating.marks import KINDS
from coppice.tools.finetuning import judging, labels, records, training
from coppice.tools.finetuning.marked import marked_rows
from coppice.tools.finetuning.records import Labelled, RecordedStep, Trajectory
from coppice.wire.digest import file as file_digest
from coppice.wire.faults import Fault

MODEL_MAKERS = ("train", "warm-start")
"""The commands whose --out is a new folder, which appears whole or not at all. The --out of the
other commands is a file."""


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    # SIGTERM cleans up as Ctrl-C does
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    left = "give the same command again"
    try:
        if options.command not in MODEL_MAKERS:
            return options.run(options) or 0
        left = "nothing was saved"
        with drafted(options.out, "--out") as draft:
            options.run(options, draft)
        left = f"the model is whole in {options.out}"
        print(left)
        return 0
    except KeyboardInterrupt:
        return gave_up(f"coppice sft {options.command}", f"stopped; {left}", INTERRUPTED)
    except (Fault, OSError, ValueError, MemoryError) as error:
        status = 1 if isinstance(error, Fault) else 2
        return gave_up(f"coppice sft {options.command}", error, status)
    finally:
        signal.signal(signal.SIGTERM, before)


EXAMPLES = """\
  coppice sft collect RUN --out a.jsonl
  coppice sft label a.jsonl --judge-a pprm_rules --judge-b my_judge:Grade --out b.jsonl
  coppice sft rows b.jsonl --balance --out balanced.jsonl
  coppice sft train --model FOLDER --rows balanced.jsonl --out FOLDER --epochs 2
  coppice sft warm-start --config configs/slate-tiny.toml --out FOLDER"""


def parser() -> argparse.ArgumentParser:
    what = "Make a fine-tuned judge from trajectories of runs (docs/sft.md)."
    parser = command_parser("coppice sft", what, EXAMPLES)
    parents: Any = [argparse.ArgumentParser(add_help=False) for _ in range(2)]
    out, seed = parents
    out.add_argument("--out", required=True, type=Path, help="what is written")
    seed.add_argument("--seed", type=Natural, default=0, help="of every random draw (default: 0)")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, words: str, run: Any, *parents: argparse.ArgumentParser) -> Any:
        one = commands.add_parser(name, help=words, parents=parents)
        one.set_defaults(run=run)
        return one.add_argument

    add = command("collect", "trajectories of search runs, from their journals", collect, out)
    add("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    add("--split", choices=("train", "heldout"), default="train", help="tasks (default: train)")
    add("--prefix", default="", help="put before the ids (for runs whose folders share a name)")

    add = command("marked", "training rows of candidates that a person marked", marked, out)
    add("runs", nargs="+", type=Path, metavar="RUN", help="run folders with marks.jsonl")
    add("--marks", nargs="+", choices=KINDS, default=["good"], help="(default: good)")

    add = command("label", "two judges score every step", label, out)
    add("trajectories", type=Path, help="file of `collect`")
    value = {"action": "append", "default": [], "metavar": "KEY=VALUE"}
    for side in "ab":
        add(f"--judge-{side}", required=True, metavar="SPEC", help="built-in or module:Class")
        add(f"--option-{side}", **value, help="its option, a TOML value")
    most = "of two scores that count as equal (default: %(default)s)"
    add("--most-difference", type=Share, default=labels.MOST_DIFFERENCE, help=most)
    add("--deadline", **judging.DEADLINE)

    add = command("rows", "training rows of a process reward model", rows, seed, out)
    add("labelled", nargs="+", type=Path, help="labelled trajectories")
    add("--balance", action="store_true", help="as many rows of good steps as of bad ones")
    add("--most", type=Natural, default=0, help="rows to take at random (default: all)")

    add = command("train", "fine-tune a model on rows", training.train, seed, out)
    add("--model", required=True, help="a model folder, a built-in name or a hub id")
    add("--rows", required=True, type=Path, help="JSONL file of `rows`, or of your own")
    add("--epochs", type=Positive, default=3, help="passes over the rows (default: %(default)s)")
    add("--steps", type=Count, help="instead of epochs")
    add("--batch", type=Count, default=32, help="rows per step (default: %(default)s)")
    add("--lr", type=Positive, default=2e-5, help="peak learning rate (default: %(default)s)")
    add("--warmup-ratio", type=Discount, default=0.1, help="share of steps (default: %(default)s)")
    add("--lora-rank", type=Natural, default=0, help="0, the default, trains all weights")
    forward = "of one forward (default: %(default)s)"
    add("--forward-tokens", type=Natural, default=8192, help=forward)
    longest = "longer rows are left out and counted (default: the model's context)"
    add("--max-tokens", type=Count, help=longest)
    share = "share to measure on, in whole groups (default: %(default)s)"
    add("--held-out", type=Discount, default=0.1, help=share)
    end = "add the model's end token to completions (actions of a policy need none)"
    add("--end-token", action=argparse.BooleanOptionalAction, default=True, help=end)
    threads = "compute threads (default: all, %(default)s)"
    add("--threads", type=Count, default=cores(), help=threads)

    add = command("warm-start", "the warm start of a run's policy", training.warm_start, out)
    add("--config", required=True, type=Path, help="TOML file of the run to come")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key; repeatable")
    return parser


def check_files(out: Path, inputs: Sequence[Path], also: Sequence[Path] = ()) -> None:
    """Raises ValueError if an output is an input or lies in an input folder, or cannot be written.
    also: what is written with --out."""
    for path in (out, *also):
        flag = f"--out {path}" if path == out else f"--out {out}, written with {path},"
        if not path.parent.is_dir():
            raise ValueError(f"{flag}: there is no folder {path.parent}, make it first")
        if path.exists() and not path.is_file():
            raise ValueError(f"{flag} is no ordinary file: name a file")
        try:
            draft_of(path).touch()
            draft_of(path).unlink()
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
            raise ValueError(f"{flag} {problem}: name another file") from None
        for read in inputs:
            if path.resolve().is_relative_to(read.resolve()):
                conflict = f"{'lies in' if read.is_dir() else 'would write over'} {read}"
                raise ValueError(f"{flag} {conflict}, which this command reads: name another file")


def collect(options: argparse.Namespace) -> None:
    from coppice.tools.finetuning.collecting import collect_all, task_files  # import environments

    tasks = [path for folder in options.runs for path in task_files(folder)]
    check_files(options.out, [*options.runs, *tasks])
    trajectories, skipped = collect_all(options.runs, options.split, options.prefix)
    records.write(options.out, trajectories)
    steps = sum(len(one.steps) for one in trajectories)
    right = f"{sum(one.outcome for one in trajectories)} with a correct answer"
    print(f"{len(trajectories)} trajectories ({right}), {steps} turns to judge, in {options.out}")
    say("skipped", skipped)


def marked(options: argparse.Namespace) -> None:
    check_files(options.out, options.runs)
    rows, left_out = marked_rows(options.runs, options.marks)
    records.write(options.out, rows)
    print(f"{len(rows)} rows in {options.out}")
    say("left out", left_out)


def label(options: argparse.Namespace) -> int:
    """Read trajectories; write labelled ones, with the judges' answers beside them. Returns the
    exit status."""
    out, most, read = options.out, options.most_difference, options.trajectories
    answered, settings_file, lock = (
        out.parent / f"{out.stem}.answers.{kind}" for kind in ("jsonl", "json", "lock")
    )
    check_files(out, [read], [answered, settings_file, lock])
    trajectories = records.read([read], Trajectory[RecordedStep])
    judges = [
        judging.JudgeSpec("a", options.judge_a, dict(map(option, options.option_a))),
        judging.JudgeSpec("b", options.judge_b, dict(map(option, options.option_b))),
    ]
    settings = labels.LabelSettings(file_digest(read, False)[:16], judging.lasting(judges))
    with locked(lock, f"--out {out} {IN_USE}"):
        keep(settings_file, settings, str(settings_file))
        work = partial(judging.ask_all, judges, trajectories, answered, options.deadline)
        kept = f"answered (in {answered})"
        answers = conduct(work, "the same command", kept, "coppice sft label")
        if isinstance(answers, int):
            return answers
        steps, counts = labels.labelled(trajectories, answers, most)
        if not steps:
            raise ValueError(f"no step is left: {dict(counts)}")
        records.write(out, steps)
    print(f"{len(steps)} trajectories in {out}")
    say("steps", counts)
    return 0


def rows(options: argparse.Namespace) -> None:
    check_files(options.out, options.labelled)
    labelled = records.read(options.labelled, Trajectory[Labelled])
    made, left_out = labels.judgement_rows(labelled, options.most, options.seed, options.balance)
    if not made:
        remedy = "label with judges that explain"
        raise ValueError(f"no row can be made; left out: {dict(left_out)} ({remedy})")
    records.write(options.out, made)
    print(f"{len(made)} rows in {options.out}")
    say("left out", left_out)


def say(heading: str, counts: Mapping[str, int]) -> None:
    """Print counts by reason, the largest first."""
    for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"  {heading}: {count} {reason}")
