"""The command tools/test (also coppice dev test): ruff, pyright, the documentation as a site,
pytest. All of them run; the exit status is 1 if any failed.

Tests marked alone (tests/conftest.py) and named tests run one after the other, the others in
several processes, with pyright beside them. In a full run the numerical ones run again with kernels
for any processor: a bound that holds on one kind of machine only fails on every machine.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from coppice.common.options import command_parser
from coppice.tools.bootstrap import ROOT

EXAMPLES = """\
  tools/test --all                              with long ones, before a release
  tools/test --quick tests/learner -k critic    other options are pytest's"""
PLAIN_KERNELS = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}
"""Of torch itself and of the two libraries that multiply matrices for it."""
NUMERICAL = """
tests/learner/test_attention.py tests/learner/test_head.py tests/learner/test_updates.py
tests/actors/test_local_engine.py tests/actors/test_engine_contract.py
""".split()
"""What runs again with plain kernels; with --all, every test of the learner does."""
QUICK, ALL = "--quick", "--all"
PROCESSES = min(4, len(os.sched_getaffinity(0)))
"""Of pytest. Each holds torch, so more than four would need more memory than a laptop may have."""
_SIDE_BY_SIDE = ["-n", str(PROCESSES), "--dist", "worksteal"]


def steps(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Name -> Python module and its arguments, for each check; ``arguments`` are pytest's, QUICK
    and ALL."""
    given = [argument for argument in arguments if argument not in (QUICK, ALL)]
    checks = {
        "ruff check": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "pyright": ["pyright", "--pythonpath", sys.executable],
    }
    if QUICK in arguments:
        quick = ["pytest", "-m", "not slow and not second", *_SIDE_BY_SIDE, *given]
        return checks | {"pytest": quick}
    # --quiet would keep warnings from failing it
    checks["documentation"] = ["mkdocs", "build", "--strict"]
    if given:
        return checks | {"pytest": ["pytest", "--durations=30", *given]}
    short, numerical = " and not long", ["-m", "not long", *NUMERICAL]
    if ALL in arguments:
        short, numerical = "", ["tests/learner", *NUMERICAL]
    checks["pytest, alone"] = ["pytest", "--durations=60", "-m", f"alone{short}"]
    others = ["-m", f"not alone{short}", *_SIDE_BY_SIDE]
    checks["pytest"] = ["pytest", "--durations=20", *others]
    again = ["pytest", "-k", "not sglang and not vllm", *numerical, *_SIDE_BY_SIDE]
    return checks | {"pytest, plain kernels": again}


def parser() -> argparse.ArgumentParser:
    parser = command_parser("tools/test", "Lint, type-check and test the project.", EXAMPLES)
    quick = "leave out slow tests, the site, the second numerical run"
    parser.add_argument(QUICK, action="store_true", help=quick)
    parser.add_argument(ALL, action="store_true", help="run the tests that are marked long too")
    words = "only the tests whose names match, as all options of pytest"
    parser.add_argument("-k", metavar="WORDS", help=words)
    tests = "folders, files or single tests (default: tests)"
    parser.add_argument("tests", nargs="*", metavar="TESTS", help=tests)
    return parser


def main() -> int:
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        parser().print_help()
        return 0
    checks, failed = steps(arguments), list[str]()
    types = start("pyright", checks.pop("pyright"), subprocess.PIPE)
    for name, command in checks.items():
        failed += finish(name, start(name, command))
    failed += finish("pyright", types)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def start(name: str, command: list[str], output: int | None = None) -> subprocess.Popen[str]:
    # an advertisement, on every build
    more = (PLAIN_KERNELS if "plain" in name else {}) | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, env=os.environ | more, stdout=output, text=True
    )


def finish(name: str, check: subprocess.Popen[str]) -> list[str]:
    """Wait for a started check and say how long that took; [name] if it failed, else []."""
    print(f"== {name}", flush=True)
    begun = time.monotonic()
    output, _ = check.communicate()
    print(f"{output or ''}   {name}: {time.monotonic() - begun:.0f} s", flush=True)
    return [name] if check.returncode else []
