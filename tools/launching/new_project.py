"""The command coppice dev new: a folder with questions, passages, a config and a judge of one's
own, which runs as it is and whose files are there to be changed (docs/data.md)."""

import argparse
import shutil
import sys
from pathlib import Path

from coppice.common.atomic import drafted
from coppice.common.options import command_parser
from coppice.tools.bootstrap import ROOT
from coppice.tools.launching.config import ConfigError, load

TEMPLATE = ROOT / "examples" / "questions"
"""The files of a new project. Of the parts judge-NAME.toml, one ends the config."""
_EXAMPLES = """\
  coppice dev new questions                  the rule judge, which reads evidence
  coppice dev new questions --judge llm      a language model as the judge
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice dev new."""
    what = "Make a folder that trains a policy on your questions and passages."
    parser = command_parser("coppice dev new", what, _EXAMPLES)
    new = "the folder; its name becomes that of the runs"
    parser.add_argument("project", type=Path, metavar="PROJECT", help=new)
    names = sorted(part.stem.partition("-")[2] for part in TEMPLATE.glob("judge-*.toml"))
    which = "what rewards the policy (default: evidence)"
    parser.add_argument("--judge", choices=names, default="evidence", help=which)
    return parser


def make(project: Path, judge: str) -> None:
    """Write the files of a new project whole. Raises OSError for a folder that is not empty or
    cannot be written, and ConfigError for a name that no run can have."""
    project, config = project.resolve(), TEMPLATE / "config.toml"
    load(config, [f'name="{project.name}"'])
    if project.exists() and not (project.is_dir() and not any(project.iterdir())):
        raise OSError(f"{project} is there and is no empty folder: choose another name")
    text = config.read_text("utf-8").replace('"questions"', f'"{project.name}"')
    others = shutil.ignore_patterns("__pycache__", "judge-*.toml")
    with drafted(project) as draft:
        shutil.copytree(TEMPLATE, draft, ignore=others, dirs_exist_ok=True)
        part = (TEMPLATE / f"judge-{judge}.toml").read_text("utf-8")
        (draft / config.name).write_text(text + part, "utf-8")


def main() -> int:
    """Run the command and return its exit status."""
    options = parser().parse_args()
    try:
        make(options.project, options.judge)
    except (OSError, ConfigError) as error:
        print(f"coppice dev new: {error}", file=sys.stderr)
        return 2
    print((options.project / "README.md").read_text("utf-8"), end="")
    return 0
