"""Dockerfile: its steps, run in a new Debian without a daemon."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from coppice.tools.launching import jobs
from coppice.tools.launching.settings import ClusterConfig
from tests.forks import ROOT

HOSTS = "etc/resolv.conf etc/hosts etc/pip.conf etc/xdg/pip usr/local/share/ca-certificates".split()
"""Where a machine says how it reaches the packages' indexes."""
TRIED = """
for shell in "bash -c" "bash -lc"; do $shell "which ray coppice"; done
coppice launch --config vpr-tictactoe-cpu.toml --cluster ray --dry-run > /dev/null
python -c "import ray.dashboard.optional_deps, torch"
touch /runs/mine /coppice/mine
"""


def steps() -> list[tuple[str, str]]:
    """The instructions and their arguments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line.partition(" ") for line in text.replace("\\\n", "").splitlines()]
    return [(word, " ".join(rest.split())) for word, _, rest in lines if word]


def inside(root: Path, command: str, user: str, variables: dict[str, str]) -> None:
    mounts = 'mount -t proc proc "$0/proc"; mount -t tmpfs shm "$0/dev/shm"'
    shell = f'{mounts}; exec chroot --userspec={user}:{user} "$0" bash -ec "$1"'
    apart = "unshare --mount --pid --fork --kill-child bash -ec".split()
    subprocess.run([*apart, shell, str(root), command], env=variables, check=True)


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("debootstrap") or os.geteuid() > 0, reason="debootstrap, root")
def test_its_steps_make_an_image_whose_user_has_ray_and_the_command() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (root := Path(folder)).chmod(0o755)  # the image's user looks for its shell there
        subprocess.run(["debootstrap", "--variant=minbase", "bookworm", folder], check=True)
        copied = [*HOSTS, os.environ.get("PIP_FIND_LINKS", "").lstrip("/")]
        there = [path for path in copied if path and (Path("/") / path).exists()]
        subprocess.run(["cp", "-rL", "--parents", *there, folder], cwd="/", check=True)
        variables = {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
        variables |= {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        variables |= {"HOME": "/root"}
        ignored = (ROOT / ".dockerignore").read_text().replace("**/", "").split()
        user = "0"
        for word, rest in steps():
            if word == "COPY":
                ignore = shutil.ignore_patterns(*ignored)
                shutil.copytree(ROOT, f"{folder}{rest.split()[1]}", symlinks=True, ignore=ignore)
            elif word == "RUN":
                inside(root, rest, user, variables)
            elif word == "USER":
                user = rest
            elif word in ("ARG", "ENV") and "=" in rest:
                pairs = (pair.split("=") for pair in rest.split())
                variables |= {k: v.replace("$PATH", variables["PATH"]) for k, v in pairs}
        inside(root, TRIED, user, variables | {"HOME": "/home/coppice"})
    assert (user, dict(steps())["WORKDIR"]) == (str(jobs.USER), ClusterConfig().folder)
