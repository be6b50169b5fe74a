"""The one check of what schemes read against what strategies, judges and environments give."""

import re
from pathlib import Path

import pytest

from coppice.common.options import modules
from coppice.learner import schemes
from coppice.scheduler.growth import strategies
from coppice.tools.bootstrap import ROOT
from coppice.tools.launching import rules
from coppice.tools.launching.config import ConfigError, load
from coppice.tools.launching.method import bundles, mismatch
from tests.tools.said import Patch

CONFIGS = ROOT / "configs"
SLATE, PPR = CONFIGS / "slate-tiny.toml", CONFIGS / "ppr-cpu.toml"
GAME = CONFIGS / "vpr-tictactoe-cpu.toml"
ARPO, SPO = CONFIGS / "arpo-tiny.toml", CONFIGS / "spo-tiny.toml"
PICTURES = CONFIGS / "oprl-visualsokoban.toml"
FULL = ["scheduler.strategy=full"]
ADAPTERS = ["learner.lora={ rank = 16, alpha = 32.0 }", "learner.train_vision=true"]
SGLANG = ["actors.engine=sglang", "actors.kv_cache_gib=null", "actors.dtype=null"]
AGENT, SOTOPIA = CONFIGS / "agent-tiny.toml", CONFIGS / "oprl-sotopia.toml"
ENDS, OPTIONS = "data.options.outcome_judge", "learner.scheme_options"
EXAMINED = "scheduler.evaluation.options.retriever=true"
OPRL, PPO = "method=oprl", f"{OPTIONS}.base=ppo"
EACH_0 = "so every advantage would be 0"
GRPO, GIGPO = [*FULL, "learner.scheme=grpo"], [*FULL, "learner.scheme=gigpo"]
RULES, EXACT = "judges.use={exact_match={}, pprm_rules={}}", "scheduler.judge=exact_match"
TURNED = "learner.correction_options={lower=3, upper=2}"
PATIENT = "judges.use.pprm.endpoint={url='http://h/v1', model='m', patience_s=120.0}"
JUDGED_OTHERWISE = ["scheduler.judge=sudoku", "judges.use.sudoku={}"]
JUDGED_OTHERWISE += ["scheduler.evaluation.options={opponents={random=1.0}}"]


