"""The files of a command of tools/sft, checked before its work: it writes over none that it reads, and what it will write can be."""

import argparse
from pathlib import Path

from tools.evaluating.judge_bench.record import draft_of


def check(options: argparse.Namespace) -> None:
    """Raises ValueError for a file to write that is or lies in one to read, is another one to write, or cannot be written."""
    for flag in ("out", "review")[: 1 + (options.command == "label")]:
        _check_writable(f"--{flag}", getattr(options, flag))
    written = outputs(options)
    for flag, path in written:
        for read in inputs(options):
            if path.resolve().is_relative_to(read.resolve()):
                what = "lies in" if read.is_dir() else "would write over"
                raise ValueError(f"{flag} {path} {what} {read}, which this command reads: name another file")
    for number, (flag, path) in enumerate(written):
        for other, earlier in written[:number]:
            if path.resolve() == earlier.resolve():
                raise ValueError(f"{flag} {path} is {other} too: name two files")


def inputs(options: argparse.Namespace) -> list[Path]:
    """What the command reads: files, and folders with all that is in them."""
    if options.command == "collect":
        from tools.finetuning.judge.collect import task_files  # which imports the environments

        return [*options.runs, *(path for folder in options.runs for path in task_files(folder))]
    if options.command == "label":
        return [options.trajectories]
    if options.command == "review":
        return [options.labelled, options.review]
    return [*options.labelled, *getattr(options, "exclude", [])]


def outputs(options: argparse.Namespace) -> list[tuple[str, Path]]:
    """What the command writes, each with the option that names it, --out first."""
    made = [("--out", options.out)]
    if options.command == "label":
        made += [("--out with its answers", path) for path in answers_of(options.out)]
        made.append(("--review", options.review))
    if options.command == "bench":
        made.append(("--out with its report", report_of(options.out)))
    return made


def answers_of(out: Path) -> tuple[Path, Path, Path]:
    """Where ``label`` keeps, beside ``out``: the answers, what they were asked with, the lock."""
    answers, settings, lock = (out.with_suffix(f".answers.{kind}") for kind in ("jsonl", "json", "lock"))
    return answers, settings, lock


def report_of(out: Path) -> Path:
    """Where ``bench`` writes its report."""
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
        raise ValueError(f"{flag} {path} cannot be written ({error.strerror}): name another file") from None
