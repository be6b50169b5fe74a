"""The runner of the GPU checks: one that hangs or fails is named, and the others run."""

import json
import os
from pathlib import Path

import psutil
import pytest

from coppice.research import gpu_checks
from coppice.research.gpu_checks import Check
from tests.tools.said import Patch

HANGS = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleeps, start_new_session=True).pid, flush=True)
time.sleep(600)
"""
POLITE = """
import time
print("begun", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("ended its servers", flush=True)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: Patch) -> None:
    passes, fails = "print('{\"a\": 1}')", "print('no CUDA'); raise SystemExit(3)"
    sources = {"hangs": HANGS, "polite": POLITE, "fails": fails, "passes": passes}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def goes_on(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.second
@pytest.mark.usefixtures("modules")
def test_a_check_that_fails_or_hangs_is_named_and_the_rest_runs(monkeypatch: Patch) -> None:
    monkeypatch.setattr(gpu_checks, "GRACE_S", 0.5)
    limits = {"slow": ("hangs", 3.0), "broken": ("fails", 60.0), "good": ("passes", 60.0)}
    checks = [Check(name, [module], limit) for name, (module, limit) in limits.items()]
    slow, broken, good = gpu_checks.run_all(checks)
    assert slow.failure == "did not end within 3 s"
    assert 3.0 <= slow.seconds < 20.0
    assert not goes_on(int(slow.output)), "what a hanging check had started goes on"
    assert (broken.failure, broken.output) == ("failed (status 3)", "no CUDA\n")
    assert (good.failure, good.output) == ("", '{"a": 1}\n')


@pytest.mark.second
@pytest.mark.usefixtures("modules")
def test_when_the_time_is_up_a_check_may_end_what_it_began_and_the_rest_is_not_run() -> None:
    checks = [Check("long", ["polite"], 60.0), Check("good", ["passes"], 60.0)]
    long, good = gpu_checks.run_all(checks, whole_s=3.0)
    assert (long.failure, long.output) == ("did not end within 3 s", "begun\nended its servers\n")
    assert (good.failure.split(";")[0], good.output) == ("not run: 3 s were over", "")


@pytest.mark.second
@pytest.mark.usefixtures("modules")
def test_a_report_holds_all_that_somebody_else_needs_and_nothing_private(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    told = tmp_path / "gpu.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "talks.py").write_text(
        "for i in range(100): print(i)\nprint(__file__)\nprint('{\"a\": 1}')\nraise SystemExit(3)"
    )
    checks = [Check("talk", ["talks"], 20.0), Check("good", ["passes"], 20.0)]
    monkeypatch.setattr(gpu_checks, "CHECKS", checks)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu_checks, "versions", lambda *_: {"GPU": "1 x H200", "torch": "2.14.1"})
    assert gpu_checks.main(["--report", str(told)]) == 1
    text = told.read_text()
    whole = json.loads(text)
    assert whole["versions"] == {"GPU": "1 x H200", "torch": "2.14.1"}
    talk, good = whole["checks"]
    assert (talk["result"], talk["measured"]) == ("failed (status 3)", [{"a": 1}])
    assert talk["last lines"][-2:] == ["HOME/talks.py", '{"a": 1}']
    assert (good["result"], good["measured"]) == ("passed", [{"a": 1}])
    assert str(tmp_path) not in text


def test_checks_are_chosen_by_name() -> None:
    names = [check.name for check in gpu_checks.CHECKS]
    assert [check.name for check in gpu_checks.chosen([], sglang=True)] == names
    with pytest.raises(ValueError, match=r"nonsense.*expected names of"):
        gpu_checks.chosen(["nonsense"], sglang=True)
    with pytest.raises(ValueError, match="COPPICE_SGLANG_PYTHON"):
        gpu_checks.chosen(["speed-7b"], sglang=False)


def test_an_exact_check_has_triton_in_float32(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "says.py").write_text("import os; print(os.environ.get('TRITON_F32_DEFAULT'))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    said = [
        gpu_checks.run(Check("says", ["says"], 20.0, exact=exact), 20.0).output.strip()
        for exact in (True, False)
    ]
    assert said == ["ieee", "None"]
    assert {check.name for check in gpu_checks.CHECKS if check.exact} == {
        "engine-and-learner", "contract"
    }  # fmt: skip
