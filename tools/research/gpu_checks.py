"""The checks of tools/gpu_check: one after the other, each with a time limit of its own, and a record of them with versions.

A check that hangs is asked to end, then killed with all its descendants, and fails by its name; those after it run. All of them end
within ``WHOLE_S``: a check that would begin later is not run, and one that is running then has hung.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from tools.bootstrap import ROOT

WHOLE_S = 570.0
"""Of all checks, so that ten minutes are enough with what a hanging one takes to end."""
GRACE_S = 15.0
"""After an interrupt: an actor gives its SGLang server 7 s to end."""
BEGIN, END = "<!-- tools/gpu_check writes from here -->", "<!-- to here -->"
_CONTRACT = ("engine_contract", "one_policy_two_engines", "sglang_weights")


class Check(msgspec.Struct, frozen=True):
    """name: by which it is asked for. module: what Python runs with -m, and its arguments. limit_s: of the check alone."""

    name: str
    module: list[str]
    limit_s: float
    sglang: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """failure: "" for a check that passed. output: all that it printed."""

    name: str
    seconds: float
    failure: str = ""
    output: str = ""


CHECKS = [
    Check("engine-and-learner", ["pytest", "-q", "tests/actors/test_local_engine.py", "tests/gpu"], 120),
    Check("tree-training", ["tools.research.benches.gpu_tree_training"], 90),
    Check("contract", ["pytest", "-q", *(f"tests/actors/test_{name}.py" for name in _CONTRACT)], 180, True),
    Check("speed-7b", ["tools.research.benches.gpu_sglang", "--size", "7b"], 240, True),
    Check("updates-0.5b", ["tools.research.benches.gpu_updates", "--size", "0.5b"], 90, True),
    Check("updates-3b", ["tools.research.benches.gpu_updates", "--size", "3b"], 120, True),
    # Merging 7B on the actor's CPU takes as long as the other transports together.
    Check("updates-7b", ["tools.research.benches.gpu_updates", "--size", "7b", "--without", "merged"], 150, True),
]  # fmt: skip
"""The limits are about twice the estimates of docs/gpu.md."""


# ---------------------------------------------------------------------------------------------- running


def run_all(checks: Sequence[Check], whole_s: float = WHOLE_S) -> list[Outcome]:
    """The outcomes in order; what the checks print, and their seconds, are printed meanwhile."""
    end, outcomes = time.monotonic() + whole_s, []
    for check in checks:
        print(f"== {check.name}", flush=True)
        left = end - time.monotonic()
        if left <= 0:
            outcome = Outcome(
                check.name, 0.0, f"not run: {whole_s:g} s were over; tools/gpu_check {check.name} runs it alone"
            )
        else:
            outcome = run(check, min(check.limit_s, left))
        print(f"== {check.name}: {outcome.failure or 'passed'}, {outcome.seconds:.1f} s", flush=True)
        outcomes.append(outcome)
    return outcomes


def run(check: Check, limit_s: float) -> Outcome:
    """One check, for at most ``limit_s`` and the time that it takes to end after that."""
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *check.module], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    said: list[str] = []
    reading = threading.Thread(target=_echo, args=(process, said), daemon=True)
    reading.start()
    try:
        status = process.wait(limit_s)
        failure = f"failed (status {status})" if status else ""
    except subprocess.TimeoutExpired:
        failure = f"did not end within {limit_s:.0f} s"
    finally:
        _end(process)
    reading.join(GRACE_S)  # it ends with the last process that could still write
    return Outcome(check.name, time.monotonic() - start, failure, "".join(said))


def _echo(process: "subprocess.Popen[str]", said: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        print(line, end="", flush=True)


def _end(process: "subprocess.Popen[str]") -> None:
    """Interrupt it, so that it ends its servers and gives their memory back; then kill it and whatever it had started."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)  # servers have sessions of their own
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    for one in [*family, process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()  # not of another process that has its number now: both look
    process.wait()


# ---------------------------------------------------------------------------------------------- the record


def versions(python: str, run_sglang: bool) -> dict[str, str]:
    """Of what the numbers depend on. python: the interpreter that has SGLang."""
    import torch
    import transformers

    driver = _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).splitlines()
    found = {
        "GPU": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "none",
        "driver": driver[0] if driver else "unknown",
        "Python": sys.version.split()[0],
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "transformers": transformers.__version__,
        "commit": _said(["git", "-C", str(ROOT), "describe", "--always", "--dirty"]) or "unknown",
    }
    if run_sglang:
        wanted = ("sglang", "torch", "transformers")
        ask = f"import importlib.metadata as m; print(*(m.version(name) for name in {wanted!r}))"
        told = _said([python, "-c", ask]).split() or ["unknown"] * len(wanted)
        found |= dict(zip(("sglang", "its torch", "its transformers"), told, strict=True))
    return found


