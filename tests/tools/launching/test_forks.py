"""Processes that are forks of a server: what they are, and that they end with their launcher."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

_LAUNCHER = """
import json, os, resource, sys, time
from pathlib import Path
from coppice.tools.launching import forks
forks.serve({"THEIR_KEY"})
log, own = Path(sys.argv[1]), {"OWN": "yes", "OMP_NUM_THREADS": "2"}
told = "tests.tools.launching.telling"
both = [forks.ForkedProcess(told, word, own, log, True) for word in ("it ends", "stays")]
words = [json.loads(one.stdout.readline()) | {"pid": one.pid} for one in both]
print(json.dumps(words), flush=True)
status = both[0].wait()
sys.stdin.readline()
both[1].send_signal(9)
both[1].wait()
os.kill(words[0]["server"][0], 9)
with_server = forks.ForkedProcess(told, "stays", own, log, True)
again = json.loads(with_server.stdout.readline())
os.kill(again["server"][0], 9)
lost = with_server.wait()
forks.end()
spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
kept = "THEIR_KEY" in again["server"][2] or again["server"][2]["OMP_NUM_THREADS"] != "1"
print(json.dumps([status, both[1].poll(), spent > 1.0, lost, kept]))
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_fork_is_as_started_anew_and_ends_with_its_launcher(killed: bool, tmp_path: Path) -> None:
    log = tmp_path / "log"
    shell = os.environ | {"THEIR_KEY": "secret", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", _LAUNCHER, str(log)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=shell, stdin=pipe, stdout=pipe, text=True) as launcher:
        assert launcher.stdin and launcher.stdout
        told = json.loads(launcher.stdout.readline())
        for one, word in zip(told, ("it ends", "stays"), strict=True):
            assert [w for w in one["words"] if w] == ["python", "-m", *one["argv"]]
            assert one["argv"] == ["tests.tools.launching.telling", word]
            assert one["environment"]["OWN"] == "yes"
            assert "THEIR_KEY" not in one["environment"] | one["server"][2]
            assert one["session"]
            assert one["torch"] == 2
            assert one["server"][1] == 1, "a fork has only the thread that forked"
        processes = []
        for pid in (told[1]["pid"], told[0]["server"][0]):
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append(psutil.Process(pid))
        assert len(processes) == 2
        if killed:
            launcher.kill()
        rest, _ = launcher.communicate("\n")
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
    assert rest == ("" if killed else "[7, -9, true, -9, false]\n")
    assert log.read_text() == "to the log\n" * (2 if killed else 3)
