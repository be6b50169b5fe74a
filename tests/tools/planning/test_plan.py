"""coppice plan: counts of trees by hand, the arithmetic of times, and what is refused."""

import json
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from coppice.learner.config import LearnerConfig, LoraConfig
from coppice.tools.launching.config import Config, load
from coppice.tools.planning import command, formulas
from coppice.tools.planning.formulas import Assumed, Dense
from coppice.tools.planning.growth import Work, grown
from tests.forks import ROOT
from tests.tools.said import Said

TINY = ROOT / "configs" / "slate-tiny.toml"
SIZES = Assumed(instruction=4, prompt=10, action=5, observation=3, turns=2)
TWO = ["scheduler.budget=2", "actors.count=1", "learner.count=1"]
GRPO = ["scheduler.judge=none", "learner.correction_options=null", "learner.scheme=grpo"]
GRPO += ["learner.scheme_options.column=outcome", "scheduler.strategy=full"]
GRPO += ["scheduler.strategy_options={k=2}"]
SLATE = "scheduler.strategy_options={k=2}"
SMALL = ["scheduler.questions_per_update=2", "scheduler.max_action_tokens=8"]
VINE = ["scheduler.strategy_options={continuations=3}"]


def one_tree(name: str, *changes: str) -> Work:
    return made(load(ROOT / "configs" / f"{name}.toml", [*TWO, *changes]))


def made(config: Config, trees: int = 1) -> Work:
    source, _ = command.made_up(config, SIZES)
    return grown(config, source, trees, 1)


def test_a_slate_tree_by_hand() -> None:
    work = one_tree("slate-tiny", SLATE)
    # prompt 10; two candidates of 5; one is continued by 3 of observation, and two candidates of 5
    # follow
    assert (work.nodes, work.calls, work.turns, work.sampled) == (6, 2, 4, 20)
    # the engine has not read an action's last token
    assert (work.prompt, work.prefilled) == (2 * 10 + 2 * 18, 10 + 4)
    assert (work.path, work.packed, work.forwarded) == (2 * 15 + 2 * 23, 10 + 2 * 5 + 3 + 2 * 5, 33)
    assert (work.longest, work.steps, work.targets) == (10, 2, 20)
    # each token reads itself and what is above
    depths = [*range(1, 16), *range(11, 16), *range(16, 24), *range(19, 24)]
    assert work.pairs == sum(depths)
    assert work.context == 2 * sum(range(11, 16)) + 2 * sum(range(19, 24))


def test_whole_trajectories_by_hand() -> None:
    work = one_tree("slate-tiny", *GRPO)
    assert (work.nodes, work.calls, work.turns, work.sampled) == (7, 4, 4, 20)
    # the second has its prompt from the cache, with what follows its end
    assert work.prefilled == 10 + 2 * 4
    assert (work.path, work.packed) == (76, 10 + 2 * 13)


def test_a_chain_and_its_continuations_by_hand() -> None:
    work = one_tree("vineppo-tiny", *VINE)
    assert (work.nodes, work.turns, work.path, work.packed) == (4, 2, 15 + 23, 23)
    assert work.sampled == 10 + 3 * 10 + 3 * 5
    assert work.calls == 2 + (1 + 3) + 1


def test_fresh_prompts_share_their_beginning() -> None:
    work = one_tree("vpr-sudoku-cpu")
    assert (work.sampled, work.path, work.packed) == (10, 2 * 15, 4 + 2 * (6 + 5))


def test_an_update_shares_the_instruction_over_its_trees() -> None:
    two = made(load(TINY, [*TWO, SLATE]), 2)
    assert two.packed == two.forwarded == 2 * 33 - 4
    each_actor = made(load(TINY, [*TWO, SLATE, "actors.count=2"]), 2)
    assert each_actor.prefilled - two.prefilled == 4
    each_minibatch = made(load(TINY, [*TWO, SLATE, "learner.minibatches=16"]), 16)
    assert each_minibatch.forwarded == 16 * 33


