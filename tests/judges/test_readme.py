"""The README's judge, as written, served by tools/serve and asked through a real dispatcher."""

import asyncio
import re
import sys
from pathlib import Path

from tests.services import bench
from wire.messages import JudgedTurn, JudgeRequest, JudgeResult

ROOT = Path(__file__).parent.parent.parent


async def test_the_judge_of_the_readme_works_as_written(tmp_path: Path) -> None:
    section = (ROOT / "README.md").read_text().partition("## Plug in a judge")[2]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    (tmp_path / "my_judge.py").write_text(code)
    async with bench(tmp_path) as b:
        (tmp_path / "endpoint").write_text(b.dispatcher.endpoint)
        command = [sys.executable, str(ROOT / "tools" / "serve"), "my_judge:Brevity", "--run", str(tmp_path)]
        serving = await asyncio.create_subprocess_exec(*command, cwd=tmp_path)
        try:
            await b.dispatcher.wait_for("judge.brevity", 1, 60)
            turn = JudgedTurn("q", ["a"], "", "a short response", 1, 4, think="t", query="q")
            result: JudgeResult = await b.dispatcher.call("judge.brevity", JudgeRequest([turn]), deadline=10)
            assert result.judgements[0].scores == {"think": 1.0, "query": 0.0}
        finally:
            serving.terminate()
            await asyncio.wait_for(serving.wait(), 30)
