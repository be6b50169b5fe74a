"""[judges.model]: a run serves a model to its own judges, who wait for it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coppice.judges.serve import JudgeProcess
from coppice.tools.defaults.tiny import BOARD as TINY
from coppice.tools.launching import processes
from coppice.tools.launching.config import DEFAULT_CONFIG, ConfigError, load
from coppice.tools.launching.prepare import prepare
from coppice.tools.launching.settings import JUDGE_HOST, Assets, JudgeModelProcess
from coppice.wire.messages import JudgedTurn, JudgeRequest, JudgeResult
from tests.services import bench
from tests.tools.said import Patch

pytestmark = pytest.mark.slow

AT = "judges.use.pprm.endpoint"
ASKS = f"{AT}.url=served"
MODEL = [f"judges.model={{name='{TINY}', max_context=512, kv_cache_gib=0.05}}"]


def made(run: Path, overrides: list[str], judge_model: str = "JUDGE") -> dict[str, Any]:
    config, assets = load(DEFAULT_CONFIG, overrides), Assets("MODEL", "T", "H", "I", judge_model)
    files = [process.file for process in processes.make(config, assets, run)]
    read = {name: (run / "processes" / f"{name}.json").read_bytes() for name in files}
    return {name: msgspec.json.decode(content) for name, content in read.items()}


def test_a_judge_that_asks_for_the_served_model_gets_its_address(tmp_path: Path) -> None:
    files = made(tmp_path, [ASKS, *MODEL, "judges.model.max_batch=3"])
    process = msgspec.convert(files["judge-model"], JudgeModelProcess)
    assert (process.folder, process.model.name, process.model.max_context) == ("JUDGE", TINY, 512)
    endpoint = files["judges"]["judges"]["pprm"]["endpoint"]
    assert endpoint["url"] == f"http://{JUDGE_HOST}:{process.port}/v1"
    assert (endpoint["model"], endpoint["concurrency"]) == (TINY, 3)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([ASKS], r"pprm\.endpoint\.url = 'served' .* add \[judges\.model\], or give a URL"),
        (MODEL, r"\[judges\.model\] has no effect"),
        ([ASKS, *MODEL, f"{AT}.model=x"], r"pprm\.endpoint\.model = 'x': \[judges\.model\] is"),
        ([ASKS, *MODEL, f"{AT}.max_tokens=512"], r"endpoint\.max_tokens = 512 leaves no room"),
        ([ASKS, *MODEL, f"{AT}.max_tokens=60"], "max_tokens 60: a constrained reply needs"),
    ],
)  # fmt: skip
def test_a_served_model_that_cannot_work_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(DEFAULT_CONFIG, overrides)


def test_the_model_is_found_before_the_start(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COPPICE_CACHE", str(tmp_path))
    game = Path("configs/vpr-tictactoe-cpu.toml")
    config = load(game, [*MODEL, ASKS, "warm_start.steps=0"])
    found = prepare(config)
    assert (Path(found.judge_model) / "config.json").is_file()
    with pytest.raises(FileNotFoundError, match=r"judges\.model\.name = 'nothing-here'"):
        prepare(load(game, [ASKS, "judges.model.name=nothing-here", "warm_start.steps=0"]))


@asynccontextmanager
async def process(module: str, file: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [sys.executable, "-m", module, str(file)]
    running = await asyncio.create_subprocess_exec(*command, cwd=DEFAULT_CONFIG.parent.parent)
    try:
        yield running
    finally:
        running.terminate()
        assert await asyncio.wait_for(running.wait(), 30) == 0


async def test_a_judge_waits_for_its_model(tmp_path: Path, llama: Path) -> None:
    model = f'judges.model={{ name = "{llama}", max_context = 4096, kv_cache_gib = 0.1 }}'
    files = made(tmp_path, [ASKS, model, f"{AT}.max_tokens=80"], str(llama))
    only = JudgeProcess("judges", str(tmp_path), {"pprm": files["judges"]["judges"]["pprm"]})
    (tmp_path / "judges.json").write_bytes(msgspec.json.encode(only))
    said = [f"<think> {i} </think> <search> q </search>" for i in range(4)]
    turns = [JudgedTurn("Who?", [], "", text, 1, 4) for text in said]
    async with bench(tmp_path) as b:
        (tmp_path / "endpoint").write_text(b.dispatcher.endpoint)
        server, file = "coppice.tools.launching.serve_model", "processes/judge-model.json"
        judges = process("coppice.judges.serve", tmp_path / "judges.json")
        async with judges, process(server, tmp_path / file):
            await b.dispatcher.wait_for("judge.pprm", 1, 100)
            asked = JudgeRequest(turns)
            result: JudgeResult = await b.dispatcher.call("judge.pprm", asked, deadline=100)
    assert len(result.judgements) == 4
    for judgement in result.judgements:
        assert judgement.invalid == []
        assert 0.0 <= judgement.scores["process"] <= 1.0
