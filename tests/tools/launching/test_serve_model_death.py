"""A model server whose engine dies says why and ends with status 1, as coppice serve --model and in
a run."""

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from coppice.judges.config import JudgeModelConfig
from coppice.tools.launching.settings import JudgeModelProcess

pytestmark = pytest.mark.slow

DYING = """
import sys
from coppice.actors.engines.local import LocalEngine
from coppice.tools.launching import serve_model

def boom(*_):
    raise ERROR("boom")

LocalEngine._step = boom
"""
REASON = "the engine's thread has ended: KeyError('boom')"
ENOUGH_S = 60


@contextmanager
def server(last: str, *arguments: str, error: str = "KeyError") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", DYING.replace("ERROR", error) + last, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as made:
        try:
            yield made
        finally:
            made.kill()


def refusals(server: subprocess.Popen[str], requests: int) -> list[bytes]:
    """What is said to requests one after another, of which each must be refused with 503."""
    assert server.stdout is not None
    url = server.stdout.readline().split(" at ")[1].strip()
    said: list[bytes] = []
    for _ in range(requests):
        request = urllib.request.Request(f"{url}/completions", b'{"prompt": "a tree"}')
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=ENOUGH_S)
        said.append(refused.value.read())
        assert refused.value.code == 503
    return said


def last_words(server: subprocess.Popen[str]) -> str:
    """Ask for a completion, which must be refused with the reason; then the server must end by
    itself with status 1."""
    (said,) = refusals(server, 1)
    assert b"boom" in said
    _, errors = server.communicate(timeout=ENOUGH_S)
    assert server.returncode == 1
    assert errors.count("Traceback") == 1  # that of the engine's thread
    return errors.splitlines()[-1]


def test_serve_model_ends_with_the_third_step_in_a_row_that_fails_of_an_error_that_stays(
    llama: Path,
) -> None:
    options = ["--port", "0", "--threads", "1", "--kv-cache-gib", "0.01"]
    with server(
        "sys.exit(serve_model.main(sys.argv[1:]))", str(llama), *options, error="RuntimeError"
    ) as made:
        said = refusals(made, 3)
        assert [b"engine step failed: boom" in each for each in said] == [True, True, False]
        assert b"3 steps failed one after another" in said[2]
        _, errors = made.communicate(timeout=ENOUGH_S)
    assert made.returncode == 1
    steps = "3 steps failed one after another, the last with: boom"
    reason = f"the engine's thread has ended: RuntimeError('{steps}')"
    assert (
        errors.splitlines()[-1]
        == f"coppice serve --model: {reason}; its traceback is above. Start the server again"
    )


def test_the_judge_model_of_a_run_ends_with_status_1_so_that_the_launcher_starts_it_again(
    tmp_path: Path, llama: Path
) -> None:
    model = JudgeModelConfig(max_context=256, kv_cache_gib=0.01)
    file = tmp_path / "judge-model.json"
    file.write_bytes(
        msgspec.json.encode(JudgeModelProcess("judge-model", str(tmp_path), str(llama), 0, model))
    )
    with server("serve_model.in_a_run()", str(file)) as made:
        assert last_words(made) == f"judge-model: {REASON}"
