"""What every process of a run does first, and a function in a process of its own."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from coppice.common.process import FILES, Killed, in_subprocess


def _refuse(value: int) -> None:
    raise ValueError(f"{value}: expected less")


def _linger(mark: Path) -> None:
    try:
        mark.write_text(str(os.getpid()))
        time.sleep(120)
    finally:
        mark.with_name("cleaned").touch()


def test_it_answers_from_elsewhere_and_raises_what_the_function_raises() -> None:
    assert in_subprocess(os.getpid) != os.getpid()
    with pytest.raises(ValueError, match="7: expected less"):
        in_subprocess(_refuse, 7)


def test_a_process_that_is_killed_is_told_at_once() -> None:
    with pytest.raises(Killed):
        in_subprocess(signal.raise_signal, signal.SIGKILL)


def test_an_interruption_ends_it_after_its_own_cleaning_up(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def interrupt() -> None:
        while not (mark.exists() and mark.read_text()):
            time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    # a background job, such as a CI run may be, begins with SIGINT ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            in_subprocess(_linger, mark)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "cleaned").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


BEGUN = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
from coppice.common.process import begin
begin()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_process_may_open_as_many_files_as_the_system_grants() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    said = subprocess.check_output([sys.executable, "-c", BEGUN], text=True)
    assert said.split() == [str(most), str(hard)]


def test_a_process_that_native_code_ends_writes_where_it_was() -> None:
    code = "import os\nfrom coppice.common.process import begin\nbegin()\nos.abort()\n"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in ended.stderr and "line 4 in <module>" in ended.stderr
