"""A secret stays where it belongs: in the environment of the process that needs it, and a path in a
message inside the run."""

import subprocess
import tomllib
from pathlib import Path

import msgspec
import psutil
import pytest

from coppice.common.atomic import as_json
from coppice.tools.launching import config, processes
from coppice.tools.launching.children import Child
from coppice.tools.launching.processes import PlannedProcess, key_variables
from coppice.tools.launching.settings import Assets
from coppice.wire.faults import InfrastructureFault
from coppice.wire.published import inside

ROOT = Path(__file__).parent.parent
SECRET = "planted-6f1c0b7e4d2a"
JUDGED = [
    'judges.use.slate.endpoint={ url = "http://h/v1", model = "m", api_key_env = "PLANTED_KEY" }',
    "judges.use.exact_match={}",
    "scheduler.judge=slate",
]


def plan(run: Path) -> list[PlannedProcess]:
    assets = Assets("MODEL", "TRAIN", "HELDOUT", "INDEX")
    return processes.make(config.load(config.DEFAULT_CONFIG, JUDGED), assets, run)


def holding(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.slow
def test_no_file_of_a_run_and_no_command_line_holds_a_secret_and_only_the_judges_get_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_KEY", SECRET)
    (tmp_path / "logs").mkdir()
    made = plan(tmp_path)
    (tmp_path / "config.json").write_bytes(as_json(config.load(config.DEFAULT_CONFIG, JUDGED)))
    monkeypatch.setattr(subprocess, "Popen", _Waiting)
    seen: dict[str, tuple[bool, bool]] = {}
    for spec in made:
        child = Child(spec, tmp_path)
        process = psutil.Process(child.process.pid)
        seen[spec.name] = (
            SECRET in process.environ().values(),
            any(SECRET in word for word in process.cmdline()),
        )
        child.process.kill()
        child.process.wait()
    assert [name for name, (in_environment, _) in seen.items() if in_environment] == ["judges"]
    assert not any(in_command for _, in_command in seen.values())
    assert holding(tmp_path) == []


class _Waiting(subprocess.Popen):  # pyright: ignore[reportMissingTypeArgument]
    """The same command line and environment, but the interpreter waits for its input instead of
    loading a model."""

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


def test_the_variables_that_hold_keys_are_found_at_any_depth() -> None:
    read = tomllib.loads(
        'a = [{ api_key_env = "X" }]\n[b.c]\napi_key_env = "Y"\n[d]\napi_key_env = ""'
    )
    assert key_variables(read) == {"X", "Y"}


def test_a_path_in_a_message_cannot_leave_the_run_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    good = run / "weights" / "v000003"
    good.mkdir(parents=True)
    (run / "weights" / "link").symlink_to("/etc")
    beside = run / "weights-of-others"
    beside.mkdir()
    assert inside(run, str(good)) == str(good)
    link = run / "weights" / "link"
    inner = [good / ".." / ".." / ".." / "x", run / "weights", link / "ssh", link, run / "keys"]
    for path in ("/etc/passwd", "../x", "", *map(str, [*inner, beside])):
        with pytest.raises(InfrastructureFault, match="are refused: expected a folder inside"):
            inside(run, path)


def test_the_keys_of_a_run_are_in_no_process_file_and_those_of_trackers_for_the_scheduler_alone(
    tmp_path: Path,
) -> None:
    made = plan(tmp_path)
    for spec in made:
        assert ("WANDB_API_KEY" in spec.withheld) == (spec.name != "scheduler")
    text = b"".join(path.read_bytes() for path in (tmp_path / "processes").iterdir()).decode()
    assert "secret" not in text
    assert not any("secret" in repr(msgspec.to_builtins(spec)) for spec in made)
