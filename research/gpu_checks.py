"""The checks of coppice dev gpu-check run one after the other, each with its own time limit, and
are recorded with all versions.

A check that hangs is interrupted, then killed with all its descendants, and is reported as failed;
the checks after it still run. All checks end within ``WHOLE_S``: no check begins after that time,
and a check that is still running then counts as hung.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coppice.common.hardware import free_memory, gpu_software
from coppice.common.options import command_parser, gave_up
from coppice.tools.bootstrap import ROOT

WHOLE_S = 570.0
"""Seconds for all checks. Ten minutes are then enough, including the time that a hanging check
takes to end."""
GRACE_S = 15.0
"""Seconds that a check has to end after an interrupt. An actor gives its SGLang server 7 s to end.
"""
EXACT = {"TRITON_F32_DEFAULT": "ieee"}
"""Triton multiplies float32 in TF32 unless told otherwise, which is off by up to 5e-3."""
_EMBEDDED = "tests/actors/test_local_engine.py"
_CONTRACT = [
    f"tests/actors/test_{name}.py"
    for name in ("engine_contract", "one_policy_two_engines", "sglang_weights")
]


@dataclasses.dataclass(frozen=True)
class Check:
    """One check. name: its name on the command line. module: the module that ``python -m`` runs,
    and its arguments. limit_s: its time limit in seconds. sglang: the check needs SGLang. exact: it
    compares float32 numbers."""

    name: str
    module: list[str]
    limit_s: float
    sglang: bool = False
    exact: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one check. failure: "" if it passed. output: everything that it printed."""

    name: str
    seconds: float
    failure: str = ""
    output: str = ""


def _pytest(*files: str) -> list[str]:
    return ["pytest", "-q", *files]


def _bench(name: str, *arguments: str) -> list[str]:
    return [f"coppice.research.benches.{name}", *arguments]


CHECKS = [
    Check("engine-and-learner", _pytest(_EMBEDDED, "tests/gpu"), 120, exact=True),
    Check("tree-training", _bench("tree_training"), 90),
    Check("contract", _pytest("-k", "not vllm", *_CONTRACT), 180, sglang=True, exact=True),
    Check("speed-7b", _bench("gpu_sglang", "--size", "7b"), 240, sglang=True),
    Check("updates-0.5b", _bench("weight_update", "--size", "0.5b"), 90, sglang=True),
    Check("updates-3b", _bench("weight_update", "--size", "3b"), 120, sglang=True),
    Check("updates-7b", _bench("weight_update", "--size", "7b"), 150, sglang=True),
]
"""The limits are about twice the estimates of docs/gpu.md."""


# ------------------------------------------------------------------------------------------ running


def run_all(
    checks: Sequence[Check],
    whole_s: float = WHOLE_S,
    ended: Callable[[list[Outcome]], None] = lambda _: None,
) -> list[Outcome]:
    """Run the checks, show their output and seconds, and return the outcomes in order. ended: gets
    the outcomes so far after each check."""
    end, outcomes = time.monotonic() + whole_s, []
    for check in checks:
        print(f"== {check.name}", flush=True)
        left = end - time.monotonic()
        if left <= 0:
            alone = f"coppice dev gpu-check {check.name} runs it alone"
            outcome = Outcome(check.name, 0.0, f"not run: {whole_s:g} s were over; {alone}")
        else:
            outcome = run(check, min(check.limit_s, left))
        ending = outcome.failure or "passed"
        print(f"== {check.name}: {ending}, {outcome.seconds:.1f} s", flush=True)
        outcomes.append(outcome)
        ended(outcomes)
    return outcomes