def test_a_server_reads_the_last_token_of_a_prompt_again() -> None:
    config, replace = load(TINY, [*TWO, *GRPO]), msgspec.structs.replace
    server = replace(config, actors=replace(config.actors, engine="sglang"))
    assert made(server).prefilled == made(config).prefilled + 1


@pytest.mark.second
@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs").glob("*.toml")))
def test_every_shipped_config_has_a_plan(name: str) -> None:
    config = load(ROOT / "configs" / f"{name}.toml", [*SMALL, "scheduler.budget=2"])
    work = made(config, 2)
    assert work.sampled >= work.longest > 0
    assert work.path >= work.packed > 0
    assert all(math.isfinite(value) for value in msgspec.structs.astuple(work))


MODEL = Dense(1, 8, 16, 2, 100, 1, 4)
ACTORS = {"sampled": 100, "longest": 50, "steps": 2, "context": 1000, "calls": 2, "prefilled": 10}
WORK = Work(path=400, forwarded=100, packed=100, **ACTORS)


def test_the_sizes_of_a_model_are_its_weights() -> None:
    seven = formulas.SHAPES["Qwen2.5-7B"]
    assert seven.weights == pytest.approx(7.616e9, rel=1e-3)  # its safetensors hold 7,615,616,512
    assert seven.cached(2) == 2 * 28 * 4 * 128 * 2
    assert MODEL.per_token == 8 * 4 * 2 * (2 + 1) + 3 * 8 * 16
    assert MODEL.weights == MODEL.per_token + 800
    with pytest.raises(ValueError, match="num_experts = 8: expected a dense model"):
        Dense.of({"num_experts": 8}, "Mixed")
    lacks = r"config\.json of Other: .*`num_hidden_layers`; expected a dense model"
    with pytest.raises(ValueError, match=lacks):
        Dense.of({"hidden_size": 8}, "Other")


def test_flops_of_training_are_six_a_weight_and_four_with_adapters() -> None:
    whole = LearnerConfig(kl_coef=0.0, lora=LoraConfig(rank=0))
    weights = 100 * MODEL.per_token
    assert formulas.learner_flops(whole, MODEL, WORK) == 6 * weights
    assert formulas.learner_flops(whole, MODEL, WORK, shared=False) == 4 * 6 * weights
    adapters = msgspec.structs.replace(whole, lora=LoraConfig(rank=16))
    assert formulas.learner_flops(adapters, MODEL, WORK) == 4 * weights
    again = msgspec.structs.replace(whole, gradient_checkpointing=True, kl_coef=0.1)
    assert formulas.learner_flops(again, MODEL, WORK) == (8 + 2) * weights


def test_what_waits_is_the_longest_of_actors_learner_and_latency() -> None:
    learner = LearnerConfig(kl_coef=0.0, lora=LoraConfig(rank=0))
    learner = msgspec.structs.replace(learner, count=2)
    flops = formulas.learner_flops(learner, MODEL, WORK)

    def timed(stale: int, **reach: float) -> formulas.Speed:
        assumed = msgspec.convert({"flops": 1e3, "wait": 0.0, **reach}, Assumed)
        return formulas.speed(learner, MODEL, WORK, assumed, stale, actors=1, most=64)

    slow = timed(1, learner_share=0.001)
    assert (slow.bound, slow.staleness) == ("learner", pytest.approx(1.0))
    assert slow.learn == pytest.approx(flops / 2 / 1e3 / 0.001)
    busy = timed(1, learner_share=1.0, prefill_share=0.01)
    assert busy.bound == "actors"
    assert busy.staleness == pytest.approx(busy.learn / busy.period)
    turns = timed(0)
    assert turns.period == pytest.approx(turns.generate + turns.learn)
    assert turns.staleness == 0
    assert timed(0, wait=7.0).period == pytest.approx(turns.period + 2 * 7.0)


