"""docs/judges.md is true: its judge is served by its command, and its tables are what the code
says."""

import asyncio
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from coppice.judges.config import JudgesConfig, with_served_model
from coppice.judges.serve import make_worker
from coppice.wire.messages import JudgedTurn, JudgeRequest
from tests.services import bench

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "judges.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def turn(**parts: Any) -> JudgedTurn:
    past = ["country currency lev"]
    return JudgedTurn("q", ["Sofia"], "", "", 2, 4, think="t", past_queries=past, **parts)


async def test_the_judge_of_the_docs_is_served_by_the_command_of_the_docs(tmp_path: Path) -> None:
    (code,) = blocks("python")
    assert code == (ROOT / "examples" / "questions" / "graded.py").read_text()
    (tmp_path / "graded.py").write_text(code)
    (command,) = re.findall(r"^coppice (serve .*RUN)$", TEXT, re.MULTILINE)
    arguments = shlex.split(command.replace("RUN", str(tmp_path)))
    async with bench(tmp_path) as b:
        (tmp_path / "endpoint").write_text(b.dispatcher.endpoint)
        command = (sys.executable, "-m", "coppice", *arguments)
        serving = await asyncio.create_subprocess_exec(*command, cwd=tmp_path)
        try:
            await b.dispatcher.wait_for("judge.graded", 1, 60)
            searches = [turn(query="Bulgaria capital"), turn(query="country currency lev")]
            request = JudgeRequest([*searches, turn(answer="Sofia"), turn(answer="Rome")])
            result: Any = await b.dispatcher.call("judge.graded", request, deadline=20)
            scores = [judgement.scores for judgement in result.judgements]
            assert scores[:2] == [{"think": 0, "query": 0}, {"think": 0, "query": -1}]
            assert scores[2:] == [{"think": 0, "answer": 1}, {"think": 0, "answer": -1}]
        finally:
            serving.terminate()
            assert await asyncio.wait_for(serving.wait(), 30) == 0


def test_the_settings_of_the_docs_make_the_judges_they_name() -> None:
    made = []
    for block in blocks("toml"):
        config = msgspec.convert(tomllib.loads(block)["judges"], JudgesConfig)
        for name, options in config.use.items():
            if config.model:
                options = with_served_model(options, "http://127.0.0.1:1/v1", config.model)
            made.append(make_worker(name, options).name)
    assert made == ["slate", "pprm", "pprm"]
