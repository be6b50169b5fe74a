"""The wheel, in an environment that has its dependencies and no checkout."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.forks import ROOT

GAME = "launch --config vpr-tictactoe-cpu.toml --actors 1 --learner 1".split()
SMALL = "warm_start.steps=0 scheduler.updates=1 scheduler.questions_per_update=2".split()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site-packages of an environment in which the wheel was installed."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), str(ROOT)], check=True)
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (site,) = (venv / "lib").glob("python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    install = f"--python {venv} install --no-deps --no-index --ignore-installed".split()
    subprocess.run([*pip, *install, str(wheel)], check=True)
    gained = {path.name for path in site.iterdir() if path.suffix != ".dist-info"}
    assert gained == {"coppice"}
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return site


def coppice(site: Path, folder: Path, *arguments: str) -> str:
    """What the installed command says in a folder."""
    shell = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shell |= {"COPPICE_CACHE": os.environ.get("COPPICE_CACHE", str(ROOT / ".cache"))}
    command = [str(site.parents[2] / "bin" / "coppice"), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=shell, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command_plans_a_run_of_a_config_inside_the_wheel(site: Path, tmp_path: Path) -> None:
    assert "learner" in coppice(site, tmp_path, *GAME, "--dry-run")


@pytest.mark.long  # a rehearsal of the first run after a release
def test_the_command_trains_from_an_empty_folder(site: Path, tmp_path: Path) -> None:
    coppice(site, tmp_path, *GAME, *SMALL, "scheduler.evaluation.questions=0")
    (run,) = (tmp_path / "runs").iterdir()
    assert "groups trained: " in coppice(site, tmp_path, "trees", str(run))
