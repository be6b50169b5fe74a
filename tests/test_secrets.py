"""A secret stays where it belongs: in the environment of the process that needs it, and a path in a
message inside the run."""

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from coppice.common.atomic import as_json
from coppice.tools.launching import config, processes
from coppice.tools.launching.children import Child
from coppice.tools.launching.settings import Assets
from coppice.wire.faults import InfrastructureFault
from coppice.wire.published import inside

SECRET = "planted-6f1c0b7e4d2a"
JUDGED = [
    'judges.use.slate.endpoint={ url = "http://h/v1", model = "m", api_key_env = "PLANTED_KEY" }',
    "judges.use.exact_match={}",
    "scheduler.judge=slate",
]


@pytest.mark.slow
def test_no_file_of_a_run_and_no_command_line_holds_a_secret_and_only_the_judges_get_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_KEY", SECRET)
    (tmp_path / "logs").mkdir()
    loaded = config.load(config.DEFAULT_CONFIG, JUDGED)
    made = processes.make(loaded, Assets("MODEL", "TRAIN", "HELDOUT", "INDEX"), tmp_path)
    (tmp_path / "config.json").write_bytes(as_json(loaded))
    monkeypatch.setattr(subprocess, "Popen", _Waiting)
    for spec in made:
        assert ("WANDB_API_KEY" in spec.withheld) == (spec.name != "scheduler")
        child = Child(spec, tmp_path)
        process = psutil.Process(child.process.pid)
        assert (SECRET in process.environ().values()) == (spec.name == "judges")
        assert not any(SECRET in word for word in process.cmdline())
        child.process.send_signal(signal.SIGKILL)
        child.process.wait()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in path.read_bytes() for path in files)


class _Waiting(subprocess.Popen):  # pyright: ignore[reportMissingTypeArgument]
    """Waits for its input instead of loading a model."""

    def __init__(self, command: list[str], **given: object):
        waiting = [command[0], "-c", "input()", *command[1:]]
        super().__init__(waiting, stdin=subprocess.PIPE, **given)  # pyright: ignore


def test_a_plain_key_is_no_setting_anywhere() -> None:
    for key in ("api_key", "key", "token"):
        overrides = [JUDGED[0].replace('api_key_env = "PLANTED_KEY"', f'{key} = "{SECRET}"')]
        overrides += JUDGED[1:]
        with pytest.raises(config.ConfigError, match=f"`{key}`|'{key}'") as error:
            config.load(config.DEFAULT_CONFIG, overrides)
        assert SECRET not in str(error.value)


def test_a_path_in_a_message_cannot_leave_the_run_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    good, link = run / "weights" / "v000003", run / "weights" / "link"
    beside = run / "weights-of-others"
    good.mkdir(parents=True)
    link.symlink_to("/etc")
    beside.mkdir()
    assert inside(run, str(good)) == str(good)
    inner = [good / ".." / ".." / ".." / "x", run / "weights", link / "ssh", link, run / "keys"]
    for path in ("/etc/passwd", "../x", "", *map(str, [*inner, beside])):
        with pytest.raises(InfrastructureFault, match="are refused: expected a folder inside"):
            inside(run, path)
