"""Every tool starts in the project's environment, with limits on the kernels that its processes keep."""

import os
import subprocess
import sys

import pytest

from tools.bootstrap import ROOT

SHOW = "import os; print(os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'], os.environ['LRU_CACHE_CAPACITY'])"


def test_every_process_of_a_tool_inherits_the_limits_of_the_kernel_caches_and_the_users_own_values() -> None:
    tool = f"import subprocess, sys; from tools.bootstrap import ensure; ensure(); subprocess.run([sys.executable, '-c', {SHOW!r}])"
    shell = {name: value for name, value in os.environ.items() if name != "ONEDNN_PRIMITIVE_CACHE_CAPACITY"}
    shell |= {"LRU_CACHE_CAPACITY": "7", "COPPICE_VENV": sys.prefix}
    started = subprocess.run(
        [sys.executable, "-c", tool], cwd=ROOT, env=shell, capture_output=True, text=True, check=True
    )
    assert started.stdout == "32 7\n"


@pytest.mark.parametrize("tool", ["launch", "evaluate"])
def test_the_tools_start_where_python_does_not_put_a_scripts_folder_on_its_path(tool: str) -> None:
    shell = os.environ | {"PYTHONSAFEPATH": "1", "COPPICE_VENV": sys.prefix}
    shell.pop("PYTHONPATH", None)
    started = subprocess.run([str(ROOT / "tools" / tool), "--help"], cwd="/", env=shell, capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    assert "usage: " in started.stdout
