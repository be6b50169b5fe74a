"""The command coppice dev new: a folder with questions, passages, a config and a judge of one's
own, which runs as it is and whose files are there to be changed (docs/data.md)."""

import argparse
import shutil
from pathlib import Path

from coppice.common.options import command_parser, gave_up
from coppice.tools.bootstrap import ROOT
from coppice.tools.launching.config import ConfigError, load

TEMPLATE = ROOT / "examples" / "questions"
"""The files of a new project. Of the parts judge-NAME.toml, one ends the config."""
JUDGES = ("evidence", "llm", "outcome", "own")


def parser() -> argparse.ArgumentParser:
    what = "Make a folder that trains a policy on your questions and passages."
    parser = command_parser("coppice dev new", what, "  coppice dev new questions --judge llm")
    new = "the folder; its name becomes that of the runs"
    parser.add_argument("project", type=Path, metavar="PROJECT", help=new)
    parser.add_argument("--judge", choices=JUDGES, default=JUDGES[0], help="what pays the policy")
    return parser


def main(command: list[str] | None = None) -> int:
    options = parser().parse_args(command)
    project, config = options.project.resolve(), TEMPLATE / "config.toml"
    try:
        load(config, [f'name="{project.name}"'])  # refuses a name that no run can have
        if project.exists() and any(project.iterdir()):
            raise ConfigError(f"{project} is not empty: choose another folder")
        others = shutil.ignore_patterns("__pycache__", "judge-*.toml")
        shutil.copytree(TEMPLATE, project, ignore=others, dirs_exist_ok=True)
        text = config.read_text("utf-8").replace('"questions"', f'"{project.name}"')
        part = (TEMPLATE / f"judge-{options.judge}.toml").read_text("utf-8")
        (project / config.name).write_text(text + part, "utf-8")
    except (OSError, ConfigError) as error:
        return gave_up("coppice dev new", error)
    print((project / "README.md").read_text("utf-8"), end="")
    return 0
