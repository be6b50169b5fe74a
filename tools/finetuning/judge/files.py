"""Checks the files of a coppice sft command before its work: it overwrites none of its inputs, and
every output can be written."""

import argparse
from pathlib import Path

from coppice.common.atomic import draft_of


def check(options: argparse.Namespace) -> None:
    """Raises ValueError if an output is an input or lies in an input folder, if two outputs are one
    file, or if one cannot be written."""
    for flag in ("out", "review")[: 1 + (options.command == "label")]:
        _check_writable(f"--{flag}", getattr(options, flag))
    written = outputs(options)
    for flag, path in written:
        for read in inputs(options):
            if path.resolve().is_relative_to(read.resolve()):
                conflict = "lies in" if read.is_dir() else "would write over"
                raise ValueError(
                    f"{flag} {path} {conflict} {read}, which this command reads: name another file"
                )
    for number, (flag, path) in enumerate(written):
        for other, earlier in written[:number]:
            if path.resolve() == earlier.resolve():
                raise ValueError(f"{flag} {path} is {other} too: name two files")


def inputs(options: argparse.Namespace) -> list[Path]:
    """Return the files that the command reads, and the folders that it reads with all their
    contents."""
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


def outputs(options: argparse.Namespace) -> list[tuple[str, Path]]:
    """Return the files that the command writes, each with the option that names it, --out first."""
    named = [("--out", options.out)]
    if options.command == "label":
        named += [("--out with its answers", path) for path in answers_of(options.out)]
        named.append(("--review", options.review))
    if options.command == "bench":
        named.append(("--out with its report", report_of(options.out)))
    return named


def answers_of(out: Path) -> tuple[Path, Path, Path]:
    """Return the paths of the answers, the settings and the lock that ``label`` keeps beside
    ``out``."""
    answers, settings, lock = (
        out.with_suffix(f".answers.{kind}") for kind in ("jsonl", "json", "lock")
    )
    return answers, settings, lock


def report_of(out: Path) -> Path:
    """Return the path to which ``bench`` writes its report."""
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