@pytest.mark.parametrize(
    ("path", "overrides", "said"),
    [
        (GAME, ["learner.scheme=reinforce_pp"], EACH_0),
        (SLATE, FULL, "one prefix, and scheduler.strategy = 'full' emits whole trajectories"),
        (SLATE, [*GRPO, "scheduler.judge=none"], "which nobody gives (scheduler.judge is 'none')"),
        (SLATE, ["scheduler.judge=pprm_rules", RULES], "judge 'pprm_rules' lacks"),
        (SLATE, ["scheduler.judge=none"], "= 'slate' without scores: name a judge"),
        (GAME, ["learner.scheme=mc_pr"], "parts that fit, such as those of method = 'mc-pr' or "),
        (ARPO, SGLANG, "strategy_options.top = 0"),
        (SPO, ["scheduler.strategy_options.branching=[1]", "actors.max_batch=2"], EACH_0),
        (SLATE, ["actors.engine_options={a=1}"], "actors.engine_options ['a'] have no effect"),
        (SLATE, ["learner.correction_options.dual_clip=0.5"], "expected a number, more than 1"),
        (SLATE, ["learner.correction=tis", TURNED], "lower = 3.0: expected at most upper = 2.0"),
        (GAME, ["scheduler.judge=slate_rules", "judges.use.slate_rules={}"], "it for 'tictactoe'"),
        (GAME, ["data.train=tasks.jsonl"], "makes its own tasks"),
        (GAME, ["data.options.history=2"], "no {past} placeholder"),
        (GAME, ["scheduler.strategy_options.bonus=0.5"], "have no effect without SLATE's"),
        (GAME, ["learner.scheme=outcome", "scheduler.strategy=ppr"], "outcomes a judge gives"),
        (GAME, [*JUDGED_OTHERWISE], "judges sudoku alone: data.environment is 'tictactoe'"),
        (GAME, ["scheduler.temperature=1e-4"], "temperature = 0.0001: expected at least 0.001"),
        (AGENT, ["method=grpo", f"{ENDS}=slate_rules"], "expected a judge with column 'outcome'"),
        (AGENT, ["method=grpo", f"{ENDS}=sudoku", "judges.use.sudoku={}"], "judges sudoku alone"),
        (SOTOPIA, ["scheduler.evaluation.options.judge=nobody"], "'nobody'"),
        (SLATE, [OPRL, "learner.prm.outcome=success"], "learner.prm.outcome = 'success'"),
        (SLATE, [OPRL, PPO, f"{OPTIONS}.variant=merged"], "has no critic's advantage"),
        (AGENT, ["data.options.retriever=false", EXAMINED], "only the evaluation would search"),
        (PPR, [PATIENT], "less than"),
        (PICTURES, ["warm_start.steps=10"], "shows pictures, which no warm start reads"),
        (PICTURES, ADAPTERS, "SGLang applies adapters to the language layers only"),
        (PPR, ["learner.scheme=turn_grpo"], "scheduler.strategy = 'ppr' makes none"),
    ],
)
def test_what_cannot_learn_is_refused(path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(path, overrides)


@pytest.mark.parametrize("word", bundles())
def test_one_word_brings_the_parts_of_its_method(word: str, tmp_path: Path) -> None:
    judge = bundles()[word]["scheduler"].get("judge", "slate_rules")
    config = load(
        written(tmp_path, f'method = "{word}"'),
        ["judges.use.exact_match={}"] + [f"judges.outside=['{judge}']"] * (judge != "none"),
    )
    assert config.method == word
    assert not [doubt for doubt in rules.doubts(config) if "instead of" in doubt]


def written(folder: Path, text: str) -> Path:
    (folder / "mine.toml").write_text(f'name = "mine"\n{text}\n')
    return folder / "mine.toml"


def test_what_a_config_states_stands_and_is_told(tmp_path: Path) -> None:
    text = 'method = "spo"\n[scheduler]\nstrategy = "full"\nstrategy_options = { k = 3 }'
    path = written(tmp_path, text + "\n[judges.use.exact_match]")
    assert load(path, []).scheduler.strategy_options == {"k": 3}
    config = load(path, ["learner.kl_coef=0.5", "method=vineppo", "learner.scheme=spo"])
    assert [doubt for doubt in rules.doubts(config) if "instead of" in doubt] == [
        "method vineppo with scheduler.strategy = 'full' instead of 'mc_value'",
        "method vineppo with learner.scheme = 'spo' instead of 'vineppo'",
    ]


def test_another_method_takes_away_what_was_stated_for_parts_that_it_does_not_have() -> None:
    config = load(ROOT / "configs" / "sao-tiny.toml", ["method=grpo"])
    s, w = config.scheduler, config.learner
    assert (s.strategy, s.strategy_options, w.scheme) == ("full", {"k": 5}, "grpo")
    assert (w.correction, w.correction_options, w.critic) == ("ppo_clip", {}, None)
    gpu = ROOT / "configs" / "slate-7b.toml"
    assert load(gpu, ["method=grpo"]).scheduler.judge == "none"


def test_every_scheme_has_a_strategy_that_serves_it_and_every_strategy_a_scheme() -> None:
    pairs = [
        (scheme, strategy)
        for scheme in modules(schemes.__name__)
        for strategy in modules(strategies.__name__)
        if not mismatch(schemes.load(scheme, {}).needs, strategies.load(strategy).gives)
    ]
    assert {scheme for scheme, _ in pairs} == set(modules(schemes.__name__))
    assert {strategy for _, strategy in pairs} == set(modules(strategies.__name__))


@pytest.mark.usefixtures("plug_ins")
def test_a_scheme_of_ones_own_must_declare_itself() -> None:
    mute = "mute_scheme does not declare itself: expected a function needs"
    with pytest.raises(ConfigError, match=mute):
        load(SLATE, ["learner.scheme=mute_scheme:advantages"])
    with pytest.raises(ConfigError, match="reads column 'made_up', which nobody gives"):
        load(SLATE, ["learner.scheme=own_scheme:advantages"])


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: Patch) -> None:
    body = "def advantages(table): return table.per_token(table.column('made_up'))\n"
    declared = (
        "from coppice.common.declared import SchemeNeeds\n"
        "def needs(**_): return SchemeNeeds(columns=frozenset({'made_up'}), group='step')\n"
    )
    (tmp_path / "mute_scheme.py").write_text(body)
    (tmp_path / "own_scheme.py").write_text(declared + body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_scheme_that_pushes_equal_questions_is_told_with_the_setting_that_ends_it() -> None:
    def told(path: Path, *overrides: str) -> list[str]:
        doubts = rules.doubts(load(path, list(overrides)))
        return [doubt for doubt in doubts if "though it compares nothing" in doubt]

    (doubt,) = told(SPO, "learner.scheme_options.form=paper")
    assert "set learner.scheme_options.form = 'released' to end that" in doubt
    group = ["learner.scheme=reinforce_pp", "learner.scheme_options.column=outcome"]
    assert "leave_out_equal = true" in told(SPO, *group)[0]
    assert not told(SPO, *group, "learner.scheme_options.leave_out_equal=true")
    assert not told(SPO)


def test_what_is_legal_and_not_what_its_name_promises_is_told() -> None:
    gspo = ["learner.correction=gspo", "learner.correction_options={}"]
    assert rules.doubts(load(SLATE, gspo)) == []  # it brings its own aggregation
    (doubt,) = rules.doubts(load(SLATE, [*gspo, "learner.aggregation=token"]))
    assert "the method is defined with 'trajectory', which 'auto' takes" in doubt
    for name, count in (("tis", 0), ("cispo", 1)):
        several = ["learner.correction_options={}", "learner.epochs=2"]
        doubts = rules.doubts(load(SLATE, [f"learner.correction={name}", *several]))
        assert len(doubts) == count
        assert all("nothing limits how far the policy moves" in doubt for doubt in doubts)


def test_only_candidates_of_one_prefix_must_decode_together() -> None:
    config = load(SPO, ["scheduler.strategy_options.branching=[6, 6, 6]", "actors.max_batch=8"])
    assert strategies.load("spo", config.scheduler.strategy_options).gives.size == 216
