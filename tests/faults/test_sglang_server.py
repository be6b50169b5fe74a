"""The SGLang server that an actor starts: what it says when it cannot start, and what happens when
it dies."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from coppice.actors.config import ActorsConfig, SGLangConfig
from coppice.actors.engines.sglang import SGLangEngine
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import GenerateRequest, Sampling
from tests.actors.test_local_engine import ids
from tests.sglang_cpu.shared import config


def engine(llama: Path, sglang: SGLangConfig) -> SGLangEngine:
    return SGLangEngine(str(llama), ActorsConfig(max_batch=8, max_context=512, sglang=sglang))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (SGLangConfig(python="/nowhere/python"), "actors.sglang.python = '/nowhere/python'"),
        (SGLangConfig(python="/bin/true"), "ended with status 0 while starting"),
        (SGLangConfig(way="url", urls=["http://127.0.0.1:9"]), "does not answer /health"),
    ],
)
async def test_what_cannot_start_says_why(llama: Path, settings: SGLangConfig, said: str) -> None:
    with pytest.raises((InfrastructureFault, ValueError), match=said):
        await engine(llama, settings).start()


async def test_the_users_shell_does_not_decide_which_logprobs_are_meant(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho original=$SGLANG_RETURN_ORIGINAL_LOGPROB\n")
    python.chmod(0o755)
    with pytest.raises(InfrastructureFault, match="original=0"):
        await engine(llama, SGLangConfig(python=str(python))).start()


async def test_an_argument_that_sglang_does_not_know_is_named(llama: Path) -> None:
    made = engine(llama, config(arguments={"nonsense": 1}))
    with pytest.raises(InfrastructureFault, match="nonsense"):
        await made.start()


async def test_the_death_of_its_scheduler_is_noticed_and_leaves_no_process(llama: Path) -> None:
    made = engine(llama, config())
    await made.start()
    server: Any = made.way
    children = psutil.Process(server._process.pid).children(recursive=True)
    gone = asyncio.create_task(made.died())
    running = asyncio.create_task(made.generate(GenerateRequest(ids(0, 8), 1, Sampling(400))))
    while not made.stats()["running"]:
        await asyncio.sleep(0.01)
    lines = {child.pid: " ".join([child.name(), *child.cmdline()]) for child in children}
    os.kill(next(pid for pid, line in lines.items() if "scheduler" in line), signal.SIGKILL)
    assert "SGLang server ended" in await asyncio.wait_for(gone, 90)
    with pytest.raises(InfrastructureFault):
        await asyncio.wait_for(running, 90)
    await made.close()
    running = [child for child in children if child.is_running()]
    assert not [child for child in running if child.status() != psutil.STATUS_ZOMBIE]
