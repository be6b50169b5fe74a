"""The command coppice dev chaos: it strikes small runs with many faults, one after another, and
checks that nothing is lost (docs/reliability.md)."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from coppice.common.options import command_parser
from tests.chaos import plan

OWN = "COPPICE_CHAOS_MOUNTS"
"""Set once this command was started anew where it may mount a disk."""

EXAMPLES = """\
  coppice dev chaos --faults 1000 --seed 1          ten runs of 100 faults each
  coppice dev chaos --faults 20 --schedulers 2 --only journal checkpoint"""


def parser() -> argparse.ArgumentParser:
    what = "Strike a small run with faults, and check that nothing is lost."
    parser, default = command_parser("coppice dev chaos", what, EXAMPLES), "(default: %(default)s)"
    add = parser.add_argument
    add("--faults", type=int, default=100, help=f"how many faults {default}")
    add("--seed", type=int, default=0, help=f"decides all faults and their order {default}")
    out = "folder in which a run is kept that broke an invariant (default: a new one in /tmp)"
    add("--out", type=Path, help=out)
    add("--schedulers", type=int, default=1, help=f"how many schedulers each run has {default}")
    only = "these kinds of faults alone (default: all)"
    add("--only", nargs="+", choices=sorted(plan.KINDS), metavar="KIND", help=only)
    add("--list", action="store_true", help="print the kinds of faults and end")
    return parser


def arguments(options: list[str] | None) -> argparse.Namespace:
    command = parser()
    parsed = command.parse_args(options)
    if sys.platform != "linux":
        command.error(f"its faults need Linux, and this is {sys.platform}")
    if parsed.faults < 1:
        command.error(f"--faults {parsed.faults}: expected at least 1")
    if parsed.schedulers not in (1, 2):
        command.error(f"--schedulers {parsed.schedulers}: expected 1 or 2, for two actors")
    if (out := parsed.out) and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        command.error(f"--out {out}: expected a folder that is empty or not there")
    return parsed


def main(options: list[str] | None = None) -> int:
    given = arguments(options)
    if given.list:
        for name, kind in plan.KINDS.items():
            print(f"{name:<11} {kind.share:>3} of 100  {kind.text}; {', '.join(kind.places)}")
        return 0
    mounts = OWN in os.environ or _again()
    from tests.chaos.chapters import chaos
    from tests.forks import Server

    folder = given.out or Path(tempfile.mkdtemp(prefix="coppice-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    faults = plan.plan(given.seed, given.faults, given.only or list(plan.KINDS), given.schedulers)
    server = Server()
    try:
        broken = chaos(faults, folder.resolve(), server, mounts, given.schedulers)
    except KeyboardInterrupt:
        print(f"\nstopped; no process is left. {folder} holds what was written", file=sys.stderr)
        return 130
    finally:
        server.close()
    if not broken and given.out is None:
        shutil.rmtree(folder)
    return int(broken)


def _again() -> bool:
    """Start this command anew where it may mount a disk. Return False if the system forbids it."""
    own = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    trial = [*own, "true"]
    if shutil.which("unshare") and not subprocess.run(trial, capture_output=True).returncode:
        command = [*own, sys.executable, *sys.orig_argv[1:]]
        os.execvpe(own[0], command, os.environ | {OWN: "1"})
    return False
