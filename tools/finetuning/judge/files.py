"""The files of a command of tools/sft, checked before its work: it writes over none that it reads, and what it will write can be."""

import argparse
from pathlib import Path

from wire.atomic import draft_of


def check(given: argparse.Namespace) -> None:
    """Raises ValueError for a file to write that is or lies in one to read, is another one to write, or cannot be written."""
    for flag in ("out", "review")[: 1 + (given.command == "label")]:
        _check_writable(f"--{flag}", getattr(given, flag))
    written = outputs(given)
    for flag, path in written:
        for read in inputs(given):
            if path.resolve().is_relative_to(read.resolve()):
                what = "lies in" if read.is_dir() else "would write over"
                raise ValueError(f"{flag} {path} {what} {read}, which this command reads: name another file")
    for number, (flag, path) in enumerate(written):
        for other, earlier in written[:number]:
            if path.resolve() == earlier.resolve():
                raise ValueError(f"{flag} {path} is {other} too: name two files")


def inputs(given: argparse.Namespace) -> list[Path]:
    """What the command reads: files, and folders with all that is in them."""
    if given.command == "collect":
        from tools.finetuning.judge.collect import task_files  # which imports the environments

        return [*given.runs, *(path for folder in given.runs for path in task_files(folder))]
    if given.command == "label":
        return [given.trajectories]
    if given.command == "review":
        return [given.labelled, given.review]
    return [*given.labelled, *getattr(given, "exclude", [])]


def outputs(given: argparse.Namespace) -> list[tuple[str, Path]]:
    """What the command writes, each with the option that names it, --out first."""
    made = [("--out", given.out)]
    if given.command == "label":
        made += [("--out with its answers", path) for path in answers_of(given.out)]
        made.append(("--review", given.review))
    if given.command == "bench":
        made.append(("--out with its report", report_of(given.out)))
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
