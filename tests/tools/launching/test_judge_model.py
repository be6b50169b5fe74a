"""[judges.model]: a run serves a model to its own judges (in a whole run: tests/e2e)."""

import json
from pathlib import Path

import msgspec
import pytest

from coppice.tools.defaults.tiny import BOARD as TINY
from coppice.tools.launching import processes
from coppice.tools.launching.config import DEFAULT_CONFIG, ConfigError, load
from coppice.tools.launching.prepare import prepare
from coppice.tools.launching.settings import JUDGE_HOST, Assets, JudgeModelProcess
from tests.tools.said import Patch

pytestmark = pytest.mark.slow

AT = "judges.use.pprm.endpoint"
ASKS = f"{AT}.url=served"
MODEL = [f"judges.model={{name='{TINY}', max_context=512, kv_cache_gib=0.05}}"]


def test_a_judge_that_asks_for_the_served_model_gets_its_address(tmp_path: Path) -> None:
    config = load(DEFAULT_CONFIG, [ASKS, *MODEL, "judges.model.max_batch=3"])
    processes.make(config, Assets("MODEL", "T", "H", "I", "JUDGE"), tmp_path)
    written = (tmp_path / "processes" / "judge-model.json").read_bytes()
    process = msgspec.json.decode(written, type=JudgeModelProcess)
    assert (process.folder, process.model.name, process.model.max_context) == ("JUDGE", TINY, 512)
    judges = json.loads((tmp_path / "processes" / "judges.json").read_bytes())
    endpoint = judges["judges"]["pprm"]["endpoint"]
    assert endpoint["url"] == f"http://{JUDGE_HOST}:{process.port}/v1"
    assert (endpoint["model"], endpoint["concurrency"]) == (TINY, 3)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([ASKS], r"pprm\.endpoint\.url = 'served' .* add \[judges\.model\], or give a URL"),
        (MODEL, r"\[judges\.model\] has no effect"),
        ([ASKS, *MODEL, f"{AT}.model=x"], r"pprm\.endpoint\.model = 'x': \[judges\.model\] is"),
        ([ASKS, *MODEL, f"{AT}.max_tokens=512"], r"endpoint\.max_tokens = 512 leaves no room"),
        ([ASKS, *MODEL, f"{AT}.max_tokens=60"], "max_tokens 60: a reply of its form needs"),
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