def test_decoding_reads_the_weights_once_a_batch() -> None:
    reach = Assumed(flops=1e15, bandwidth=1e3, decode_share=1.0, wait=0.0)

    def seconds(most: int) -> float:
        return formulas.speed(LearnerConfig(), MODEL, WORK, reach, 0, 1, most).generate

    cache = 1000 * MODEL.cached(2) / 1e3
    assert seconds(1) - cache == pytest.approx(100 * 2 * MODEL.weights / 1e3)
    assert seconds(2) - cache == pytest.approx(50 * 2 * MODEL.weights / 1e3)
    assert seconds(64) == seconds(2)


def assume(*said: str) -> list[str]:
    return [part for one in said for part in ("--assume", one)]


SEVEN = str(ROOT / "configs" / "slate-7b.toml")
SMALL_PLAN = ["--set", "scheduler.questions_per_update=2"]
GPU_PLAN = ["--config", SEVEN, *SMALL_PLAN]
ALONE = [*GPU_PLAN, *assume("judge_gpus=0")]


def test_the_terminal_is_80_columns_wide_and_names_the_best_split(said: Said) -> None:
    out = said(command.main, *ALONE, "--gpus", "4", *assume("price=2.5", "turns=2.5"))
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if line.split()[:1] in (["1"], ["2"], ["3"])]
    periods = [float(row[5]) for row in rows]
    assert len(periods) == 3 and periods == sorted(periods)
    assert f"best: --set actors.count={rows[0][0]} --set learner.count={rows[0][1]}" in out


def test_a_split_that_does_not_fit_comes_last_and_says_why(said: Said) -> None:
    out = said(command.main, *ALONE, "--gpus", "2", *assume("memory=10"))
    assert "does not fit: an engine has 0 tokens of cache" in out
    assert "no split fits" in out


def test_a_judge_on_this_machine_has_gpus_of_its_own(said: Said) -> None:
    told = json.loads(said(command.main, *GPU_PLAN, "--gpus", "8", "--json"))
    assert [(one["gpus"], round(one["gib"])) for one in told["served"]] == [(2, 25)]
    assert {one["actors"] + one["ranks"] for one in told["splits"]} == {6}
    best = told["splits"][0]
    assert best["gpu_hours"] == pytest.approx(8 * best["hours"])
    most = [max(parts, key=parts.get) for parts in told["placed"]]
    assert most[6:] == 2 * ["judges' cache with weights"]


REFUSED = {
    "--gpu h1 --gpus 8": "--gpu 'h1': did you mean 'h100'",
    "--assume price=3": "--assume price has no effect without --gpus",
    "--gpus 0": "--gpus 0: expected one at least beside 0 of the retriever and 0 of judges",
    "--gpus 4 --assume learner_share=1.5": "learner_share = 1.5: expected a number, more than 0",
    "--assume turn=2": "['turn'] unknown to coppice plan, which takes ['instruction', ",
    "--assume turns=9": "expected at least 1, and at most scheduler.budget = 4",
    "--assume action=33": "action=33: expected at most scheduler.max_action_tokens = 32",
    "--set model.name=Nobody/Knows-1B": "expected --shape FOLDER",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_planned_is_said(arguments: str, refused: Said) -> None:
    known = () if "model.name" in arguments else ("--set", "model.name=Qwen/Qwen2.5-1.5B")
    told = refused(command.main, *known, *arguments.split())
    assert told.startswith("coppice plan: ") and REFUSED[arguments] in told


def test_a_shape_stands_for_a_model(tmp_path: Path, said: Said) -> None:
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    shape |= {"num_attention_heads": 4, "vocab_size": 1000, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    model = ("--set", "model.name=Nobody/Knows-1B")
    told = json.loads(said(command.main, "--shape", tmp_path, *model, "--json"))
    assert told["weights"] == 2 * (4 * 64 * 64 + 3 * 64 * 128) + 2 * 64 * 1000


@pytest.mark.second
def test_a_plan_loads_no_torch() -> None:
    code = "import sys, coppice.tools.planning.command; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "False\n"
