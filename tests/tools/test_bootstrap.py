"""Every tool starts in the project's environment, whatever machine and shell it starts from."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coppice.tools import bootstrap
from coppice.tools.bootstrap import ROOT
from tests.tools.said import Patch

ONEDNN, LRU = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"


def started(*command: str | Path, **given: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, **given)


def test_every_process_inherits_the_limits_of_the_kernel_caches_and_the_users_own_values() -> None:
    show = f"import os; print(os.environ['{ONEDNN}'], os.environ['{LRU}'])"
    tool = (
        "import subprocess, sys; from coppice.tools.bootstrap import ensure; ensure();"
        f"subprocess.run([sys.executable, '-c', {show!r}])"
    )
    shell = os.environ | {LRU: "7", "COPPICE_VENV": sys.prefix}
    shell.pop(ONEDNN, None)
    assert started(sys.executable, "-c", tool, cwd=ROOT, env=shell).stdout == "32 7\n"


THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize("own", ["", "glibc.malloc.arena_max=2"])
def test_a_command_takes_large_pages_and_reuses_blocks_unless_the_user_says_otherwise(
    own: str,
) -> None:
    """Whether a block of 32 MB is in the heap, and Linux's flag "hg" of one of 1,200 MB, which is
    larger than a large page of any processor."""
    show = """if True:
        import ctypes, re
        from coppice.tools.bootstrap import ensure
        ensure()
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        small, large = (libc.malloc(ctypes.c_size_t(n << 20)) for n in (32, 1200))
        form = "(?ms)^([0-9a-f]+)-([0-9a-f]+) ([^\\n]*)(.*?)^VmFlags: ([^\\n]*)"
        maps = re.findall(form, open("/proc/self/smaps").read())
        def of(at): return next(m for m in maps if int(m[0], 16) <= at < int(m[1], 16))
        print("[heap]" in of(small)[2], "hg" in of(large)[4].split())
    """
    shell = os.environ | {"COPPICE_VENV": sys.prefix, "GLIBC_TUNABLES": own}
    if not own:
        del shell["GLIBC_TUNABLES"]
    done = started(sys.executable, "-c", show, cwd=ROOT, env=shell)
    lent = "[madvise]" in THP.read_text() if THP.exists() else False
    assert done.stdout == f"{not own} {lent and not own}\n", done.stderr


@pytest.mark.second
def test_a_tool_starts_where_python_does_not_put_a_scripts_folder_on_its_path() -> None:
    shell = os.environ | {"PYTHONSAFEPATH": "1", "COPPICE_VENV": sys.prefix}
    shell.pop("PYTHONPATH", None)
    done = started(ROOT / "tools" / "dump", "--help", cwd="/", env=shell)
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout


def test_a_help_installs_nothing(tmp_path: Path) -> None:
    shell = os.environ | {"COPPICE_VENV": str(tmp_path / "venv"), "PYTHONDONTWRITEBYTECODE": "1"}
    # -S: without the packages of this environment
    done = started(sys.executable, "-S", ROOT / "tools" / "launch", "--help", env=shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert "The options need the module" in done.stdout
    assert not any(tmp_path.iterdir())


def test_a_tool_starts_alike_with_a_closed_stdin_a_plain_ascii_shell_and_a_proxy() -> None:
    show = (
        "import os, sys; from coppice.tools.bootstrap import ensure; ensure();"
        "print(os.readlink('/proc/self/fd/0'), open(sys.argv[1]).read(),"
        " os.environ['no_proxy'], os.environ['NO_PROXY'])"
    )
    shell = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    shell |= {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    shell |= {"PYTHONIOENCODING": "ascii", "NO_PROXY": "inside.example"}
    shell |= {"COPPICE_VENV": sys.prefix, "COPPICE_EXTRA": "cpu"}
    with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write("0.8 ±0.1")
        file.flush()
        command = sys.executable, "-c", show, file.name
        done = started(*command, cwd=ROOT, env=shell, preexec_fn=lambda: os.close(0))
    direct = "inside.example,127.0.0.1,localhost"
    assert done.stdout == f"/dev/null 0.8 ?0.1 {direct} {direct}\n", done.stderr


def test_a_driver_alone_asks_for_no_gpu_packages(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert bootstrap._hardware({"cpu"}) == "cpu"
    assert bootstrap._hardware({"gpu"}) == "gpu"


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (".", "/bin/python leads to a Python that is gone: remove the environment (rm -r"),
        ("file/venv", "cannot be made: File exists; let COPPICE_VENV name a folder that you may"),
    ],
)
def test_an_environment_that_cannot_be_used_is_named(place: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(tmp_path / "removed")
    (tmp_path / ".coppice").write_text("cpu")
    (tmp_path / "file").touch()
    shell = os.environ | {"COPPICE_VENV": str(tmp_path / place)}
    assert told in started(sys.executable, ROOT / "tools" / "launch", env=shell).stderr


@contextlib.contextmanager
def set_up_at_its_pip(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Path, Path]]:
    """A set-up of the environment whose pip is at work: its process, the lock, and the pipe that
    ends the pip when something is written to it."""
    place, reached, go_on = folder / "venv", folder / "reached", folder / "go_on"
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "pip").touch()
    python = f"#!/bin/sh\necho reached > {reached}\nread line < {go_on}\n"
    (place / "bin" / "python").write_text(python)
    (place / "bin" / "python").chmod(0o755)
    for pipe in (reached, go_on):
        os.mkfifo(pipe)
    # a shell's background ignores SIGINT
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from coppice.tools.bootstrap import ensure; ensure()"
    )
    command, shell = [sys.executable, "-c", code], os.environ | {"COPPICE_VENV": str(place)}
    with subprocess.Popen(
        command, cwd=ROOT, env=shell, stderr=subprocess.PIPE, text=True
    ) as set_up:
        assert reached.read_text() == "reached\n"
        yield set_up, Path(f"{place}.lock"), go_on


def test_no_set_up_begins_before_the_pip_of_a_killed_one_ends(tmp_path: Path) -> None:
    with set_up_at_its_pip(tmp_path) as (set_up, path, go_on):
        set_up.kill()
        set_up.wait()
        with path.open("w") as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            go_on.write_text("go on\n")
            fcntl.flock(lock, fcntl.LOCK_EX)  # the pip has ended


def test_ctrl_c_during_the_set_up_says_that_the_next_start_goes_on(tmp_path: Path) -> None:
    with set_up_at_its_pip(tmp_path) as (set_up, _, _):
        set_up.send_signal(signal.SIGINT)
        _, said = set_up.communicate()
    assert set_up.returncode == 130
    assert said.endswith("stopped during set-up; the next start goes on where this one stopped\n")


def test_uv_is_told_the_settings_of_pip(tmp_path: Path) -> None:
    def installers(settings: str, exit_status: int = 0) -> list[list[str]]:
        """The commands for a Python whose ``pip config list`` prints ``settings``."""
        python = tmp_path / "python"
        lists = f"cat <<'END'\n{settings}\nEND\n"
        python.write_text(f'#!/bin/sh\n[ "$3" = config ] || exit {exit_status}\n{lists}')
        python.chmod(0o755)
        return bootstrap._installers(str(python), ["uv"])

    variable = ":env:.index-url='file:///d'"
    uv, pip = installers(f"{variable}\nglobal.index-url='file:///a'\nglobal.find-links='/b /c'")
    at = uv.index("--index-url")
    assert (uv.count("--index-url"), uv[at + 1]) == (1, "file:///d")
    assert [uv[at + 1] for at, word in enumerate(uv) if word == "--find-links"] == ["/b", "/c"]
    assert installers("global.only-binary=':all:'") == [pip]  # uv has another syntax for it
    assert installers(variable, exit_status=1) == [pip]  # no index has uv


def test_pip_installs_what_uv_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    fails, does = [sys.executable, "-c", "exit(3)"], [sys.executable, "-c", ""]
    bootstrap._run("installing", fails, does)
    assert capsys.readouterr().err == "  installing ...\n"
    with pytest.raises(SystemExit, match=r"installing failed \(exit 3\)"):
        bootstrap._run("installing", fails, fails)