def _said(command: list[str]) -> str:
    """What a command printed, "" where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def section(outcomes: Sequence[Outcome], found: dict[str, str], when: datetime.datetime) -> str:
    """What happened, in Markdown: versions, seconds, and what each check printed as JSON (all parts of one that failed)."""
    lines = [
        f"`tools/gpu_check`, {when:%Y-%m-%d %H:%M} UTC: " + ", ".join(f"{k} {v}" for k, v in found.items()) + ".",
        "",
    ]
    lines += ["| check | seconds | |", "|---|---|---|"]
    lines += [f"| {one.name} | {one.seconds:.1f} | {one.failure or 'passed'} |" for one in outcomes]
    for one in outcomes:
        told = objects(one.output)
        if told or one.failure:
            shown = [json.dumps(value) for value in (told if one.failure else told[-1:])]
            last = one.output.strip().splitlines()[-5:] if one.failure else []
            lines += ["", f"{one.name}:", "", "```", *shown, *last, "```"]
    return "\n".join(lines) + "\n"


def objects(output: str) -> list[Any]:
    """The JSON objects in an output that begin a line, in order."""
    found, decoder, lines = [], json.JSONDecoder(), output.splitlines(keepends=True)
    place, skip = 0, 0
    for line in lines:
        if line.startswith("{") and place >= skip:
            try:
                value, skip = decoder.raw_decode(output, place)
                found.append(value)
            except ValueError:
                pass  # a line of something else that begins so
        place += len(line)
    return found


def around(path: Path) -> tuple[str, str]:
    """What stands in a file up to the first mark and from the second. Raises ValueError when it has not each of them once, in order."""
    whole = path.read_text()
    before, begun, rest = whole.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended or whole.count(BEGIN) > 1 or whole.count(END) > 1:
        raise ValueError(
            f"{path}: expected the lines {BEGIN!r} and {END!r} once each, in this order: put them where the record shall stand"
        )
    return before + BEGIN, END + after


def record(path: Path, text: str) -> None:
    """Put ``text`` between the marks of a file."""
    before, after = around(path)
    path.write_text(f"{before}\n\n{text}\n{after}")


# ---------------------------------------------------------------------------------------------- the command


def chosen(names: Sequence[str], sglang: bool) -> list[Check]:
    """The checks to run; without names, all that can run. Raises ValueError for a name that is none, or that needs SGLang."""
    possible = {check.name: check for check in CHECKS if sglang or not check.sglang}
    if unknown := [name for name in names if name not in possible]:
        raise ValueError(
            f"{unknown}: expected names of {list(possible)}"
            + ("" if sglang else "; those of SGLang need the sglang extra, or COPPICE_SGLANG_PYTHON")
        )
    return [possible[name] for name in names] or list(possible.values())


def main(arguments: list[str] | None = None) -> int:
    """Run the checks; 0 when all passed."""
    import torch

    parser = argparse.ArgumentParser(
        prog="tools/gpu_check", description="Every GPU check of the project, with time limits."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(c.name for c in CHECKS)}; default all")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="replace the marked section of FILE (docs/gpu.md); else it is printed",
    )
    options = parser.parse_args(arguments)
    python = os.environ.get("COPPICE_SGLANG_PYTHON", "")
    sglang = bool(python) or importlib.util.find_spec("sglang") is not None
    try:
        checks = chosen(options.names, sglang)
        if options.record is not None:
            around(options.record)  # refused before the GPU is used
    except (OSError, ValueError) as error:
        print(f"tools/gpu_check: {error}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("tools/gpu_check: no CUDA device here; what can run on a CPU runs in tools/test", file=sys.stderr)
        return 2
    found = versions(python or sys.executable, sglang)
    print(", ".join(f"{name} {version}" for name, version in found.items()), flush=True)
    if not sglang:
        print("SGLang is not checked: install the sglang extra, or set COPPICE_SGLANG_PYTHON", flush=True)
    outcomes = run_all(checks)
    text = section(outcomes, found, datetime.datetime.now(datetime.UTC))
    if options.record is not None:
        record(options.record, text)
    else:
        print(text)
    failed = [one.name for one in outcomes if one.failure]
    print(f"failed: {', '.join(failed)}" if failed else "all passed", flush=True)
    return int(bool(failed))
