"""The processes of agents, as they are: what ends with an episode, what is kept of it, and what an
agent finds in its environment."""

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from coppice.actors.environments.agents.episode import TAIL, Ended, Episode, ForkServer
from coppice.actors.environments.agents.gateway import Gateway

TASK = {"id": "t", "question": "1 + 1", "golds": ["2"], "seed": 0}
AGENTS = '''
import os, signal, subprocess, sys, time

def forked(task):
    return os.fork() or time.sleep(600)

def nohup(task):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return subprocess.Popen(["nohup", "sleep", "600"]).pid

def detached(task):
    return subprocess.Popen(["setsid", "sleep", "600"]).pid

def daemon(task):
    """Leaves a process whose parent has gone, with a session of its own, as a service does."""
    ours, theirs = os.pipe()
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        os.write(theirs, str(os.getpid()).encode())
        time.sleep(600)
    return int(os.read(ours, 20))

def printing(task):
    print("begun")
    print("x" * 10_000)
    print("the last words")
    os.kill(os.getpid(), signal.SIGKILL)

def files(task):
    listed = subprocess.check_output(["ls", "/proc/self/fd"], text=True, close_fds=False)
    return len(set(listed.split()) - {"0", "1", "2", "3"})

def folder(task):
    place = os.environ["COPPICE_FOLDER"]
    open(os.path.join(place, "notes"), "w").write("of this episode")
    print(place)

def variables(task):
    print(sorted(name for name in os.environ if name.startswith("MINE_")))

def python(task):
    print(sys.prefix)

def big(task):
    print(len(task["text"]), "COPPICE_TASK" in os.environ)

def text(task):
    return "Paris"

def number(task):
    return float("inf")
'''


@pytest_asyncio.fixture
async def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gateway]:
    (tmp_path / "agents_of_a_test.py").write_text(AGENTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    gateway = Gateway()
    await gateway.start()
    yield gateway
    await gateway.close()


async def ended(gateway: Gateway, server: ForkServer | str, **columns: Any) -> Ended:
    """Play an episode of a process that does not ask the policy."""
    server = ForkServer([], f"agents_of_a_test:{server}") if isinstance(server, str) else server
    episode = Episode(gateway, server, TASK | columns, 20.0)
    try:
        await episode.start()
        event = await episode.next()
    finally:
        await episode.close()
        await server.close()
    assert isinstance(event, Ended)
    return event


@pytest.mark.parametrize("name", ["forked", "nohup", "detached", "daemon"])
async def test_all_that_a_process_has_started_ends_with_it(gateway: Gateway, name: str) -> None:
    end = await ended(gateway, name)
    assert end.fault == "" and end.reward is not None and end.reward > 1
    assert not psutil.pid_exists(int(end.reward)), "the agent's child has survived its episode"


async def test_a_process_gets_no_files_but_the_three(gateway: Gateway) -> None:
    assert (await ended(gateway, "files")).reward == 0
    end = await ended(gateway, ForkServer(["sh", "-c", "ls /proc/$$/fd"]))
    assert end.said.split() == ["0", "1", "2"]


async def test_what_a_function_printed_is_kept_when_it_is_killed(gateway: Gateway) -> None:
    end = await ended(gateway, "printing")
    assert end.fault == "killed by SIGKILL" and end.error == "the last words"
    assert len(end.said) == TAIL


NODE = "x\n  at\nTypeError: bad\n    at b.js:2 {\n  code: 'E'\n}\n\nNode.js v20.1.0\n"
PYTHON = "Traceback (most recent call last):\n  File ...\n    x\nmine.Boom: one\ntwo\n"
ERRORS = [(NODE, "TypeError: bad"), (PYTHON, "mine.Boom: one"), ("", "")]


@pytest.mark.parametrize(("said", "error"), [*ERRORS, ("Error: tried again\nthe end", "the end")])
def test_the_error_of_an_episode_is_the_line_that_names_it(said: str, error: str) -> None:
    assert Ended(None, "exit status 1", said).error == error


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("text", "ValueError: agents_of_a_test:text returned 'Paris': expected a finite number"),
        ("number", "ValueError: agents_of_a_test:number returned 'inf': expected a finite number"),
        ("missing", "AttributeError: module 'agents_of_a_test' has no attribute 'missing'"),
    ],
)
async def test_a_fault_is_told_by_its_own_line(gateway: Gateway, name: str, error: str) -> None:
    end = await ended(gateway, name)
    assert end.fault == "exit status 1" and end.error.startswith(error)


async def test_an_episode_has_a_folder_of_its_own_that_goes_with_it(gateway: Gateway) -> None:
    places = [(await ended(gateway, "folder")).error for _ in range(2)]
    assert len(set(places)) == 2 and not any(Path(place).exists() for place in places)


async def test_variables_with_the_names_of_secrets_pass_by_name_alone(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = "API_KEY ACCESS_KEY_ID TOKEN DB_PASSWORD CREDENTIALS CLIENT_SECRET PGPASSWD".split()
    for name in [*secrets, "TOKENIZERS_PARALLELISM", "KEYBOARD", "OTHER_API_KEY"]:
        monkeypatch.setenv(f"MINE_{name}", "1")
    server = ForkServer([], "agents_of_a_test:variables", pass_env=["MINE_OTHER_API_KEY"])
    end = await ended(gateway, server)
    assert end.error == "['MINE_KEYBOARD', 'MINE_OTHER_API_KEY', 'MINE_TOKENIZERS_PARALLELISM']"


async def test_a_function_runs_in_the_named_python(gateway: Gateway, tmp_path: Path) -> None:
    other = tmp_path / "venv"
    (other / "bin").mkdir(parents=True)
    (other / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (other / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    server = ForkServer([], "agents_of_a_test:python", python=str(other / "bin" / "python"))
    assert (await ended(gateway, server)).error == str(other)


async def test_a_task_that_no_variable_holds_is_in_stdin_alone(gateway: Gateway) -> None:
    assert (await ended(gateway, "big", text="x" * 300_000)).error == "300000 False"
    end = await ended(gateway, ForkServer(["cat"]), text="small")
    assert json.loads(end.said) == TASK | {"text": "small"}


async def test_a_command_that_is_not_there_is_refused_with_its_name(gateway: Gateway) -> None:
    with pytest.raises(FileNotFoundError, match="no program 'no-such-agent'"):
        await ended(gateway, ForkServer(["no-such-agent"]))


@pytest.mark.second
async def test_the_end_of_the_fork_server_ends_its_episodes(gateway: Gateway) -> None:
    server = ForkServer(["sleep", "600"])
    episode = Episode(gateway, server, TASK)
    await episode.start()
    assert episode._process is not None and server._server is not None
    keeper = psutil.Process(episode._process.pid)
    server._server.kill()
    psutil.wait_procs([keeper], timeout=20)
    assert not keeper.is_running()
    await episode.close()
    await server.close()
