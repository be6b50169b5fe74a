"""coppice evaluate qa: scorers, sets, cached retrieval, the table, and whole evaluations."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web

from coppice.actors.environments.task_files import load_tasks
from coppice.judges.config import RetrieverConfig
from coppice.judges.retriever.index import IndexManifest
from coppice.judges.retriever.worker import RetrieverProcess
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.evaluation.evaluation import Estimate
from coppice.scheduler.growth.tasks import held_out
from coppice.scheduler.growth.tree import Tree
from coppice.tools import evaluating
from coppice.tools.defaults.facts import VERSION
from coppice.tools.evaluating.examination import SampleMean
from coppice.tools.evaluating.qa.evaluation import _retriever, macro, parser
from coppice.tools.evaluating.qa.retrieval import CachedRetrieval, config_of
from coppice.tools.evaluating.qa.scoring import score
from coppice.tools.evaluating.qa.sets import HUB, PAPER, read_sets, subset
from coppice.tools.inspecting.dump import main as dump
from coppice.wire.messages import RetrieveRequest
from tests.tools.evaluating.test_evaluate import (
    Player,
    interrupting,
    played,
    result,
    run_folder,
    served,
)
from tests.tools.said import Patch, Said

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


def test_the_best_gold_counts() -> None:
    found = score(grown(("action", "<answer>old tower</answer>")), ["Paris", "tower"], 0)
    assert (found["em"], found["f1"]) == (0.0, pytest.approx(2 / 3))


def test_what_was_shown_to_the_policy_is_no_answer_of_its_own() -> None:
    notice = ("observation", "Write <answer> answer </answer>.")
    tree = grown(("action", "nonsense"), notice, ("action", "more"))
    found = score(tree, ["answer"], 0)
    assert (found["em"], found["answered"]) == (0.0, 0.0)


def test_the_original_scorer_demands_two_blocks_of_prompt_and_response() -> None:
    one, plain = ("action", "<answer>Rome</answer>"), "Question: capital of Italy?"
    example = "for instance <answer> Paris </answer>. " + plain
    assert score(grown(one, prompt=plain), ["Rome"], 0)["em_two_blocks"] == 0.0
    assert score(grown(one, prompt=example), ["Rome"], 0)["em_two_blocks"] == 1.0
    assert score(grown(("action", "?"), prompt=example), ["Paris"], 0)["em_two_blocks"] == 0.0


@pytest.mark.parametrize(("blocks", "value"), [(10, 1.0), (11, 0.25)])
def test_slates_scorer_gives_a_quarter_beyond_ten_tags(blocks: int, value: float) -> None:
    found = score(grown(("action", "<answer>x</answer>" * blocks)), ["x"], 0)
    assert (found["em"], found["em_slate"]) == (1.0, value)


def test_a_forced_answer_is_scored_closed_or_not_and_is_not_answered() -> None:
    for text in ("Rome</answer>", " Rome"):
        parts = [("action", "?"), ("observation", "\n<answer>"), ("action", text)]
        found = score(grown(*parts, forced=True), ["rome"], 2)
        assert (found["em"], found["answered"]) == (1.0, 0.0)


def test_the_macro_mean_is_of_sets_and_its_interval_of_theirs() -> None:
    sets = [{"em": SampleMean(0.5, 0.3, 10)}, {"em": SampleMean(0.1, 0.4, 1000)}]
    assert macro(sets) == {"em": Estimate(0.3, pytest.approx(0.25))}  # pyright: ignore
    assert macro([sets[0], {}]) == {}, "a measure that one set lacks has no mean"


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
    told = f"x: 6 of 7 rows cannot be used; the first: {path}:2: evidence"
    assert found.notes[0].startswith(told)


def test_the_built_in_questions_are_two_sets_by_hops(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = tmp_path / f"facts/v{VERSION}"
    folder.mkdir(parents=True)
    path = write(folder / "corpus.jsonl", {"a": "1", "b": "2"})
    two = write(tmp_path / "two.jsonl", {"c": "3"}, hops=2)
    (folder / "heldout.jsonl").write_text(path.read_text() + two.read_text())
    monkeypatch.setenv("COPPICE_CACHE", str(tmp_path))
    found = {s.settings.name: [t.id for t in s.tasks] for s in read_sets([], None, 0)}
    assert found == {"one_hop": ["a", "b"], "two_hop": ["c"]}


def test_a_set_of_the_hub_is_its_test_split_else_dev(tmp_path: Path, monkeypatch: Patch) -> None:
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
    none = r"no nosuch/test or dev or validation or train\.jsonl"
    with pytest.raises(FileNotFoundError, match=none):
        read_sets([f"x={HUB}/nosuch"], None, 0)


class Books:
    """A retrieval server that notes what it is asked. option: names it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.option: tuple[str, str]

    async def __call__(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked += [(query, body["topk"]) for query in body["queries"]]
        found = [
            [
                {"document": {"id": f"{query}-{i}", "contents": f'"T"\n{query} {i}'}, "score": 1.0}
                for i in range(body["topk"])
            ]
            for query in body["queries"]
        ]
        return web.json_response({"result": found})


@pytest.fixture
def books() -> Iterator[Books]:
    made = Books()
    with served(made) as url:
        made.option = ("--retriever", url)
        yield made


async def test_a_query_is_asked_once_by_retriever_and_topk(tmp_path: Path, books: Books) -> None:
    for identity, topk in (("a", 2), ("a", 2), ("a", 3), ("b", 2)):
        config, _ = config_of(books.option[1], 1)
        cached = CachedRetrieval(tmp_path / "cache.sqlite", identity, config)
        for _ in range(2):
            (found,) = (await cached.handle(RetrieveRequest(["q"], topk))).passages
            assert [p.id for p in found] == [f"q-{i}" for i in range(topk)]
        await cached.close()
    assert books.asked == [("q", 2), ("q", 3), ("q", 2)]


def scholar(request: Any) -> str:
    """Searches for the question, then answers with its last word; the protocol cuts the stop string
    off."""
    messages = request["messages"]
    word = messages[0]["content"].split("Question: ")[1].split("?")[0].split()[-1]
    searches = "</search>" in request["stop"] and len(messages) == 1
    return f"<think>k</think><search>{word}" if searches else f"<think>k</think><answer>{word}"


def questions(folder: Path) -> list[str]:
    """Two sets: of the first the scholar knows all, of the second a half."""
    easy = write(folder / "easy.jsonl", {f"what is w{i}": f"w{i}" for i in range(6)})
    hard = write(folder / "hard.jsonl", {f"what is w{i}": f"w{i % 2 * i}" for i in range(4)})
    return ["--set", f"easy={easy}", "--set", f"hard={hard}"]


def at_endpoint(url: str, folder: Path, out: Path, *more: str) -> list[str]:
    words = f"--endpoint {url} --endpoint-model m --concurrency 1 --attempts 1"
    return [*questions(folder), *words.split(), "--out", str(out), *more]


def test_a_table_has_methods_sets_and_their_means(tmp_path: Path, books: Books, said: Said) -> None:
    out = tmp_path / "out"
    with served(Player(scholar)) as url:
        command = at_endpoint(url, tmp_path, out, *books.option, "--method", "search,direct,rag")
        shown, again = said(main, *command), said(main, *command, "--json")
    found = result(out)
    assert json.loads(again) == found, "a finished evaluation is only reported again"
    assert shown.startswith((out / "table.md").read_text().strip())
    assert [row["name"] for row in found["rows"]] == ["search.m", "direct.m", "rag.m"]
    row = found["rows"][0]
    easy, hard = row["sets"]["easy"]["em"], row["sets"]["hard"]["em"]
    assert (easy["mean"], easy["n"], hard["mean"], hard["n"]) == (1.0, 6, 0.75, 4)
    assert row["macro"]["em"]["mean"] == 0.875
    assert row["macro"]["em"]["half"] == pytest.approx(math.hypot(easy["half"], hard["half"]) / 2)
    assert f"0.875 ±{row['macro']['em']['half']:.3f}" in shown
    assert (row["queries"], row["hits"]) == (10, 4), "both sets ask for w0 to w3"
    assert len(said(dump, out / "rag.m", "--heldout", "--all", "--json").splitlines()) == 10


def test_an_endpoint_is_asked_in_turns_and_then_in_words(tmp_path: Path, books: Books) -> None:
    def undecided(request: Any) -> str:
        last = "No steps are left" in request["messages"][-1]["content"]
        return "<answer>w0" if last else "<think>hm</think><search>more"

    player, out = Player(undecided), tmp_path / "out"
    with served(player) as url:
        words = "--questions 1 --budget 2".split()
        assert main(at_endpoint(url, tmp_path, out, *books.option, *words)) == 0
    third = player.seen[2]["messages"]
    assert [m["role"] for m in third] == ["user", "assistant", "user", "assistant", "user"]
    assert "Doc 1(Title: T) more 0" in third[2]["content"]
    (last,) = [nodes[-1] for i, _, _, nodes in played(out / "search.m") if i == 0]
    assert last[1] == "w0</answer>", "the opening that the journal holds already is not there twice"


def test_an_empty_first_reply_does_not_end_a_question(tmp_path: Path, books: Books) -> None:
    def silent_first(request: Any) -> str:
        return "" if len(request["messages"]) == 1 else "<think>k</think><answer>w0"

    out = tmp_path / "out"
    with served(Player(silent_first)) as url:
        words = "--questions 1 --method search".split()
        assert main(at_endpoint(url, tmp_path, out, *books.option, *words)) == 0
    assert result(out)["rows"][0]["failed"] == {}
    assert result(out)["rows"][0]["sets"]["easy"]["answered"]["mean"] == 1


def test_two_kinds_of_index_have_two_names(tmp_path: Path) -> None:
    manifest = IndexManifest("minilm", 384, 9, "0" * 64, "HNSW32", "efSearch=128")
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    config, name = config_of(str(tmp_path), 1, "efSearch=8")
    assert (config.encoder, config.search) == ("minilm", "efSearch=8")
    assert name.endswith("by minilm, HNSW32 efSearch=8")
    assert config_of(str(tmp_path), 1)[1].endswith("by minilm, HNSW32 efSearch=128")


def test_runs_that_searched_in_one_index_share_it(tmp_path: Path, refused: Said) -> None:
    manifest = IndexManifest("minilm", 384, 9, "0" * 64, "HNSW32", "efSearch=128")
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    runs = list[str]()
    for number, search in enumerate(("", "efSearch=128", "efSearch=8")):
        run = tmp_path / f"run{number}"
        (run / "processes").mkdir(parents=True)
        settings = RetrieverConfig(str(tmp_path), encoder="minilm", search=search)
        file = msgspec.json.encode(RetrieverProcess("retriever", str(run), settings))
        (run / "processes" / "retriever.json").write_bytes(file)
        runs += ["--run", str(run)]
    flags = parser().parse_args([*runs[:4], "--set", "x=y"])
    assert _retriever(flags)[1] == config_of(str(tmp_path), 1)[1]
    three = parser().parse_args([*runs, "--set", "x=y"])
    with pytest.raises(ValueError, match=r"efSearch=128 and in index .* HNSW32 efSearch=8: say"):
        _retriever(three)


def test_an_interruption_changes_no_result(tmp_path: Path, books: Books, said: Said) -> None:
    whole, parts = Player(scholar), Player(scholar, interrupting(4, failing=9))
    more = [*books.option, "--method", "search"]
    with served(whole) as url:
        assert main(at_endpoint(url, tmp_path, tmp_path / "whole", *more)) == 0
    asked = len(books.asked)
    with served(parts) as url:
        command = at_endpoint(url, tmp_path, tmp_path / "parts", *more)
        assert "go on with: coppice evaluate qa" in said(main, *command, status=130)
        assert main(command) == 1, "the server failed"
        assert main(command) == 0
    first, second = (played(tmp_path / name / "search.m") for name in ("whole", "parts"))
    assert first == second
    one, other = result(tmp_path / "whole")["rows"][0], result(tmp_path / "parts")["rows"][0]
    assert (one["sets"], one["macro"]) == (other["sets"], other["macro"])
    assert parts.requests == whole.requests + 2, "no answer that was kept was asked for again"
    assert len(books.asked) == 2 * asked, "nor was a search"


def test_rows_are_added_but_of_the_same_table(tmp_path: Path, books: Books, refused: Said) -> None:
    out, player = tmp_path / "out", Player(scholar)
    with served(player) as url:
        command = at_endpoint(url, tmp_path, out, *books.option, "--method")
        assert main([*command, "direct"]) == 0
        before = player.requests
        assert main([*command, "rag"]) == 0
        assert player.requests == before + 10
        assert [row["name"] for row in result(out)["rows"]] == ["direct.m", "rag.m"]
        for more, message in (
            (["rag", "--questions", "3"], "was begun with sets ="),
            (["rag", "--max-tokens", "7"], "rag.m was begun with max_tokens = 500, now it is 7"),
            (["cot,direct,rag", "--topk", "7"], "direct.m was begun with how ="),
        ):
            assert message in refused(main, *command, *more)
            assert not (out / "cot.m").exists(), "a refused command leaves nothing behind"


def test_a_question_that_fits_no_context_scores_zero(tmp_path: Path, said: Said) -> None:
    def too_long(number: int) -> web.Response | None:
        long = web.Response(status=400, text="context length exceeded")
        return long if number in (3, 9) else None

    with served(Player(scholar, too_long)) as url:
        told = said(main, *at_endpoint(url, tmp_path, tmp_path / "out", "--method", "direct"))
    row = result(tmp_path / "out")["rows"][0]
    assert row["sets"]["easy"]["em"]["mean"] == pytest.approx(5 / 6)
    assert row["sets"]["easy"]["em"]["n"] == 6
    assert list(row["failed"]) == ["easy/what is w2", "hard/what is w2"]
    assert "not finished, scored 0: easy/what is w2" in told


def test_a_finished_row_stays_in_the_table(tmp_path: Path, books: Books) -> None:
    out = tmp_path / "out"
    with served(Player(scholar, interrupting(0, failing=13))) as url:
        command = at_endpoint(url, tmp_path, out, *books.option, "--method")
        assert main([*command, "rag,direct"]) == 1
        assert [row["name"] for row in result(out)["rows"]] == ["rag.m"]
        (out / "result.json").write_bytes(b'{"settings"')
        assert main([*command, "direct"]) == 0
        assert [row["name"] for row in result(out)["rows"]] == ["direct.m", "rag.m"]
    tokens = [row["generated_tokens"] for row in result(out)["rows"]]
    assert tokens == [50, 50], "no session was lost"


def test_a_set_may_have_a_budget_of_its_own(tmp_path: Path, books: Books, refused: Said) -> None:
    with served(Player(lambda request: "<think>hm</think><search>more")) as url:
        words = [*books.option, "--questions", "1", "--budget"]
        command = at_endpoint(url, tmp_path, tmp_path / "out", *words)
        assert main([*command, "2", "--budget", "hard=3"]) == 0
        row = result(tmp_path / "out")["rows"][0]
        assert [row["sets"][name]["searches"]["mean"] for name in ("easy", "hard")] == [2, 3]
        assert "begun with budgets = {'hard': 3}" in refused(main, *command, "2")
        assert "expected a set of this table, easy, hard" in refused(main, *command, "nq=3")


def test_other_weights_of_a_path_are_refused(llama: Path, tmp_path: Path, refused: Said) -> None:
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    words = "--questions 1 --max-tokens 3 --method direct --model"
    command = [*questions(tmp_path), *words.split(), str(model), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    for file in model.glob("*.safetensors"):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "direct.model was begun with weights =" in refused(main, *command)


def test_no_question_is_asked_with_a_broken_cache_or_index(tmp_path: Path, refused: Said) -> None:
    player, notes, index = Player(scholar), tmp_path / "notes.txt", tmp_path / "index"
    notes.write_text("no database " * 100)
    index.mkdir()
    manifest = IndexManifest("./no/encoder", 4, 1, "0")
    (index / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    with served(player) as url:
        command = at_endpoint(url, tmp_path, tmp_path / "out", "--method", "direct,rag")
        command += ["--retriever", str(index)]
        assert "notes.txt is no file of" in refused(main, *command, "--cache", notes)
        told = refused(main, *command)
        assert "--retriever: " in told and "no/encoder" in told
    assert player.requests == 0


def searching_run(folder: Path, model: Path, strategy: str) -> Path:
    settings = SchedulerConfig(strategy=strategy, budget=2, max_action_tokens=5)
    return run_folder(folder, model, "search_qa", {"prompt": "short", "topk": 1}, settings)


@pytest.mark.slow
def test_runs_are_measured_with_their_settings(llama: Path, tmp_path: Path, books: Books) -> None:
    chain, ppr = (searching_run(tmp_path / name, llama, name) for name in ("slate", "ppr"))
    out = tmp_path / "out"
    players = ["--run", str(chain), "--run", str(ppr), "--model", str(llama)]
    command = [*questions(tmp_path), "--questions", "2", *players]
    assert main([*command, *books.option, "--out", str(out), "--method", "search"]) == 0
    rows = {row["name"]: row for row in result(out)["rows"]}
    assert list(rows) == [f"search.{llama.name}", "search.slate-v0", "search.ppr-v0"]
    slate = rows["search.slate-v0"]["settings"]
    assert (slate["how"], slate["max_tokens"]) == ({"topk": 1, "budget": 2, "forced": True}, 5)
    assert rows["search.ppr-v0"]["settings"]["how"]["forced"] is False
    measured = rows["search.slate-v0"]["sets"]["easy"]
    assert measured["response_tokens"]["mean"] <= 15
    assert measured["tokens_with_observations"]["mean"] > measured["response_tokens"]["mean"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "nobody to measure"),
        ("--method magic P", "expected some of cot,direct,ircot,iter_retgen,rag,search,search_o1"),
        ("--method direct --no-forced P", "--forced has no effect without the method search"),
        ("--retriever nowhere P", "holds no index"),
        ("--set x=gone.jsonl P", "--set x=gone.jsonl: task file 'gone.jsonl' does not exist"),
        ("--set paper P", "the hub"),
        ("--model smollm2-135m --version 1", "--version has no effect without --run"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(
    tmp_path: Path, refused: Said, monkeypatch: Patch, arguments: str, message: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    player = ["--endpoint", "http://localhost/v1", "--endpoint-model", "m"]
    given = [part for a in arguments.split() for part in (player if a == "P" else [a])]
    if not {"--retriever", "cot", "direct"} & set(given):
        given += ["--retriever", "http://books"]
    out = tmp_path / "out"
    assert message in refused(main, *given, *questions(tmp_path), "--out", out)
    assert not out.exists()


def test_a_file_of_a_run_that_is_torn_or_missing_is_named(
    tmp_path: Path, llama: Path, refused: Said
) -> None:
    folder, out = searching_run(tmp_path / "run", llama, "chain"), tmp_path / "out"
    (folder / "weights" / "v000001").mkdir(parents=True)
    command = (main, "--run", folder, *questions(tmp_path), "--out", out)
    assert "weights has no v000001/manifest.json" in refused(*command)
    (folder / "processes" / "scheduler.json").write_text('{"name": "sch')
    assert "scheduler.json" in refused(*command)
    assert not out.exists()
