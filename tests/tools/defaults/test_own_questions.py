"""The page of docs/data.md on questions and passages that are not the default ones."""

import re
from pathlib import Path

import msgspec
import pytest

from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.actors.environments.task_files import load_tasks
from coppice.judges.retriever.encoder import Encoder
from coppice.judges.retriever.index import Index, build
from coppice.scheduler.growth.text import Text
from coppice.tools.defaults.settings import WarmStart
from coppice.tools.defaults.warm_start import queries, traces
from coppice.tools.launching.config import load
from coppice.tools.launching.set_up import prepare

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the files that the page's script makes."""
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(script, {})
    return tmp_path


def test_the_pages_own_questions_become_a_warm_start(folder: Path, llama: Path) -> None:
    build(folder / "corpus.jsonl", folder / "index", Encoder())
    index, text = Index(folder / "index", Encoder()), Text(str(llama))
    tasks, rejected = load_tasks("train.jsonl")
    without = [msgspec.structs.replace(task, evidence=[]) for task in tasks]
    assert not rejected
    for some in (tasks, without):
        examples = traces(some, text, SearchQA("short", 2), index, 1000, WarmStart())
        turns = [text.tokenizer.decode(one.tokens[one.start :]) for one in examples]
        answers = sum("<answer>" in turn for turn in turns)
        assert len(turns) == 2 * answers > 2 * 0.9 * len(tasks)
    nowhere = [msgspec.structs.replace(task, evidence=["Peru\nIt is elsewhere."]) for task in tasks]
    with pytest.raises(ValueError, match=r"in any of \d+ questions: check that the corpus"):
        traces(nowhere, text, SearchQA("short", 2), index, 8, WarmStart())


def test_a_search_names_a_title_only_after_it_was_seen() -> None:
    question = "What is the capital of the country whose currency is lev?"
    first, second = "Bulgaria\nCurrency: lev", "Bulgaria\nCapital: Sofia"
    assert queries(question, first, [])[0] == "currency lev"
    assert queries(question, second, [])[0] == "capital"
    assert queries(question, second, ["Doc 1(Title: Bulgaria)"])[0] == "Bulgaria capital"


def test_the_tiny_policy_is_refused_words_that_it_cannot_read(folder: Path) -> None:
    own = [f"data.{name}={name}.jsonl" for name in ("train", "heldout", "corpus")]
    config = load(ROOT / "configs/slate-tiny.toml", own)
    with pytest.raises(ValueError, match="the default corpus alone: expected 'smollm2-135m'"):
        prepare(config)
