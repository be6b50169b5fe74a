"""The wheel, in an environment that has its dependencies and no checkout."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = "scheduler.updates=2 scheduler.evaluation.questions=4".split()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site-packages of an environment in which the wheel was installed."""
    folder = tmp_path_factory.mktemp("wheel")
    build = "-m pip wheel -q --no-deps --disable-pip-version-check -w".split()
    subprocess.run([sys.executable, *build, str(folder), str(ROOT)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    before = {path.name for path in site.iterdir()}
    (wheel,) = folder.glob("*.whl")
    pip = "install -q --no-deps --no-index --ignore-installed".split()
    subprocess.run([str(folder / "venv" / "bin" / "pip"), *pip, str(wheel)], check=True)
    gained = {path.name for path in site.iterdir()} - before
    assert {name for name in gained if not name.endswith(".dist-info")} == {"coppice"}
    return site


def test_the_command_trains_from_an_empty_folder(site: Path, tmp_path: Path) -> None:
    command = site.parents[2] / "bin" / "coppice"
    shell = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shell |= {"COPPICE_CACHE": os.environ.get("COPPICE_CACHE", str(ROOT / ".cache"))}
    launch = [str(command), "launch", "--actors", "1", "--learner", "1", *SMALL]
    done = subprocess.run(
        launch, cwd=tmp_path, env=shell, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    trees = [str(command), "trees", str(run)]
    shown = subprocess.run(
        trees, cwd=tmp_path, env=shell, check=True, capture_output=True, text=True
    )
    assert "Question" in shown.stdout or "?" in shown.stdout
    plan = [str(command), "launch", "--config", "ppr-cpu.toml", "--dry-run"]
    assert subprocess.run(plan, cwd=tmp_path, env=shell, check=False).returncode == 0
