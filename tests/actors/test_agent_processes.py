"""The processes of agents, as they are: what ends with an episode, what is kept of it, and what an
agent finds in its environment."""

import json
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from coppice.actors.environments.agents import episode
from coppice.actors.environments.agents.episode import TAIL, Ended, Episode, ForkServer
from tests.actors.conftest import Door

TASK = {"id": "t", "question": "1 + 1", "golds": ["2"], "seed": 0}
Play = Callable[..., Awaitable[Ended]]


@pytest.fixture
def play(door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Plays an episode of a command, or of a function with this body, that does not ask the
    policy."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    head = "import os, signal, subprocess, sys, time\n\ndef run(task):\n    "

    async def play(
        agent: str | list[str] | ForkServer, *, row: dict[str, Any] = TASK, **options: Any
    ) -> Ended:
        if isinstance(agent, str):
            (tmp_path / "agent_of_a_test.py").write_text(head + agent.replace("\n", "\n    "))
        name = "agent_of_a_test:run" if isinstance(agent, str) else ""
        server = agent
        if not isinstance(server, ForkServer):
            server = ForkServer([] if name else list(server), name, **options)
        episode = Episode(door.gateway, server, row, 20.0)
        try:
            await episode.start()
            event = await episode.next()
        finally:
            await episode.close()
            await server.close()
        assert isinstance(event, Ended)
        return event

    return play


DAEMON = """
ours, theirs = os.pipe()
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    os.write(theirs, str(os.getpid()).encode())
    time.sleep(600)
return int(os.read(ours, 20))
"""
NOHUP = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
return subprocess.Popen(["nohup", "sleep", "600"]).pid
"""


@pytest.mark.parametrize("agent", [NOHUP, DAEMON])
async def test_all_that_a_process_has_started_ends_with_it(play: Play, agent: str) -> None:
    end = await play(agent)
    assert end.fault == "" and end.reward is not None and end.reward > 1
    assert not psutil.pid_exists(int(end.reward)), "the agent's child has survived its episode"


async def test_a_process_gets_no_files_but_the_three(play: Play) -> None:
    listed = 'subprocess.check_output(["ls", "/proc/self/fd"], text=True, close_fds=False)'
    assert (await play(f"print({listed})")).said.split() == ["0", "1", "2", "3"]  # 3 is ls's own
    assert (await play(["sh", "-c", "ls /proc/$$/fd"])).said.split() == ["0", "1", "2"]


async def test_what_a_function_printed_is_kept_when_it_is_killed(play: Play) -> None:
    says = 'print("begun\\n" + "x" * 10_000 + "\\nthe last words")'
    end = await play(f"{says}\nos.kill(os.getpid(), signal.SIGKILL)")
    assert end.fault == "killed by SIGKILL" and end.error == "the last words"
    assert len(end.said) == TAIL


@pytest.mark.parametrize("answer", ["Paris", "42"])
async def test_a_reward_that_is_no_number_is_told_by_its_own_line(play: Play, answer: str) -> None:
    end = await play(f"return {answer!r}")
    said = f"ValueError: agent_of_a_test:run returned {answer!r}: expected a finite"
    assert end.fault == "exit status 1" and end.error.startswith(said)


async def test_a_printed_line_is_no_reward(play: Play) -> None:
    tee = "import io, sys\nsys.stdout = io.StringIO()\nreturn 0.5"
    assert (await play(tee)).reward == 0.5
    end = await play('print("\\0reward garbage")\nreturn 0.5')
    assert (end.reward, end.fault) == (0.5, "") and "reward garbage" in end.said


async def test_an_import_that_waits_for_ever_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode, "IMPORT_S", 1.0)
    monkeypatch.setattr(episode, "CLOSE_S", 0.1)
    installed = tmp_path / "site-packages"
    installed.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(installed))
    (installed / "agent_that_imports.py").write_text("import library_that_waits\n")
    (installed / "library_that_waits.py").write_text("import time\ntime.sleep(600)\n")
    server = ForkServer([], "agent_that_imports:run")
    with pytest.raises(OSError, match=r"no agent began in 1 s: does an import wait\?"):
        await server.start(b"{}", {}, 2**30)
    assert server._server is not None and server._server.returncode == -signal.SIGKILL


async def test_an_episode_has_a_folder_of_its_own_that_goes_with_it(play: Play) -> None:
    agent = (
        'open(os.environ["COPPICE_FOLDER"] + "/notes", "w")\nprint(os.environ["COPPICE_FOLDER"])'
    )
    places = [(await play(agent)).error for _ in range(2)]
    assert len(set(places)) == 2 and not any(Path(place).exists() for place in places)


async def test_variables_with_the_names_of_secrets_pass_by_name_alone(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = "API_KEY ACCESS_KEY_ID TOKEN DB_PASSWORD CREDENTIALS CLIENT_SECRET PGPASSWD".split()
    for name in [*secrets, "TOKENIZERS_PARALLELISM", "KEYBOARD", "OTHER_API_KEY"]:
        monkeypatch.setenv(f"MINE_{name}", "1")
    agent = 'print(*sorted(name for name in os.environ if name.startswith("MINE_")))'
    said = (await play(agent, pass_env=["MINE_OTHER_API_KEY"])).error
    assert said == "MINE_KEYBOARD MINE_OTHER_API_KEY MINE_TOKENIZERS_PARALLELISM"


async def test_a_function_runs_in_the_named_python(play: Play, tmp_path: Path) -> None:
    other = tmp_path / "venv"
    (other / "bin").mkdir(parents=True)
    (other / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (other / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    end = await play("print(sys.prefix)", python=str(other / "bin" / "python"))
    assert end.error == str(other)


async def test_a_task_that_no_variable_holds_is_in_stdin_alone(play: Play) -> None:
    agent, long = 'print(len(task["text"]), "COPPICE_TASK" in os.environ)', "x" * 300_000
    assert (await play(agent, row=TASK | {"text": long})).error == "300000 False"
    assert json.loads((await play(["cat"])).said) == TASK


async def test_a_command_that_is_not_there_is_refused_with_its_name(play: Play) -> None:
    with pytest.raises(FileNotFoundError, match="no program 'no-such-agent'"):
        await play(["no-such-agent"])


@pytest.mark.second
async def test_the_end_of_the_fork_server_ends_its_episodes(door: Door) -> None:
    server = ForkServer(["sleep", "600"])
    episode = Episode(door.gateway, server, TASK)
    await episode.start()
    (forks,) = [one for one in psutil.Process().children() if "runner" in " ".join(one.cmdline())]
    keepers = forks.children(recursive=True)
    forks.kill()
    assert keepers and not psutil.wait_procs(keepers, timeout=20)[1]
    await episode.close()
    await server.close()


HELPER = 'import os, sys\nSEEN = os.environ.get("COPPICE_FOLDER") or sys.exit("no episode")\n'


@pytest.mark.parametrize("own", ["helper_of_a_test.py", "package_of_a_test/__init__.py"])
async def test_an_agents_own_modules_are_imported_in_its_episode(
    play: Play, tmp_path: Path, own: str
) -> None:
    (tmp_path / own).parent.mkdir(exist_ok=True)
    (tmp_path / own).write_text(HELPER)
    agent = tmp_path / "package_of_a_test" / "main.py"
    if agent.parent.exists():
        module, body = "package_of_a_test.main", ""
    else:
        agent, module, body = (
            tmp_path / "agent_of_two.py",
            "agent_of_two",
            "import helper_of_a_test",
        )
    agent.write_text(f"{body}\ndef run(task):\n    return 1.0\n")
    assert (await play(ForkServer([], f"{module}:run"))).reward == 1.0


async def test_a_signal_without_a_name_is_told_by_its_number(play: Play) -> None:
    assert (await play("os.kill(os.getpid(), 40)")).fault == "killed by signal 40"
