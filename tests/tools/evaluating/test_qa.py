"""coppice evaluate qa: scorers, sets, cached retrieval, the table, and whole evaluations."""

import asyncio
import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from coppice.actors.config import ActorProcess, ActorsConfig
from coppice.actors.environments.base import Task
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.actors.environments.task_files import load_tasks
from coppice.judges.config import RetrieverConfig
from coppice.judges.retriever.worker import RetrieverProcess
from coppice.scheduler.config import SchedulerConfig, SchedulerProcess
from coppice.scheduler.evaluation.evaluation import Estimate
from coppice.scheduler.growth.tasks import held_out
from coppice.scheduler.growth.tree import Tree
from coppice.tools import evaluating
from coppice.tools.evaluating.examination import SampleMean
from coppice.tools.evaluating.qa.evaluation import QaTable, TableSettings, macro, notes
from coppice.tools.evaluating.qa.methods import PROMPTS as QA_PROMPTS
from coppice.tools.evaluating.qa.methods import filled
from coppice.tools.evaluating.qa.retrieval import CachedRetrieval
from coppice.tools.evaluating.qa.scoring import score
from coppice.tools.evaluating.qa.sets import HUB, PAPER, read_sets, subset
from coppice.tools.inspecting.dump import main as dump
from coppice.wire.messages import Passage, RetrieveRequest
from coppice.wire.published import Manifest
from tests.tools.evaluating.test_evaluate import chat, played, result, served

TOKENS = np.arange(3, dtype=np.int32)


def main(arguments: list[str]) -> int:
    return evaluating.main(["qa", *arguments])


def grown(*parts: tuple[str, str], prompt: str = "Question: who?", forced: bool = False) -> Tree:
    """A tree of one path: a prompt, then (kind, text) parts of three tokens each."""
    tree = Tree(0, "t", "heldout")
    node = tree.add(None, "prompt", TOKENS, prompt)
    for i, (kind, text) in enumerate(parts):
        last = i == len(parts) - 1
        which: Any = kind
        node = tree.add(node, which, TOKENS, text, chosen=True, forced=forced and last)
    return tree


# ----------------------------------------------------------------------------------------------
# scorers


@pytest.mark.parametrize(
    ("said", "em", "f1"),
    [
        ("<think>a</think><answer> The Eiffel-Tower! </answer>", 1.0, 1.0),
        ("<answer>Rome</answer> no, <answer>eiffeltower</answer>", 1.0, 1.0),
        ("<answer>eiffeltower</answer> no, <answer>Rome</answer>", 0.0, 0.0),
        ("the eiffeltower", 0.0, 0.0),
        ("<answer>eiffeltower", 0.0, 0.0),
        ("<answer>old eiffeltower</answer>", 0.0, 2 / 3),
    ],
)
def test_the_last_complete_answer_block_is_scored(said: str, em: float, f1: float) -> None:
    found = score(grown(("action", said)), ["Paris", "eiffeltower"], 0)
    assert (found["em"], found["f1"]) == (em, pytest.approx(f1))


def test_what_was_shown_to_the_policy_is_no_answer_of_its_own() -> None:
    notice = ("observation", "Write <answer> answer </answer>.")
    tree = grown(("action", "nonsense"), notice, ("action", "more"))
    found = score(tree, ["answer"], 0)
    assert (found["em"], found["answered"]) == (0.0, 0.0)
    assert found["em_two_blocks"] == 0.0, "one block in all"


def test_the_original_scorer_demands_two_blocks_of_prompt_and_response() -> None:
    one, plain = ("action", "<answer>Rome</answer>"), "Question: capital of Italy?"
    example = "for instance <answer> Paris </answer>. " + plain
    assert score(grown(one, prompt=plain), ["Rome"], 0)["em_two_blocks"] == 0.0
    assert score(grown(one, prompt=example), ["Rome"], 0)["em_two_blocks"] == 1.0
    assert score(grown(("action", "?"), prompt=example), ["Paris"], 0)["em_two_blocks"] == 0.0


