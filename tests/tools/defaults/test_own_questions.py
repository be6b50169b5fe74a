"""The page of docs/data.md on questions and passages that are not the default ones, and the folder
that coppice dev new makes of it."""

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
from coppice.tools.launching import new_project
from coppice.tools.launching.config import load
from coppice.tools.launching.set_up import prepare

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new project with the files that its script writes."""
    monkeypatch.chdir(tmp_path)
    assert new_project.main(["own"]) == 0
    monkeypatch.chdir("own")
    exec(Path("rows.py").read_text(), {})
    return tmp_path / "own"


def test_the_page_shows_a_passage_and_a_row_of_a_new_project(folder: Path) -> None:
    lines = (ROOT / "docs/data.md").read_text().partition("```json\n")[2].split("\n")
    for name, line in zip(("corpus", "train"), lines, strict=False):
        assert line in (folder / f"{name}.jsonl").read_text().split("\n")


@pytest.mark.parametrize("judge", new_project.JUDGES)
def test_a_new_project_has_its_judge_and_a_folder_with_files_is_refused(
    judge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"my-{judge}").mkdir()  # an empty one is taken
    assert new_project.main([f"my-{judge}", "--judge", judge]) == 0
    monkeypatch.chdir(f"my-{judge}")
    config, judges = load(Path("config.toml"), []), ("slate_rules", "slate", "none", "graded")
    named = judges[[*new_project.JUDGES].index(judge)]
    assert (config.name, config.scheduler.judge) == (f"my-{judge}", named)
    for place, said in ((".", "is not empty"), ("a b", "name = 'a b': expected a letter")):
        assert new_project.main([place, "--judge", judge]) == 2
        assert said in capsys.readouterr().err
    assert not Path("a b").exists()


def test_the_pages_own_questions_become_a_warm_start(folder: Path, llama: Path) -> None:
    build(folder / "corpus.jsonl", folder / "index", Encoder())
    index, text = Index(folder / "index", Encoder()), Text(str(llama))
    environment = SearchQA("short", 2)
    tasks, rejected = load_tasks("train.jsonl")
    without = [msgspec.structs.replace(task, evidence=[]) for task in tasks]
    assert not rejected
    for some in (tasks, without):
        examples = traces(some, text, environment, index, 1000, WarmStart())
        turns = [text.tokenizer.decode(one.tokens[one.start :]) for one in examples]
        assert all(environment.read(None, turn).valid for turn in turns)
        assert all(turn.endswith(("</search>", "</answer>")) for turn in turns)
        shown = [text.tokenizer.decode(one.tokens[: one.start]) for one in examples]
        assert all(one.endswith(("<|assistant|>", "</information>\n")) for one in shown)
        answers = sum("<answer>" in turn for turn in turns)
        assert len(turns) == 2 * answers > 2 * 0.9 * len(tasks)
    nowhere = [msgspec.structs.replace(task, evidence=["Peru\nIt is elsewhere."]) for task in tasks]
    with pytest.raises(ValueError, match=r"in any of \d+ questions: check that the corpus"):
        traces(nowhere, text, environment, index, 8, WarmStart())
    assert len(traces(tasks, text, environment, index, 8, WarmStart())) == 8


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
