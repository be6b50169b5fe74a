"""coppice serve --model serves until it is interrupted, or says in one line why it does not."""

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest

from coppice.judges.config import JudgeModelConfig
from coppice.tools.launching.serve_model import main
from coppice.tools.launching.settings import JudgeModelProcess
from coppice.wire.sockets import is_loopback
from tests.tools.said import Said

pytestmark = pytest.mark.slow

START = "import sys; from coppice.tools.launching.serve_model import main; sys.exit(main())"
COMMAND = [sys.executable, "-c", START]
"""Without the set-up of the environment that coppice serve --model begins with."""


def started(*command: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_serves_at_the_address_it_prints_until_it_is_interrupted(llama: Path) -> None:
    with started(*COMMAND, llama, *"--port 0 --threads 1 --name tiny".split()) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.fullmatch(r"serving tiny at (http://127\.0\.0\.1:\d+/v1)\n", said)
            assert found, said
            with urllib.request.urlopen(f"{found[1]}/models") as answer:
                assert b'"tiny"' in answer.read()
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, rest) == (0, "")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nothing-of-this-name"], "smollm2-135m"),
        (["--host", "0.0.0.0"], "--api-key-env"),
        (["--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY: that variable is empty"),
    ],
)
def test_what_cannot_be_served_is_said(arguments: list[str], reason: str, said: Said) -> None:
    told = said(main, *arguments, status=1)
    assert reason in told and told.startswith("coppice serve --model: ")
    assert told.count("\n") == 1


def test_only_addresses_of_this_machine_need_no_key() -> None:
    own = ("127.0.0.1", "127.3.2.1", "::1", "localhost")
    others = ("0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "")
    assert all(is_loopback(f"tcp://{host}:0") for host in own)
    assert not any(is_loopback(f"tcp://{host}:0") for host in others)


DYING = """
from coppice.actors.engines.local import LocalEngine
from coppice.tools.launching import serve_model

def boom(*_):
    raise KeyError("boom")

LocalEngine._step = boom
serve_model.in_a_run()
"""


def test_a_server_ends_with_its_engine(tmp_path: Path, llama: Path) -> None:
    """In a run the launcher then starts it again."""
    model = JudgeModelConfig(max_context=256, kv_cache_gib=0.01)
    process = JudgeModelProcess("judge-model", str(tmp_path), str(llama), 0, model)
    (tmp_path / "file.json").write_bytes(msgspec.json.encode(process))
    with started(sys.executable, "-c", DYING, tmp_path / "file.json") as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split(" at ")[1].strip()
            request = urllib.request.Request(f"{url}/completions", b'{"prompt": "a tree"}')
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=60)
            assert refused.value.code == 503
            assert b"boom" in refused.value.read()
            _, errors = server.communicate(timeout=60)
        finally:
            server.kill()
    assert server.returncode == 1
    reason = "judge-model: the engine's thread has ended: KeyError('boom')"
    assert errors.splitlines()[-1].startswith(reason)
