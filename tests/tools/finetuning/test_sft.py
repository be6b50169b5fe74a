"""coppice sft: collecting, labelling, training."""

import json
import os
import re
import resource
import shlex
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import to_builtins
from transformers import AutoModelForCausalLM

from coppice.actors.environments.base import Task
from coppice.actors.environments.search_qa.environment import SearchQA, SearchState
from coppice.actors.environments.search_qa.environment import Step as PastStep
from coppice.common.process import locked
from coppice.judges.base import Judge
from coppice.judges.pprm import parse_final_score
from coppice.learner.fine_tune import Example, Recipe, Student, batch_of, rate, train
from coppice.research.judge_bench import main as bench
from coppice.research.judge_bench import parser as bench_parser
from coppice.research.judge_bench.measuring import judges_of
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.finetuning import labels, records
from coppice.tools.finetuning.command import main, parser
from coppice.tools.finetuning.judging import Answers, StepAnswer
from coppice.tools.finetuning.labels import MOST_DIFFERENCE, two_lines
from coppice.tools.finetuning.records import Labelled, RecordedStep, Trajectory
from coppice.tools.finetuning.training import read_rows, split
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import JudgedTurn, Judgement
from tests import tiny
from tests.tools.said import Patch, Said

QUESTION = "What is the capital of Chad?"
JUDGEMENT = "Analysis: good.\nScores: <final_score>3,4</final_score>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of four trees: two trajectories, an answer at once, a growing one, a question that is
    gone."""
    folder = tmp_path / "run"
    (folder / "processes").mkdir(parents=True)
    evidence = [{"title": "Chad", "field": "Capital", "value": "N'Djamena"}]
    task = {
        "id": "t1", "question": QUESTION, "golden_answers": ["N'Djamena"], "evidence": evidence,
        "data_source": "d",
    }  # fmt: skip
    (tmp_path / "train.jsonl").write_text(json.dumps(task) + "\n")
    process = {
        "environment": "search_qa", "options": {"prompt": "short", "topk": 2},
        "train": str(tmp_path / "train.jsonl"), "heldout": str(tmp_path / "none.jsonl"),
        "scheduler": {"budget": 3, "strategy_options": {"k": 2}},
    }  # fmt: skip
    (folder / "processes" / "scheduler.json").write_text(json.dumps(process))
    journal = Journal(folder / "journal.sqlite")
    trees = [("t1", [1, 2]), ("t1", [0]), ("t1", [1]), ("gone", [1])]
    for number, (name, searches) in enumerate(trees):
        tree = tree_of(number, name, searches)
        journal.start_tree(tree, number, 0)
        if number != 2:
            journal.close_tree(tree)
    journal.close()
    return folder


def tree_of(number: int, name: str, searches: Sequence[int]) -> Tree:
    """A tree whose trajectories search so often and then answer; the first rightly, the others
    wrongly."""
    tree, nothing = Tree(number, name), np.zeros(1, np.int32)
    root = tree.add(None, "prompt", nothing, "PROMPT", state=to_builtins(SearchState(QUESTION)))
    for trajectory, count in enumerate(searches):
        state, node = SearchState(QUESTION), root
        for i in range(count):
            node = tree.add(node, "action", nothing, action(i), chosen=True, trajectory=trajectory)
            past = PastStep(f"think {i}", f"query {i}", found(i))
            state = msgspec.structs.replace(state, steps=(*state.steps, past))
            node = tree.add(
                node, "observation", nothing, found(i), chosen=True, state=to_builtins(state)
            )
        tree.add(root, "action", nothing, "a sibling that was not chosen", trajectory=trajectory)
        scores = {"outcome": float(trajectory == 0)}
        said = "<think> k </think> <answer> a </answer>"
        tree.add(node, "action", nothing, said, chosen=True, trajectory=trajectory, scores=scores)
    return tree


def action(i: int) -> str:
    return f"<think> think {i} </think> <search> query {i} </search>"


def found(i: int) -> str:
    return f"\n<information>Doc 1(Title: T{i}) F: v</information>\n"


def test_a_trajectory_is_what_a_judge_sees(run: Path, tmp_path: Path, said: Said) -> None:
    told = said(main, "collect", run, "--out", tmp_path / "t.jsonl")
    first, second = records.read([tmp_path / "t.jsonl"], Trajectory[RecordedStep])
    assert (first.id, first.outcome, len(first.steps)) == ("run-0-0", 1, 1)
    assert (second.id, second.outcome, len(second.steps)) == ("run-0-1", 0, 2)
    assert (first.golden_answers, first.evidence) == (["N'Djamena"], ["Chad\nCapital: N'Djamena"])
    assert second.steps[1].context == f"{QUESTION}\n\n{action(0)}{found(0)}"
    turn = records.judged_turn(second, second.steps[1])
    state = SearchState(QUESTION, (PastStep("think 0", "query 0", found(0)),))
    environment = SearchQA("short", 2)
    task = Task("t1", second.question, second.golden_answers, second.evidence)
    expected = environment.judged(task, state, environment.read(state, action(1)), 2, 3)
    more = {"observation": found(1), "transcript": action(0) + found(0)}
    assert turn == msgspec.structs.replace(expected, **more)
    assert told.count("skipped: 1") == 3


def test_what_is_no_search_run_is_refused(run: Path, tmp_path: Path, refused: Said) -> None:
    out = ["--out", tmp_path / "t.jsonl"]
    assert "scheduler.json" in refused(main, "collect", tmp_path, *out)
    twin = shutil.copytree(run, tmp_path / "other" / "run")
    assert "each with a --prefix" in refused(main, "collect", run, twin, *out)
    for content in (b"", b"no database " * 100):
        (run / "journal.sqlite").write_bytes(content)
        assert "journal.sqlite is no journal of a run" in refused(main, "collect", run, *out)
    path = run / "processes" / "scheduler.json"
    game = json.loads(path.read_text()) | {"environment": "tictactoe", "options": {}}
    path.write_text(json.dumps(game))
    assert "expected one of search_qa" in refused(main, "collect", run, *out)


def test_no_command_writes_over_what_it_reads(run: Path, tmp_path: Path, refused: Said) -> None:
    labelled_file(tmp_path)
    records.write(tmp_path / "t.jsonl", [trajectory("x", 1)])
    t, l, link, report = (  # noqa: E741
        tmp_path / name for name in ("t.jsonl", "l.jsonl", "link.jsonl", "b.report.json")
    )
    link.symlink_to(l)
    report.symlink_to(l)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for command, words, message in (
        (main, f"rows {t} {l} --out {l}", f"--out {l} would write over {l}"),
        (main, f"rows {l} --out {link}", f"link.jsonl would write over {l}"),
        (bench, f"build {t} --exclude {l} --size 1 --out {l}", f"would write over {l}"),
        (bench, f"build {report} --size 1 --out {tmp_path}/b.jsonl", f"written with {report}, wo"),
        (main, f"collect {run} --out {run}/journal.sqlite", f"lies in {run}, which"),
        (main, f"collect {run} --out {tmp_path}/train.jsonl", "l would write over"),
    ):
        assert message in refused(command, *words.split())
        after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert after == before, words


def test_what_cannot_be_written_is_said_before_the_work(tmp_path: Path, refused: Said) -> None:
    records.write(tmp_path / "t.jsonl", [trajectory("x", 1)])
    command = f"label {tmp_path}/t.jsonl --judge-a {FLAKY} --judge-b pprm_rules --out".split()
    Flaky.asked, long = [], tmp_path / ("x" * 250)
    for out, message in (
        ("/nodir/l.jsonl", "--out /nodir/l.jsonl: there is no folder /nodir, make it"),
        ("/dev/null", "--out /dev/null is no ordinary file: name a file"),
        (long, f"--out {long} cannot be written (File name too long): name another file"),
    ):
        assert message in refused(main, *command, out)
    assert Flaky.asked == []
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]


def test_a_prefix_tells_runs_of_a_name_apart(run: Path, tmp_path: Path, refused: Said) -> None:
    records.write(tmp_path / "twin.jsonl", labelled_file(tmp_path))
    first, twin, out = (tmp_path / name for name in ("l.jsonl", "twin.jsonl", "o"))
    told = refused(main, "rows", first, twin, "--out", out)
    assert f"twin.jsonl:1: the id 'x' comes a second time, it is in {first}" in told
    assert main(["collect", str(run), "--out", str(out), "--prefix", "other-"]) == 0
    found = records.read([out], Trajectory[RecordedStep])
    assert [one.id for one in found] == ["other-run-0-0", "other-run-0-1"]


def trajectory(name: str, count: int) -> Trajectory[RecordedStep]:
    steps = [RecordedStep(context=QUESTION, response=f"{name} {i}") for i in range(1, count + 1)]
    return Trajectory(
        id=name, data_source="d", question=QUESTION, golden_answers=["g"], outcome=1, steps=steps
    )


def answered(path: Path, scores: dict[str, tuple[float | None, float | None]]) -> Answers:
    answers = Answers(path)
    for step, (one, two) in scores.items():
        answers.add(StepAnswer("a", step, one, JUDGEMENT))
        answers.add(StepAnswer("b", step, two, JUDGEMENT.replace("3,4", "1,2")))
    return answers


def test_steps_that_differ_by_more_than_the_limit_are_dropped(tmp_path: Path) -> None:
    pairs = {"x#1": (0.9, 0.5), "x#2": (0.7, 0.3), "x#3": (0.9, 0.49), "x#4": (None, 1.0)}
    pairs |= {"x#5": (5 / 6, 1 / 6), "y#1": (1.0, 0.0)}
    answers = answered(tmp_path / "a.jsonl", pairs)
    both = [trajectory("x", 5), trajectory("y", 1)]
    (kept,), counts = labels.labelled(both, answers, MOST_DIFFERENCE)
    scores = [(s.response, s.score_a, s.score_b) for s in kept.steps]
    assert scores == [("x 1", 0.9, 0.5), ("x 2", 0.7, 0.3)]
    assert [s.score for s in kept.steps] == pytest.approx([0.7, 0.5])
    assert (counts["labelled"], counts["scores differ by more than 0.4"]) == (2, 3)


def test_a_judgement_becomes_exactly_two_lines() -> None:
    long = "Analysis: first\n\n second\nScores:  <final_score> 2 , 6 </final_score> and more"
    assert two_lines(long) == "Analysis: first second\nScores: <final_score>2,6</final_score>"
    assert two_lines("Analysis: no score") == ""


class Flaky(Judge):
    """Scores one, and fails from its third step on as long as ``broken``."""

    name, columns, concurrency = "flaky", ("process",), 1
    broken = True
    asked: list[str] = []

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        Flaky.asked += [turn.response for turn in turns]
        if Flaky.broken and len(Flaky.asked) > 2:
            raise InfrastructureFault("the endpoint is gone")
        return [Judgement({"process": 1.0}, explanation=JUDGEMENT) for _ in turns]


FLAKY = f"{Flaky.__module__}:Flaky"
RULES = "--judge-a pprm_rules --judge-b pprm_rules"


def test_a_labelling_goes_on_after_a_failure(tmp_path: Path, said: Said) -> None:
    records.write(tmp_path / "t.jsonl", [trajectory("x", 3), trajectory("y", 2)])
    words = f"label {tmp_path}/t.jsonl --judge-a {FLAKY} --judge-b {FLAKY} --out {tmp_path}/l.jsonl"
    Flaky.asked, Flaky.broken = [], True
    assert "the endpoint is gone" in said(main, *words.split(), status=1)
    assert not (tmp_path / "l.jsonl").exists()
    Flaky.asked, Flaky.broken = [], False
    assert "5 labelled" in said(main, *words.split())
    assert len(Flaky.asked) == 2 * 5 - 2
    made = records.read([tmp_path / "l.jsonl"], Trajectory[Labelled])
    assert [len(one.steps) for one in made] == [3, 2]


def test_a_labelling_that_is_under_way_is_not_begun_twice(tmp_path: Path, refused: Said) -> None:
    records.write(tmp_path / "t.jsonl", [trajectory("x", 1)])
    command = f"label {tmp_path}/t.jsonl {RULES} --out {tmp_path}/l.jsonl".split()
    with locked(tmp_path / "l.answers.lock", "in use"):
        assert "l.jsonl is in use by another process" in refused(main, *command)
    assert not (tmp_path / "l.answers.jsonl").exists()
    assert main(command) == 0


def labelled_file(folder: Path) -> list[Trajectory[Labelled]]:
    good = (0.75, 0.75)
    answers = answered(folder / "a", {"x#1": good, "x#2": good, "x#3": good, "y#1": (0.75, 0.5)})
    trajectories = [trajectory("x", 3), trajectory("y", 1)]
    made, _ = labels.labelled(trajectories, answers, MOST_DIFFERENCE)
    records.write(folder / "l.jsonl", made)
    return made


def test_a_training_row_asks_as_the_judge_asks_and_answers_in_two_lines(tmp_path: Path) -> None:
    made = labelled_file(tmp_path)
    untold = msgspec.structs.replace(made[1].steps[0], target="")
    unlearnt = msgspec.structs.replace(made[1], steps=[untold])
    found, left = labels.judgement_rows([made[0], made[0], unlearnt])
    assert (len(found), left) == (3, {"without a judgement to learn": 1, "the same as another": 3})
    assert QUESTION in found[0].messages[1].content
    assert parse_final_score(found[0].completion) == (3, 4)


def test_balanced_rows_are_half_of_good_steps_and_half_of_bad_ones(tmp_path: Path) -> None:
    made = labelled_file(tmp_path)
    # the score is the mean of two judges, what is learnt is one's
    target = JUDGEMENT.replace("3,4", "1,4")
    low = [msgspec.structs.replace(step, target=target) for step in made[0].steps[:1]]
    records = [msgspec.structs.replace(made[0], steps=[*low, *made[0].steps[1:]])]
    found, left = labels.judgement_rows(records, balance=True)
    assert (len(found), left) == (2, {"more than the other kind": 1})
    assert len(labels.judgement_rows(records, most=2)[0]) == 2


def test_the_rate_rises_and_falls_as_its_schedule_says() -> None:
    recipe = Recipe(steps=10, batch=1, lr=1.0, warmup=2)

    def rates(**changes: Any) -> list[float]:
        return [rate(msgspec.structs.replace(recipe, **changes), step) for step in (0, 1, 2, 6, 9)]

    assert rates() == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert rates(schedule="linear") == pytest.approx([0.5, 1.0, 1.0, 0.5, 1 / 8])
    assert rates(schedule="cosine") == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0380602])
    assert rates(cooldown=4) == [0.5, 1.0, 1.0, 1.0, 0.25]


def test_every_epoch_sees_every_example_once_in_an_order_of_its_own() -> None:
    examples = [Example([i, i], 1) for i in range(6)]
    recipe = Recipe(steps=3, batch=4, lr=1.0, shuffle=3)
    seen = [e.tokens[0] for step in range(3) for e in batch_of(examples, recipe, step)]
    assert sorted(seen[:6]) == sorted(seen[6:]) == list(range(6))
    assert seen[:6] != seen[6:]


def examples_of(seed: int = 0) -> list[Example]:
    """Prompts with a common head and tails of their own, like the rows of a judge."""
    rng = np.random.default_rng(seed)
    head = rng.integers(0, 250, 20).tolist()
    made = []
    for tail in (5, 30, 12, 1, 9):
        tokens = head + rng.integers(0, 250, tail + 6).tolist()
        made.append(Example(tokens, len(tokens) - 6))
    return made + made[:1]


def gradient(folder: Path, batch: Sequence[Example], **changes: Any) -> tuple[float, torch.Tensor]:
    student = Student(folder, Recipe(steps=1, batch=len(batch), lr=1.0, **changes))
    student.compute = torch.float32
    loss = student.learn(batch)
    return loss, torch.cat([p.grad.flatten() for p in student.trained() if p.grad is not None])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("forward_tokens", [0, 60])
def test_packing_changes_no_gradient(kind: str, forward_tokens: int, tmp_path: Path) -> None:
    folder, batch = tiny.save(tmp_path / kind, kind), examples_of()
    loss, slope = gradient(folder, batch)
    packed, packed_slope = gradient(folder, batch, packing=True, forward_tokens=forward_tokens)
    assert packed == pytest.approx(loss, abs=1e-5)
    assert torch.allclose(packed_slope, slope, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_training_leaves_an_ordinary_folder(lora_rank: int, llama: Path, tmp_path: Path) -> None:
    recipe = Recipe(
        steps=30, batch=6, lr=1e-2, schedule="cosine", warmup=3, shuffle=0, packing=True,
        lora_rank=lora_rank,
    )  # fmt: skip
    examples, out = examples_of(), tmp_path / "out"
    losses = train(llama, examples, out, recipe, 1, held_out=examples[:2])
    assert losses.held_out is not None
    assert losses.held_out[1] < 0.7 * losses.held_out[0]
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([examples[0].tokens])).logits[0]
    places = range(examples[0].start - 1, len(examples[0].tokens) - 1)
    learnt = torch.log_softmax(logits, -1)[places, examples[0].tokens[examples[0].start :]]
    assert -learnt.mean().item() == pytest.approx(losses.held_out[1], rel=0.5)
    assert not (out / "adapter_config.json").exists()


def train_command(llama: Path, folder: Path, count: int = 3) -> list[str]:
    chat = [{"role": "system", "content": "Judge."}, {"role": "user", "content": "turn"}]
    texts = [f"Analysis: {'x' * (300 if i == 0 else 3)}{i}" for i in range(count)]
    rows = [{"messages": chat, "completion": text} for text in texts]
    (folder / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"train --model {llama} --rows {folder}/r.jsonl --out {folder}/o --threads 1".split()


def test_train_says_what_it_left_out_and_measures_before_and_after(
    llama: Path, tmp_path: Path, said: Said, refused: Said
) -> None:
    command = train_command(llama, tmp_path, 11)
    words = "--max-tokens 100 --epochs 2 --batch 3 --held-out 0.2"
    told = said(main, *command, *words.split())
    assert "1 of 11 rows are longer than 100 tokens and left out" in told
    assert told.count("held-out loss") == 2
    written = json.loads((tmp_path / "o" / "sft.json").read_text())
    assert (written["rows"], written["held_out_rows"], written["too_long"]) == (8, 2, 1)
    assert "exists" in refused(main, *command)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch 0", "argument --batch: 0: expected a whole number, at least 1"),
        ("--held-out 1", "argument --held-out: 1: expected a number, at least 0 and less than 1"),
        ("--max-tokens 5", "no row is left to learn from (3 read, 3 too long"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    arguments: str, message: str, llama: Path, tmp_path: Path, said: Said
) -> None:
    command = [*train_command(llama, tmp_path), *arguments.split()]
    assert message in said(main, *command, status=2)
    assert not (tmp_path / "o").exists()


def test_a_signal_in_a_training_ends_it_with_one_line(
    llama: Path, tmp_path: Path, said: Said, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Student, "learn", lambda *_: os.kill(os.getpid(), signal.SIGTERM) or 0.0)
    ending = signal.getsignal(signal.SIGTERM)
    told = said(main, *train_command(llama, tmp_path), "--steps", "1", status=130)
    assert signal.getsignal(signal.SIGTERM) is ending, "who calls main has the handler it had"
    assert told == "coppice sft train: stopped; nothing was saved\n"
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]


def test_a_full_disk_under_the_model_is_said(llama: Path, tmp_path: Path, refused: Said) -> None:
    command, limits = train_command(llama, tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        told = refused(main, *command, "--steps", "1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "coppice sft train: the trained model could not be written to" in told
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]


def test_the_rows_of_a_question_are_learnt_or_held_out_together(tmp_path: Path) -> None:
    groups = ["a", "b", "c", "d"] * 3 + ["", ""]
    examples = [Example([i], 1, group) for i, group in enumerate(groups)]
    learnt, held = split(examples, 0.4, 0)
    assert len(held) in (6, 7, 8)
    assert sorted(e.tokens[0] for e in [*learnt, *held]) == list(range(14))
    assert not {e.group for e in learnt if e.group} & {e.group for e in held if e.group}
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b", "group": "q"}\n')
    assert read_rows(tmp_path / "rows.jsonl", Text(str(tiny.save(tmp_path / "m"))))[0].group == "q"


def test_a_completion_ends_with_the_end_token_when_asked(llama: Path, tmp_path: Path) -> None:
    text, path = Text(str(llama)), tmp_path / "rows.jsonl"
    chat = '{"messages": [{"role": "user", "content": "a"}], "completion": "b"}'
    path.write_text(f'{{"prompt": "a", "completion": "b"}}\n\n{chat}\n')
    plain_row, chat_row = read_rows(path, text, [257])
    assert plain_row == chat_row
    assert chat_row.tokens[chat_row.start :] == [*text.encode("b").tolist(), 257]
    assert read_rows(path, text)[0].tokens == plain_row.tokens[:-1]
    path.write_text('{"prompt": "a", "completion": "b", "rendered": true}\n')
    (marked,) = read_rows(path, text)
    assert marked.tokens == text.encode("ab").tolist(), "a run's prompt is in the chat format"


def test_a_row_is_one_conversation(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for row in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}):
        second = json.dumps(row | {"completion": "b"})
        path.write_text(f'{{"prompt": "a", "completion": "b"}}\n{second}')
        with pytest.raises(ValueError, match=r"rows\.jsonl:2.*expected"):
            read_rows(path, Text(str(llama)))


@pytest.mark.parametrize("name", ["sft", "process-bench"])
def test_the_commands_of_the_docs_are_commands(name: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / f"{name}.md").read_text()
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    commands = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    begins = ("coppice sft", "coppice dev judge-bench")
    said = [shlex.split(line, comments=True) for line in commands if line.startswith(begins)]
    assert said
    for _, name, *arguments in said:
        if name == "sft":
            given = [found for found in arguments if not found.startswith("[") and found != "..]"]
            parser().parse_args(given)
        elif arguments[1] == "measure":
            judges_of(bench_parser().parse_args(arguments[1:]))
        else:
            bench_parser().parse_args(arguments[1:])