def prompts_with_an_answer() -> dict[str, str]:
    """The built-in prompts that tell how to answer, as the qa table asks with them: every method's
    and search's."""
    asked = {
        name: filled(name, **PARTS)
        for name in ("cot", "direct", "ircot_read", "iter_retgen", "rag", "search_o1")
    }
    task = Task("1", PARTS["question"], ["Rome"])
    return asked | {
        name: SearchQA(name).prompt(task)[0]["content"] for name in ("search_r1", "short")
    }


PARTS = {"question": "Capital of Italy?", "documents": "Doc 1(Title: Italy) Rome", "budget": "3"}


def test_the_built_in_prompts_show_one_answer_block_so_two_are_demanded_of_the_response() -> None:
    told = {path.stem for path in QA_PROMPTS.glob("*.txt") if "<answer>" in path.read_text()}
    assert told < set(prompts_with_an_answer())
    for name, prompt in prompts_with_an_answer().items():
        (example,) = re.findall("<answer>(.*?)</answer>", prompt, re.DOTALL)
        unanswered, right = (
            score(grown(("action", said), prompt=prompt), ["Rome", example], 0)["em_two_blocks"]
            for said in ("I do not know.", "<answer>Rome</answer>")
        )
        assert (unanswered, right) == (0.0, 1.0), name


@pytest.mark.parametrize(("blocks", "value"), [(10, 1.0), (11, 0.25)])
def test_slates_scorer_gives_a_quarter_beyond_ten_tags(blocks: int, value: float) -> None:
    found = score(grown(("action", "<answer>x</answer>" * blocks)), ["x"], 0)
    assert (found["em"], found["em_slate"]) == (1.0, value)


def test_a_forced_answer_is_scored_closed_or_not_and_is_not_answered() -> None:
    for text in ("Rome</answer>", " Rome"):
        parts = [("action", "?"), ("observation", "\n<answer>"), ("action", text)]
        found = score(grown(*parts, forced=True), ["rome"], 2)
        assert (found["em"], found["answered"], found["searches"]) == (1.0, 0.0, 2.0)


def test_an_answer_left_open_or_spoken_of_takes_nothing_from_the_answer_after_it() -> None:
    cut = [("action", "<think>t</think><answer>Par"), ("observation", "Invalid.\n<answer>")]
    cut.append(("action", " Rome </answer>"))
    found = score(grown(*cut, forced=True), ["rome"], 1)
    assert (found["em"], found["f1"], found["answered"]) == (1.0, 1.0, 0.0)
    spoken = [("action", "<think>in <answer> then</think><search>x</search>")]
    spoken += [("observation", "y"), ("action", "<answer>Rome</answer>")]
    found = score(grown(*spoken, prompt="as <answer> Paris </answer>"), ["rome"], 1)
    assert (found["em"], found["answered"]) == (1.0, 1.0)
    assert found["em_two_blocks"] == 0.0, "the published scorer as it is"


def test_tokens_are_counted_by_who_wrote_them() -> None:
    found = score(grown(("action", "a"), ("observation", "b"), ("action", "c")), ["x"], 1)
    names = ("response_tokens", "tokens_with_observations", "prompt_tokens")
    assert [found[name] for name in names] == [6, 9, 3]


def test_the_macro_mean_is_of_sets_and_its_interval_of_theirs() -> None:
    sets = [{"em": SampleMean(0.5, 0.3, 10)}, {"em": SampleMean(0.1, 0.4, 1000)}]
    assert macro(sets) == {"em": Estimate(0.3, pytest.approx(0.25))}  # pyright: ignore
    assert macro([sets[0], {}]) == {}, "a measure that one set lacks has no mean"


# ----------------------------------------------------------------------------------------------
# sets