def run(check: Check, limit_s: float) -> Outcome:
    """Run one check for at most ``limit_s`` seconds, plus the time that it takes to end."""
    start = time.monotonic()
    exact = EXACT if check.exact else {}
    process = subprocess.Popen(
        [sys.executable, "-m", *check.module], cwd=ROOT, env=os.environ | exact,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    printed: list[str] = []
    reading = threading.Thread(target=_echo, args=(process, printed), daemon=True)
    reading.start()
    try:
        status = process.wait(limit_s)
        failure = f"failed (status {status})" if status else ""
    except subprocess.TimeoutExpired:
        failure = f"did not end within {limit_s:.0f} s"
    finally:
        _end(process)
    reading.join(GRACE_S)  # the thread ends when no process is left that could write
    return Outcome(check.name, time.monotonic() - start, failure, "".join(printed))


def _echo(process: "subprocess.Popen[str]", printed: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        printed.append(line)
        print(line, end="", flush=True)


def _end(process: "subprocess.Popen[str]") -> None:
    """Interrupt a process, so that it ends its servers and frees their memory; then kill it and
    every process that it had started."""
    if process.poll() is not None:
        return
    import psutil  # not at the top: a Python without it prints the help

    # servers have sessions of their own
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    for one in [*family, process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()  # psutil and subprocess both refuse if another process has the number by now
    process.wait()


# --------------------------------------------------------------------------------------- the record


def versions(python: str, run_sglang: bool) -> dict[str, str]:
    """Return what the measured numbers depend on first. python: the interpreter that has SGLang."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    version_table = {
        "GPU": f"{torch.cuda.device_count()} x {gpu}", "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
    }  # fmt: skip
    if run_sglang:
        wanted = {"sglang": "sglang", "its torch": "torch", "its transformers": "transformers"}
        names = list(wanted.values())
        ask = f"import importlib.metadata as m; print(*(m.version(name) for name in {names}))"
        answer = _said([python, "-c", ask]).split() or ["unknown"] * len(wanted)
        version_table |= dict(zip(wanted, answer, strict=True))
    return version_table


def _said(command: list[str]) -> str:
    """Return what a command printed, or "" if the command fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


LAST_LINES = 80
"""Lines of a check's output in a report."""


def report(
    outcomes: Sequence[Outcome], version_table: dict[str, str], when: datetime.datetime
) -> str:
    """Return all that somebody else needs to judge the checks, as JSON. It names no folder of the
    user and no host."""
    from coppice.tools.launching.record import environment  # not at the top, as psutil

    columns = "index,name,memory.total,driver_version,compute_cap,ecc.mode.current,power.limit"
    machine = environment() | {
        "free memory, GiB": round(free_memory() / 2**30, 1),
        "GPUs": _said(["nvidia-smi", f"--query-gpu={columns}", "--format=csv"]).splitlines(),
        "links": _said(["nvidia-smi", "topo", "-m"]).splitlines(),
        "software": gpu_software(),
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    checks = [
        {
            "name": one.name, "seconds": round(one.seconds, 1), "result": one.failure or "passed",
            "measured": objects(one.output), "last lines": one.output.splitlines()[-LAST_LINES:],
        }
        for one in outcomes
    ]  # fmt: skip
    whole = {"report": "coppice dev gpu-check", "when": f"{when:%Y-%m-%d %H:%M} UTC"}
    whole |= {"versions": version_table, "machine": machine, "checks": checks}
    text = json.dumps(whole, indent=1)
    hidden = {str(ROOT): "COPPICE", str(Path.home()): "HOME", platform.node(): "HOST"}
    for private, name in hidden.items():
        text = text.replace(private, name) if len(private) > 1 else text
    return text + "\n"


def objects(output: str) -> list[Any]:
    """Return, in order, the JSON objects of an output, each of which is a line."""
    values = []
    for line in output.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                values.append(json.loads(line))
    return values


# -------------------------------------------------------------------------------------- the command


def chosen(names: Sequence[str], sglang: bool) -> list[Check]:
    """Return the checks to run: those named, or all that can run. Raises ValueError for a name that
    is unknown or needs missing SGLang."""
    possible = {check.name: check for check in CHECKS if sglang or not check.sglang}
    if unknown := [name for name in names if name not in possible]:
        remedy = "the checks of SGLang need the sglang extra, or COPPICE_SGLANG_PYTHON"
        told = f"{unknown}: expected names of {list(possible)}"
        raise ValueError(told if sglang else f"{told}; {remedy}")
    return [possible[name] for name in names] or list(possible.values())


EXAMPLES = """\
  coppice dev gpu-check                         everything that fits this GPU
  coppice dev gpu-check tree-training contract  two of them
  coppice dev gpu-check --report gpu.json       one file that can be sent"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice dev gpu-check."""
    what = "Run every check that needs a GPU, each with a time limit."
    parser = command_parser("coppice dev gpu-check", what, EXAMPLES)
    names = f"any of {', '.join(c.name for c in CHECKS)} (default: all)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    held = "also write machine, versions, results and last lines there, as JSON"
    parser.add_argument("--report", type=Path, metavar="FILE", help=held)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 0 if all checks passed."""
    options = parser().parse_args(arguments)
    import torch

    python = os.environ.get("COPPICE_SGLANG_PYTHON", "")
    sglang = bool(python) or importlib.util.find_spec("sglang") is not None
    try:
        checks = chosen(options.names, sglang)
    except ValueError as error:
        return gave_up("coppice dev gpu-check", error)
    version_table = versions(python or sys.executable, sglang)

    def ended(outcomes: list[Outcome]) -> None:
        if options.report:  # after each check: what ends the command leaves a report
            now = datetime.datetime.now(datetime.UTC)
            options.report.write_text(report(outcomes, version_table, now))

    ended([])
    if not torch.cuda.is_available():
        told = "no CUDA device here; what can run on a CPU runs in tools/test"
        return gave_up("coppice dev gpu-check", told)
    print(", ".join(f"{name} {version}" for name, version in version_table.items()), flush=True)
    if not sglang:
        remedy = "install the sglang extra, or set COPPICE_SGLANG_PYTHON"
        print(f"SGLang is not checked: {remedy}", flush=True)
    outcomes = run_all(checks, ended=ended)
    failed = [one.name for one in outcomes if one.failure]
    print(f"failed: {', '.join(failed)}" if failed else "all passed", flush=True)
    return int(bool(failed))