def write(path: Path, golds: dict[str, str], **more: Any) -> Path:
    rows = [{"id": q, "question": q, "golden_answers": [a], **more} for q, a in golds.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_subset_is_fixed_by_its_seed_and_is_that_of_a_run(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", {f"q{i}": "a" for i in range(50)})
    tasks, _ = load_tasks(str(path))
    assert subset(tasks, 7, 0) == held_out(str(path), 7)[0]
    assert subset(tasks, 7, 1) == subset(tasks, 7, 1) != subset(tasks, 7, 0)
    assert subset(tasks, 7, 0) == subset(tasks, 20, 0)[:7]
    assert len(subset(tasks, 99, 0)) == 50


def test_a_row_that_cannot_work_is_counted_and_does_not_end_its_set(tmp_path: Path) -> None:
    bad = [{"evidence": [{"x": 1}]}, {"evidence": 7}, {"hops": "two"}]
    path = write(tmp_path / "q.jsonl", {"good?": "a"}, reward_model="r", extra_info=["i"], hops=2)
    rows = [json.dumps({"question": "q", "golden_answers": ["a"], **more}) + "\n" for more in bad]
    rows.append('{"prompt": ["Question: who"], "golden_answers": ["a"]}\n')
    rows += ['{"question": "q"}\n', '{"question": "torn\n']
    path.write_text(path.read_text() + "".join(rows))
    (found,) = read_sets([f"x={path}"], None, 0)
    reasons = {"evidence or hops": 3, "no question": 1, "no gold answer": 1, "not JSON": 1}
    assert ([task.id for task in found.tasks], found.settings.reasons) == (["good?"], reasons)
    assert len(found.notes) == 1
    assert found.notes[0].startswith(
        f"x: 6 of 7 rows cannot be used; the first: {path}:2: evidence"
    )
    ((small,),) = (one.notes[1:] for one in read_sets([f"x={path}"], 9, 0))
    assert small == "x: 9 questions are asked for and 1 are there, so all of them are used"
    (said,) = notes(QaTable(TableSettings([found.settings], 0), []))
    told = "3 evidence or hops, 1 no question, 1 no gold answer, 1 not JSON"
    assert said == f"x: 6 rows of its file cannot be used: {told}"


def test_the_built_in_questions_are_two_sets_by_hops(tmp_path: Path) -> None:
    path = write(tmp_path / "one.jsonl", {"a": "1", "b": "2"})
    two = write(tmp_path / "two.jsonl", {"c": "3"}, hops=2)
    path.write_text(path.read_text() + two.read_text())
    found = {s.settings.name: [t.id for t in s.tasks] for s in read_sets([], None, 0, path)}
    assert found == {"one_hop": ["a", "b"], "two_hop": ["c"]}


def test_a_set_of_the_hub_is_its_test_split_else_dev_else_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a stand-in for the hub: no test here reaches the real one."""
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    there = {f"{name}/{split}.jsonl" for name in PAPER for split in ("train", "dev")}
    there.add("nq/test.jsonl")

    def download(repository: str, file: str, repo_type: str) -> str:
        assert (repository, repo_type) == (HUB, "dataset")
        if file not in there:
            raise EntryNotFoundError(file)
        return str(write(tmp_path / file.replace("/", "-"), {f"{file}?": "a"}))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    found = read_sets(["paper"], None, 0)
    assert tuple(s.settings.name for s in found) == PAPER
    assert [s.tasks[0].id for s in found[:2]] == ["nq/test.jsonl?", "triviaqa/dev.jsonl?"]
    assert [s.settings.source for s in found[:2]] == [f"{HUB}/nq:test", f"{HUB}/triviaqa:dev"]
    (train,) = read_sets([f"x={HUB}/nq:train"], None, 0)
    assert train.tasks[0].id == "nq/train.jsonl?"
    none = r"no nosuch/test or dev or validation or train\.jsonl"
    with pytest.raises(FileNotFoundError, match=none):
        read_sets([f"x={HUB}/nosuch"], None, 0)


@pytest.mark.parametrize(
    ("there", "taken"),
    [("train validation test", "test"), ("train validation", "validation"), ("train", "train")],
)
def test_a_plain_set_of_the_hub_is_its_test_split_else_dev_else_train(
    there: str, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = there.split()

    def load(name: str, split: str) -> list[dict[str, Any]]:
        return [{"id": split, "question": f"{name}?", "golden_answers": ["a"]}]

    hub = SimpleNamespace(get_dataset_split_names=lambda name: splits, load_dataset=load)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    (found,) = read_sets(["x=owner/name"], None, 0)
    assert ([task.id for task in found.tasks], found.settings.source) == (
        [taken],
        f"owner/name:{taken}",
    )
    assert read_sets(["x=owner/name:train"], None, 0)[0].tasks[0].id == "train"
    splits[:] = ["all"]
    with pytest.raises(ValueError, match=r"splits \['all'\].*owner/name:split"):
        read_sets(["x=owner/name"], None, 0)


# ----------------------------------------------------------------------------------------------
# cached retrieval


class Books:
    """A backend that notes what it is asked; with ``hold`` it waits for that event. failing: raises
    instead."""

    def __init__(self, hold: asyncio.Event | None = None):
        self.asked: list[tuple[str, int]] = []
        self.hold, self.opened, self.closed = hold, 0, 0

    async def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        self.asked += [(query, topk) for query in queries]
        if self.hold is not None:
            await self.hold.wait()
        rows = range(topk)
        return [[Passage(f"{q}-{i}", "T", f"{q} {i}", 1 / (i + 1)) for i in rows] for q in queries]

    @asynccontextmanager
    async def opening(self) -> AsyncIterator["Books"]:
        self.opened += 1
        yield self
        self.closed += 1


async def test_a_query_is_asked_once_by_retriever_and_topk_and_across_sessions(
    tmp_path: Path,
) -> None:
    books, file = Books(), tmp_path / "cache.sqlite"
    for identity, topk in (("a", 2), ("a", 2), ("a", 3), ("b", 2)):
        cached = CachedRetrieval(file, identity, books.opening)
        for _ in range(2):
            (found,) = (await cached.handle(RetrieveRequest(["q"], topk))).passages
            assert [p.id for p in found] == [f"q-{i}" for i in range(topk)]
        await cached.close()
    assert books.asked == [("q", 2), ("q", 3), ("q", 2)]
    assert (books.opened, books.closed) == (3, 3), "a backend is opened when it is needed"


async def test_queries_at_the_same_time_are_asked_once_and_one_that_leaves_takes_nothing(
    tmp_path: Path,
) -> None:
    hold = asyncio.Event()
    books = Books(hold)
    cached = CachedRetrieval(tmp_path / "cache.sqlite", "a", books.opening)
    first, *others = [
        asyncio.create_task(cached.handle(RetrieveRequest(["q"], 1))) for _ in range(5)
    ]
    while not books.asked:
        await asyncio.sleep(0)
    first.cancel()
    hold.set()
    found = await asyncio.gather(*others)
    assert {result.passages[0][0].id for result in found} == {"q-0"}
    assert books.asked == [("q", 1)]
    assert (cached.counts["queries"], cached.counts["hits"]) == (5, 4)
    await cached.close()


# ----------------------------------------------------------------------------------------------
# whole evaluations


class Scholar:
    """Searches for the question, then answers with its last word. before: what happens at each
    request, by its number; an event is waited for first."""

    def __init__(
        self, before: Callable[[int], web.Response | asyncio.Event | None] = lambda number: None
    ):
        self.before, self.requests = before, 0
        self.seen: list[dict[str, Any]] = []

    async def __call__(self, request: web.Request) -> web.Response:
        self.requests += 1
        answer = self.before(self.requests)
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        elif answer is not None:
            return answer
        self.seen.append(await request.json())
        messages = self.seen[-1]["messages"]
        word = messages[0]["content"].split("Question: ")[1].split("?")[0].split()[-1]
        if "</search>" in self.seen[-1]["stop"] and len(messages) == 1:
            # the protocol cuts the stop string off
            return chat(f"<think>look</think><search>{word}")
        return chat(f"<think>so</think><answer>{word}")


def questions(folder: Path) -> list[str]:
    """Two sets: of the first the scholar knows all, of the second a half."""
    easy = write(folder / "easy.jsonl", {f"what is w{i}": f"w{i}" for i in range(6)})
    hard = write(folder / "hard.jsonl", {f"what is w{i}": f"w{i % 2 * i}" for i in range(4)})
    return ["--set", f"easy={easy}", "--set", f"hard={hard}"]


def at_endpoint(url: str, folder: Path, out: Path, *more: str) -> list[str]:
    words = f"--endpoint {url} --endpoint-model m --concurrency 1 --attempts 1"
    return [*questions(folder), *words.split(), "--out", str(out), *more]


@pytest.fixture
def retriever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Books:
    """Books behind every --retriever."""
    books = Books()
    monkeypatch.setattr(
        "coppice.tools.evaluating.qa.evaluation.opening_of",
        lambda retriever, threads: books.opening,
    )
    return books


BOOKS = ("--retriever", "http://books")


def test_a_table_has_rows_of_methods_columns_of_sets_and_the_macro_mean(
    tmp_path: Path, retriever: Books, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with served(Scholar()) as url:
        command = at_endpoint(url, tmp_path, out, *BOOKS, "--method", "search,direct,rag")
        assert main(command) == 0
        said = capsys.readouterr().out
        assert main([*command, "--json"]) == 0
    found = result(out)
    again = json.loads(capsys.readouterr().out)
    assert again == found, "a finished evaluation is only reported again"
    lines = (out / "table.md").read_text().splitlines()
    assert said.startswith("\n".join(lines))
    assert lines[0] == "| method | model | easy (6) | hard (4) | mean |"
    heads = [line.split(" | ")[:2] for line in lines[2:5]]
    assert heads == [["| search", "m"], ["| direct", "m"], ["| rag", "m"]]
    row = found["rows"][0]
    easy, hard = row["sets"]["easy"]["em"], row["sets"]["hard"]["em"]
    assert (easy["mean"], easy["n"], hard["mean"], hard["n"]) == (1.0, 6, 0.75, 4)
    assert row["macro"]["em"]["mean"] == 0.875
    assert row["macro"]["em"]["half"] == pytest.approx(math.hypot(easy["half"], hard["half"]) / 2)
    assert f"0.875 ±{row['macro']['em']['half']:.3f}" in lines[2]
    searches = row["sets"]["easy"]["searches"]
    assert searches == {"mean": 1.0, "half": 0.0, "n": 6}, "a count is no proportion"
    assert "response_tokens" not in row["sets"]["easy"], "an endpoint's journal holds bytes"
    assert row["generated_tokens"] == 5 * 20
    assert (row["queries"], row["hits"]) == (10, 4), "both sets ask for w0 to w3"
    assert dump([str(out / "rag.m"), "--heldout", "--all", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 10


def test_an_endpoint_is_asked_in_turns_and_a_forced_answer_in_words(
    tmp_path: Path, retriever: Books
) -> None:
    seen: list[list[dict[str, str]]] = []

    async def undecided(request: web.Request) -> web.Response:
        seen.append((await request.json())["messages"])
        asked = seen[-1][-1]["content"]
        last = "No steps are left" in asked
        return chat("<answer>w0" if last else "<think>hm</think><search>more")

    with served(undecided) as url:
        out, words = tmp_path / "out", "--questions 1 --budget 2"
        assert main(at_endpoint(url, tmp_path, out, *BOOKS, *words.split())) == 0
    roles = ["user", "assistant", "user", "assistant", "user"]
    assert [m["role"] for m in seen[2]] == roles
    assert seen[2][1]["content"] == "<think>hm</think><search>more</search>"
    assert "Doc 1(Title: T) more 0" in seen[2][2]["content"]
    assert not seen[2][-1]["content"].endswith("<answer>")
    (last,) = [nodes[-1] for i, _, _, nodes in played(out / "search.m") if i == 0]
    assert last[1] == "w0</answer>", "the opening that the journal holds already is not there twice"


@pytest.mark.parametrize("method", ["search", "rag"])
def test_an_interrupted_evaluation_goes_on_to_the_result_of_an_uninterrupted_one(
    tmp_path: Path, retriever: Books, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    never = asyncio.Event()

    def interrupt(number: int) -> web.Response | asyncio.Event | None:
        if number == 4:
            os.kill(os.getpid(), signal.SIGINT)
            return never
        return web.Response(status=500) if number == 9 else None

    whole, parts = Scholar(), Scholar(interrupt)
    more = [*BOOKS, "--method", method]
    with served(whole) as url:
        assert main(at_endpoint(url, tmp_path, tmp_path / "whole", *more)) == 0
    asked = len(retriever.asked)
    with served(parts) as url:
        command = at_endpoint(url, tmp_path, tmp_path / "parts", *more, "--attempts", "1")
        assert main(command) == 130
        assert "go on with: coppice evaluate qa" in capsys.readouterr().err
        assert main(command) == 1, "the server failed"
        assert main(command) == 0
    first, second = (played(tmp_path / name / f"{method}.m") for name in ("whole", "parts"))
    assert first == second
    one, other = result(tmp_path / "whole")["rows"][0], result(tmp_path / "parts")["rows"][0]
    assert (one["sets"], one["macro"]) == (other["sets"], other["macro"])
    assert parts.requests == whole.requests + 2, "no answer that was kept was asked for again"
    assert len(retriever.asked) == 2 * asked, "nor was a search"


def test_rows_are_added_to_a_table_and_other_settings_refused_by_name(
    tmp_path: Path, retriever: Books, capsys: pytest.CaptureFixture[str]
) -> None:
    out, scholar = tmp_path / "out", Scholar()
    with served(scholar) as url:
        command = at_endpoint(url, tmp_path, out, *BOOKS, "--method")
        assert main([*command, "direct"]) == 0
        before = scholar.requests
        assert main([*command, "rag"]) == 0
        assert scholar.requests == before + 10
        assert [row["name"] for row in result(out)["rows"]] == ["direct.m", "rag.m"]
        for more, message in (
            (["rag", "--questions", "3"], "was begun with sets ="),
            (["rag", "--seed", "1"], "was begun with seed = 0, now it is 1"),
            (["rag", "--max-tokens", "7"], "rag.m was begun with max_tokens = 500, now it is 7"),
            (["cot,direct,rag", "--topk", "7"], "direct.m was begun with how ="),
        ):
            assert main([*command, *more]) == 2
            assert message in capsys.readouterr().err
            assert not (out / "cot.m").exists(), "a refused command leaves nothing behind"
        assert main([*command, "rag", "--concurrency", "3"]) == 0
        assert scholar.requests == before + 10


def test_a_question_that_fits_no_context_scores_zero_and_is_listed(
    tmp_path: Path, retriever: Books, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(number: int) -> web.Response | None:
        long = web.Response(status=400, text="context length exceeded")
        return long if number in (3, 9) else None

    with served(Scholar(refused)) as url:
        assert main(at_endpoint(url, tmp_path, tmp_path / "out", "--method", "direct")) == 0
    row = result(tmp_path / "out")["rows"][0]
    assert row["sets"]["easy"]["em"]["mean"] == pytest.approx(5 / 6)
    assert row["sets"]["easy"]["em"]["n"] == 6
    failed = list(row["failed"])
    assert failed == ["easy/what is w2", "hard/what is w2"], "an id of two sets is two questions"
    assert "context length exceeded" in row["failed"]["easy/what is w2"]
    assert "not finished, scored 0: easy/what is w2" in capsys.readouterr().out


def test_a_row_of_which_nothing_could_be_answered_is_no_row(
    tmp_path: Path, retriever: Books, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(number: int) -> web.Response | None:
        return web.Response(status=400, text="no such field") if number < 5 else None

    with served(Scholar(refused)) as url:
        words = "--method direct --questions 2"
        command = at_endpoint(url, tmp_path, tmp_path / "out", *words.split())
        assert main(command) == 1
        told = "direct.m: no questions could be answered; the first reason: "
        assert told in capsys.readouterr().err
        assert not (tmp_path / "out" / "result.json").exists()
        assert main(command) == 0, "it goes on once they can"


def test_a_finished_row_stays_in_the_table_when_a_later_one_fails_or_the_table_is_torn(
    tmp_path: Path, retriever: Books, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with served(Scholar(lambda number: web.Response(status=500) if number == 13 else None)) as url:
        command = at_endpoint(url, tmp_path, out, *BOOKS, "--method")
        assert main([*command, "rag,direct"]) == 1
        assert [row["name"] for row in result(out)["rows"]] == ["rag.m"]
        assert "| rag | m |" in (out / "table.md").read_text()
        (out / "result.json").write_bytes(b'{"settings"')
        with (out / "rag.m" / "sessions.jsonl").open("ab") as file:
            file.write(b'{"questions":1,"sec')
        assert main([*command, "direct"]) == 0
        assert [row["name"] for row in result(out)["rows"]] == ["direct.m", "rag.m"]
        (out / "rag.m" / "result.json").write_bytes(b"")
        assert main([*command, "direct"]) == 0
        assert "rag.m/result.json is torn" in capsys.readouterr().err
        assert main([*command, "rag"]) == 0
    tokens = [row["generated_tokens"] for row in result(out)["rows"]]
    assert tokens == [50, 50], "no session was lost"


def test_a_set_may_have_a_budget_of_its_own(
    tmp_path: Path, retriever: Books, capsys: pytest.CaptureFixture[str]
) -> None:
    async def undecided(request: web.Request) -> web.Response:
        return chat("<think>hm</think><search>more")

    with served(undecided) as url:
        words = [*BOOKS, "--questions", "1", "--budget"]
        command = at_endpoint(url, tmp_path, tmp_path / "out", *words)
        assert main([*command, "2", "--budget", "hard=3"]) == 0
        row = result(tmp_path / "out")["rows"][0]
        assert [row["sets"][name]["searches"]["mean"] for name in ("easy", "hard")] == [2, 3]
        assert (row["settings"]["how"]["budget"], row["settings"]["budgets"]) == (2, {"hard": 3})
        assert main([*command, "2"]) == 2
        assert "begun with budgets = {'hard': 3}" in capsys.readouterr().err
        assert main([*command, "nq=3"]) == 2
        assert "expected a set of this table, easy, hard" in capsys.readouterr().err


def test_other_weights_under_the_same_path_are_refused(
    llama: Path, tmp_path: Path, retriever: Books, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    words = "--questions 1 --max-tokens 3 --method direct --model"
    command = [*questions(tmp_path), *words.split(), str(model), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    for file in model.glob("*.safetensors"):
        os.utime(file)
    assert main(command) == 0, "the same contents at another time"
    for file in model.glob("*.safetensors"):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    capsys.readouterr()
    assert main(command) == 2
    assert "direct.model was begun with weights =" in capsys.readouterr().err


def test_a_cache_that_is_none_and_an_index_that_cannot_be_loaded_are_said_before_any_question(
    tmp_path: Path,
    retriever: Books,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scholar, notes = Scholar(), tmp_path / "notes.txt"
    notes.write_text("no database " * 100)

    def no_encoder() -> Any:
        raise OSError("no/encoder is not a local folder")

    with served(scholar) as url:
        command = at_endpoint(url, tmp_path, tmp_path / "out", *BOOKS, "--method", "direct,rag")
        assert main([*command, "--cache", str(notes)]) == 2
        assert "notes.txt is no file of found passages" in capsys.readouterr().err
        monkeypatch.setattr(
            "coppice.tools.evaluating.qa.evaluation.opening_of",
            lambda retriever, threads: no_encoder,
        )
        assert main(command) == 2
        assert "--retriever: no/encoder is not a local folder" in capsys.readouterr().err
    assert scholar.requests == 0


def run_folder(folder: Path, model: Path, strategy: str) -> Path:
    (folder / "processes").mkdir(parents=True)
    settings = SchedulerConfig(strategy=strategy, budget=2, max_action_tokens=5)
    actor = ActorProcess("actor-0", str(folder), 0, str(model), ActorsConfig(max_context=1024))
    options = {"prompt": "short", "topk": 1}
    scheduler = SchedulerProcess(
        "s", str(folder), 0, str(model), "search_qa", options, "", "", 1, [], 6, settings
    )
    for name, process in (("actor-0", actor), ("scheduler", scheduler)):
        (folder / "processes" / f"{name}.json").write_bytes(msgspec.json.encode(process))
    return folder


@pytest.mark.slow
def test_a_tiny_model_and_runs_with_their_own_settings_are_measured(
    llama: Path, tmp_path: Path, retriever: Books
) -> None:
    chain, ppr = (run_folder(tmp_path / name, llama, name) for name in ("slate", "ppr"))
    out = tmp_path / "out"
    players = ["--run", str(chain), "--run", str(ppr), "--model", str(llama)]
    command = [*questions(tmp_path), "--questions", "2", *players]
    assert main([*command, *BOOKS, "--out", str(out), "--method", "search"]) == 0
    rows = {row["name"]: row for row in result(out)["rows"]}
    assert list(rows) == [f"search.{llama.name}", "search.slate-v0", "search.ppr-v0"]
    slate = rows["search.slate-v0"]["settings"]
    assert (slate["how"], slate["max_tokens"]) == ({"topk": 1, "budget": 2, "forced": True}, 5)
    assert rows["search.ppr-v0"]["settings"]["how"]["forced"] is False
    how = rows[f"search.{llama.name}"]["settings"]["how"]
    assert how == {"topk": 3, "budget": 4, "forced": True}
    for name, actions in (("search.slate-v0", 3), ("search.ppr-v0", 2)):
        for _, _, _, nodes in played(out / name):
            turns = sum(kind == "action" for kind, _, _ in nodes)
            assert turns == actions, "two turns, and the forced answer"
    measured = rows["search.slate-v0"]["sets"]["easy"]
    assert measured["response_tokens"]["mean"] <= 15
    assert measured["tokens_with_observations"]["mean"] > measured["response_tokens"]["mean"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "nobody to measure"),
        ("--method magic P", "expected some of cot,direct,ircot,iter_retgen,rag,search,search_o1"),
        ("--method direct --prompt short P", "no effect without the method search"),
        ("--method direct --no-forced P", "--forced has no effect without the method search"),
        ("--method cot --topk 2 P", "none of the methods retrieves"),
        ("--prompt nosuch P", "expected one of"),
        ("--retriever nowhere P", "holds no index"),
        ("--set x P", "expected NAME=PATH"),
        ("--set x=gone.jsonl P", "--set x=gone.jsonl: task file 'gone.jsonl' does not exist"),
        ("--set paper P", "the hub"),
        ("--set easy=x.jsonl P", "easy is given twice"),
        ("--set x=tests/tools P", "tests/tools is a folder"),
        ("--questions 0 P", "--questions 0"),
        ("--model smollm2-135m --version 1", "--version has no effect without --run"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    arguments: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    player = ["--endpoint", "http://localhost/v1", "--endpoint-model", "m"]
    given = [part for a in arguments.split() for part in (player if a == "P" else [a])]
    own = [] if "--retriever" in given or "cot" in given or "direct" in given else list(BOOKS)
    assert main([*given, *questions(tmp_path), *own, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "file",
    [*(f"processes/{name}.json" for name in ("scheduler", "actor-0", "retriever")),
     "weights/v000001/manifest.json"],
)  # fmt: skip
@pytest.mark.parametrize("content", ['{"name": "sch', '{"nonsense": 1}', None])
def test_a_file_of_a_run_that_is_torn_or_missing_is_named(
    tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str], file: str, content: str | None
) -> None:
    folder = run_folder(tmp_path / "run", llama, "chain")
    (folder / "weights" / "v000001").mkdir(parents=True)
    Manifest(1, "full", "d").write(folder / "weights" / "v000001")
    (folder / "processes" / "retriever.json").write_bytes(
        msgspec.json.encode(RetrieverProcess("retriever", "", RetrieverConfig("http://a")))
    )
    if content is not None:
        (folder / file).write_text(content)
    elif file.endswith("retriever.json"):
        return  # a run without one uses the built-in corpus
    else:
        (folder / file).unlink()
    out = tmp_path / "out"
    assert main(["--run", str(folder), *questions(tmp_path), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert file.removeprefix("processes/") in said
    assert "expected" in said
    assert said.count("\n") == 1
    assert not out.exists()
