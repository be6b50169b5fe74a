"""Configurations that load, and those that are refused with a reason."""

import json
import operator
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coppice.actors.environments import registry
from coppice.actors.environments.task_files import hub_set_of, listed
from coppice.common.atomic import as_json
from coppice.judges.config import JudgeModelConfig, JudgesConfig
from coppice.learner.config import CriticConfig, LearnerConfig, LoraConfig, PrmConfig
from coppice.scheduler.config import SchedulerProcess
from coppice.tools.defaults.facts import VERSION
from coppice.tools.launching import processes, set_up
from coppice.tools.launching.config import Config, ConfigError, convert, default, load
from coppice.tools.launching.memory import gpus_of
from coppice.tools.launching.rules import doubts
from coppice.tools.launching.settings import Assets
from tests.tools.said import Patch

ROOT = Path(__file__).parents[3]
DEFAULT = ROOT / "configs" / "slate-cpu.toml"
CLEAN = ["actors.dtype=auto", "actors.kv_cache_gib=1.0"]
SGLANG = [*CLEAN, "actors.engine=sglang"]
VLLM = [*CLEAN, "actors.engine=vllm"]
TURNS = [*SGLANG, "learner.count=2", "actors.sglang={colocated=true,gpus=1}"]
MEMORY = [*SGLANG, "learner.publish=both", "learner.lora.rank=0"]
URL = [*SGLANG, "actors.sglang.way=url", 'actors.sglang.urls=["http://h"]']
ARGUMENTS = "actors.sglang.arguments"
OWN = "actors.engine=engine_here:Own"
PROCESS = ["method=oprl", "learner.scheme_options={variant='process'}"]
DECOUPLED = ["learner.correction=decoupled", "learner.minibatches=1"]
HYBRID = ["learner.sharding=hybrid", "learner.count=4"]
KL_TWICE = ["method=search-r1", "learner.scheme_options.kl_coef=0.1", "learner.kl_coef=0.1"]
TALK = 'data={environment="sotopia",options={partner="PARTNER",judge="exact_match"}}'


@pytest.mark.second
@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_every_shipped_config_loads_for_its_hardware_and_survives_being_saved(path: Path) -> None:
    config = load(path, [])
    assert convert(msgspec.json.decode(msgspec.json.encode(config)), []) == config
    on_cpu = path.stem.endswith(("-cpu", "-tiny"))
    assert config.actors.engine == ("local" if on_cpu else "sglang")
    assert on_cpu or config.actors.sglang.gpus > 0
    for source in (*listed(config.data.train), *listed(config.data.heldout)):
        there = hub_set_of(source)
        assert source == "default" or (there is not None and there.folder and there.split), source


def test_a_run_is_given_all_its_sources(tmp_path: Path, llama: Path, monkeypatch: Patch) -> None:
    facts = tmp_path / "facts" / f"v{VERSION}"
    facts.mkdir(parents=True)
    (facts / "corpus.jsonl").touch()
    monkeypatch.setenv("COPPICE_CACHE", str(tmp_path))
    sources = ["data.train=['default', 'mine.jsonl']", f"model.name={llama}", "warm_start.steps=0"]
    backend = ["retriever.backend=http://localhost:1"]
    config = load(DEFAULT, [*sources, *backend])
    found = set_up.prepare(config)
    assert found.train == [f"{facts}/train.jsonl", "mine.jsonl"]
    assert found.heldout == f"{facts}/heldout.jsonl"
    processes.make(config, found, tmp_path)
    written = (tmp_path / "processes" / "scheduler.json").read_bytes()
    scheduler = msgspec.json.decode(written, type=SchedulerProcess)
    assert (scheduler.train, scheduler.heldout) == (found.train, found.heldout)
    most = json.loads((llama / "config.json").read_text())["max_position_embeddings"]
    with pytest.raises(ValueError, match=f"max_context = {most + 1}: expected at most the {most}"):
        set_up.prepare(load(DEFAULT, [*sources, *backend, f"actors.max_context={most + 1}"]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.learning_rate=1", r"did you mean learner.lr\?"),
        ("learner.correction_options.clip_low=nan", "clip_low = nan: expected a finite number"),
        ("learner.ddof=0", r"did you mean learner\.scheme_options\.ddof"),
        ("zzz=1", "expected one of"),
        ("scheduler.strategy_options.k=0", "= 0: expected a whole number, at least 1"),
        ("scheduler.strategy_options.k=99", "cannot decode together.*actors.max_batch"),
        ("learner.correction_options.uper=2", "takes"),
        ("learner.aggregation=constant", "learner.constant_tokens = 0"),
        ("scheduler.strategy_options.continuations=5", r"unknown to strategy 'slate'"),
        ("data.environment=tictactoe", "['topk']"),
        ("data.environment=no_such:Game", "No module named 'no_such'"),
        ("learner.betas=[0.9, 1.0]", r"learner\.betas\[1\] = 1\.0: expected `float` < 1\.0"),
        ("scheduler.dispatch.dead_after_s=2", "more than scheduler.dispatch.heartbeat_s = 2.0"),
        ("data.train=questions.json", "expected a .jsonl or .parquet path, or a hub"),
        ("data.heldout=['a.jsonl', 'b c']", "data.heldout: 'b c': expected"),
        ("data.train=['a.jsonl', 'a.jsonl']", "data.train: 'a.jsonl' is named twice"),
        ("data.train=[]", "names no source"),
        ("noequals", "expected key=value"),
        ("seed.x=1", "is a value"),
    ],
)
def test_a_bad_key_or_value_is_refused_with_its_path(override: str, message: str) -> None:
    tree = tomllib.loads(DEFAULT.read_text()) | {"seed": 0}
    with pytest.raises(ConfigError, match=message):
        convert(tree, [override])


_ANY = {"warm_start.seed", "learner.prm.threshold"}
"""Numbers that may be negative."""


def _numeric(tree: dict[str, Any], path: str = "") -> list[str]:
    keys: list[str] = []
    for name, value in tree.items():
        if isinstance(value, dict):
            keys += _numeric(value, f"{path}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            keys.append(f"{path}{name}")
    return keys


def test_every_number_of_the_config_has_a_range() -> None:
    lora = LoraConfig()
    learner = LearnerConfig(critic=CriticConfig(lora=lora), prm=PrmConfig(lora=lora))
    whole = Config("all", learner=learner, judges=JudgesConfig(model=JudgeModelConfig()))
    keys = _numeric(msgspec.to_builtins(whole))
    some = {"threads", "actors.kv_cache_gib", "judges.model.wait_s", "learner.prm.lora.rank"}
    assert some | _ANY <= set(keys)
    for key in set(keys) - _ANY:
        with pytest.raises(ConfigError, match=rf"config: {re.escape(key)} = -1(\.0)?: expected"):
            convert(msgspec.to_builtins(whole), [f"{key}=-1"])


def test_a_context_above_one_forward_is_warned_of_because_no_path_is_divided() -> None:
    changes = ["actors.max_context=4096", "learner.micro_tokens=2048"]
    assert "no path is divided over forwards or ranks" in str(doubts(load(DEFAULT, changes)))
    assert "max_context" not in str(doubts(load(DEFAULT, [*changes, "learner.micro_tokens=4096"])))


def test_ranks_from_outside_are_told_how_to_start(tmp_path: Path) -> None:
    config = load(DEFAULT, ["learner.sharding=hybrid", "learner.count=8", "learner.outside=true"])
    plan = processes.make(config, Assets("MODEL", "TRAIN", "HELDOUT", ""), tmp_path)
    assert not [process.name for process in plan if "learner" in process.name]
    assert "8 ranks" in processes.torchrun(config.learner, tmp_path)
    assert (tmp_path / "processes" / "learner.json").is_file()


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.toml does not exist; there are .*slate-tiny"):
        load(tmp_path / "nope.toml", [])
    (tmp_path / "bad.toml").write_text("a = = 1")
    (tmp_path / "latin.toml").write_bytes("# Größe".encode("latin-1"))
    for name, said in (
        ("bad.toml", r"bad\.toml is not TOML"),
        ("latin.toml", r"latin\.toml is not UTF-8"),
        (".", "cannot be read: Is a directory"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(tmp_path / name, [])


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return folder / f"{next(iter(files))}.toml"


def test_a_config_states_only_what_differs_from_the_one_it_extends(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    learner = "lr = 1e-3\nbetas = [0.5, 0.6]\nlora = { rank = 4, alpha = 8.0 }"
    far = f'name = "far"\n[learner]\n{learner}'
    write(tmp_path / "shared", far=far, near='extends="far.toml"\nseed=3\n[scheduler]\nbudget=2')
    own = "[learner]\nbetas = [0.7, 0.8]\nlora = { rank = 0 }"
    path = write(tmp_path, mine=f'extends = "shared/near.toml"\nname = "mine"\n{own}')
    config = load(path, ["scheduler.budget=3"])
    assert (config.name, config.seed, config.scheduler.budget) == ("mine", 3, 3)
    w = config.learner
    assert (w.lr, w.betas, w.lora.rank, w.lora.alpha) == (1e-3, (0.7, 0.8), 0, 8.0)
    assert "extends" not in json.loads(as_json(config))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('extends = "b.toml"', r"b\.toml, which .*a\.toml extends, does not exist"),
        ('extends = "."', r", which .*a\.toml extends, cannot be read: Is"),
        ('extends = "around.toml"', r"itself: .*a\.toml -> .*around\.toml -> .*a\.toml; remove"),
        ('extends = ["b.toml"]', r"extends = \['b\.toml'\]: expected the path of one TOML file"),
        ('[model]\nextends = "b.toml"', r"unknown key model\.extends"),
    ],
)
def test_a_base_is_refused_with_who_extends_it(text: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path, a=text, around='extends = "a.toml"')
    with pytest.raises(ConfigError, match=said):
        load(path, [])


_GRADED = """
from coppice.judges.base import Judge


class Graded(Judge):
    name, columns = "graded", ("think", "query", "answer")


class Outcome(Judge):
    name, columns = "outcome", ("outcome",)
"""


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "graded_here.py").write_text(_GRADED)
    (tmp_path / "engine_here.py").write_text(
        "class Own:\n    def __init__(self, model: str, pause_s: float = 1.0): ...\n"
    )
    (tmp_path / "raises_here.py").write_text("{}['key']")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("graded_here", "engine_here", "raises_here"):
        monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.mark.usefixtures("plug_ins")
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["learner.scheme=slat"], "learner.scheme = 'slat': did you mean 'slate'? expected one of"),
        (["method=grop"], "method = 'grop': did you mean 'grpo'? expected one of"),
        (["scheduler.judge=typo"], "coppice serve brings, add --set 'judges.outside=[\"typo\"]'"),
        (["scheduler.judge=slate_em"], "which nobody serves: add --set 'judges.use.slate_em={}'"),
        ([TALK.replace("PARTNER", "frozen")], "nobody serves: add --set 'judges.use.frozen={}'"),
        (["judges.use={slate_rules={}}"], "nobody serves: add --set 'judges.use.exact_match={}'"),
        (["method=grpo", "scheduler.judge=exact_match"], "gives 'outcome' for every action"),
        (["judges.outside=['graded']"], "'graded', which the run does not ask: expected one of"),
        (["judges.use.graded_here:Graded={}", "scheduler.judge=gradd"], "did you mean 'graded'?"),
        (["judges.use.graded_here:Outcome={}", "scheduler.judge=outcome"], "'query', 'think']"),
        (["actors.engine=engine_here:Onw"], "has no attribute 'Onw'; expected module:Class"),
        ([OWN, "actors.engine_options={ puase_s = 1 }"], "['puase_s'] unknown to engine_here:Own"),
        (['data={environment="gymnasium"}'], "gymnasium: expected ['id'], which have no default"),
        (["data.environment=raises_here:Game"], "= 'raises_here:Game': KeyError: 'key'"),
    ],
)
def test_a_name_that_cannot_serve_the_run_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(DEFAULT, overrides)


def test_the_documented_ways_to_an_own_judge_load(tmp_path: Path, monkeypatch: Patch) -> None:
    text = (ROOT / "docs" / "judges.md").read_text()
    (tmp_path / "graded.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "graded", raising=False)
    commands = re.findall(r"^coppice launch (.*scheduler\.judge=graded.*)$", text, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command)
        made = load(DEFAULT, [words[i + 1] for i, word in enumerate(words) if word == "--set"])
        assert made.scheduler.judge == "graded"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["scheduler.strategy_options={selection='best-of-k', eta=0.5}"], "no effect"),
        ([*DECOUPLED, "learner.correction_options.clip_high=0.3"], "no effect"),
        (["scheduler.strategy=full", "learner.scheme=prime"], "cross_entropy"),
        ([*PROCESS, "learner.reward_scale=10.0"], "reward_scale = 10.0 has no effect"),
        (KL_TWICE, "count it again"),
        (["learner.sharding=fsdp", "learner.count=1"], "no effect"),
        (["learner.sharding=fsdp", "learner.shard_ranks=2"], "shard_ranks = 2 has no effect with"),
        ([*HYBRID, "learner.shard_ranks=3"], "expected a divisor of the ranks"),
        (["cluster.on=ray", "learner.publish=both"], r"publish_host = '127\.0\.0\.1'"),
        (["actors.sglang.gpus=1"], "no effect with actors.engine = 'local'"),
        (["learner.publish=memory"], "the embedded engine reads files"),
        ([*SGLANG, "actors.kv_cache_gib=2.0"], "mem_fraction_static"),
        ([*SGLANG, "actors.sglang.way=url"], "expected URLs with 'url'"),
        ([*URL, "actors.count=2"], "expected one URL per actor"),
        ([*VLLM, "actors.sglang.gpus=1"], "no effect with actors.engine = 'vllm'"),
        ([*VLLM, "actors.kv_cache_gib=2.0"], "gpu_memory_utilization"),
        ([*VLLM, "learner.publish=memory"], "vLLM reads files"),
        ([*VLLM, "scheduler.top_p=0.9"], "vLLM does not report the tokens"),
        ([*VLLM, "actors.vllm.arguments.max_loras=1"], "max_loras = 1: expected 2 or more"),
        ([*SGLANG, "actors.sglang.weights=distributed"], "learner.publish = 'memory'"),
        ([*URL, 'actors.sglang.urls=["http://h", "http://h"]'], "expected each URL once"),
        ([*SGLANG, f"{ARGUMENTS}.max_lora_rank=8"], "max_lora_rank = 8: expected 16 or more"),
        ([*SGLANG, f"{ARGUMENTS}.max_loras_per_batch=1"], "_batch = 1: expected 2 or more"),
        ([*SGLANG, f"{ARGUMENTS}.enable_lora=false"], "= False with learner.lora.rank = 16"),
        ([*TURNS, "actors.sglang.gpus=2"], "as many GPUs of all actors as learner ranks"),
        ([*TURNS, "learner.publish=both"], "'both' with .* expected 'file'"),
        ([*TURNS, "learner.outside=true"], "so one machine"),
        (
            [*MEMORY, "scheduler.max_staleness=2"],
            "'both' and scheduler.max_staleness = 2: memory holds two versions",
        ),
        ([*TURNS, "actors.sglang.gpus=0", "actors.count=1", *URL[3:]], "so one machine"),
    ],
)
def test_a_setting_without_effect_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(DEFAULT, [*CLEAN, "actors.count=2", *overrides])


@pytest.mark.parametrize(
    ("overrides", "rank"),
    [
        ([], 16),
        (["learner.lora.rank=4", "actors.sglang.gpus=1"], 4),
        (["learner.lora.rank=0"], None),
        ([*URL, "actors.count=1"], None),
    ],
)
def test_an_actors_server_takes_the_adapters(overrides: list[str], rank: int | None) -> None:
    expected = {"enable_lora": True, "max_lora_rank": rank} if rank else {}
    assert load(DEFAULT, [*SGLANG, *overrides]).actors.sglang.arguments == expected


def test_a_server_that_reports_experts_chooses_them_outside_its_kernels() -> None:
    sets = [*SGLANG, "learner.lora.rank=0", "learner.routing_replay=true"]
    expected = {"enable_return_routed_experts": True, "moe_runner_backend": "triton"}
    assert load(DEFAULT, sets).actors.sglang.arguments == expected
    own = 'actors.sglang.arguments={moe_runner_backend = "cutlass"}'
    assert load(DEFAULT, [*sets, own]).actors.sglang.arguments["moe_runner_backend"] == "cutlass"


def test_a_vllm_server_takes_three_adapters_of_the_next_rank_that_it_knows() -> None:
    given = load(DEFAULT, [*VLLM, "learner.lora.rank=12"]).actors.vllm.arguments
    limits = {"max_lora_rank": 16, "max_loras": 2, "max_cpu_loras": 3}
    assert given == {"enable_lora": True, **limits}


def test_actors_take_the_gpus_behind_the_learners_and_take_turns_when_there_are_none() -> None:
    assert [gpus_of(i, 1, 2, list("0123")) for i in range(3)] == [["2"], ["3"], ["2"]]
    assert [gpus_of(i, 2, 2, list("012345")) for i in range(2)] == [["2", "3"], ["4", "5"]]
    assert [gpus_of(i, 1, 4, list("01")) for i in range(3)] == [["0"], ["1"], ["0"]]
    with pytest.raises(ValueError, match="gpus = 4"):
        gpus_of(0, 4, 1, list("01"))
    assert gpus_of(0, 0, 1, list("01")) == gpus_of(0, 1, 1, []) == []


def test_a_clusters_nodes_give_gpus_whatever_the_launchers_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = load(DEFAULT, [*SGLANG, "actors.sglang.gpus=2", "cluster.on=ray"])
    plan = processes.make(config, Assets("MODEL", "TRAIN", "HELDOUT", ""), tmp_path)
    actors = [one for one in plan if one.name.startswith("actor")]
    assert actors and not any("CUDA_VISIBLE_DEVICES" in one.environment for one in actors)


PAPERS: dict[str, dict[str, Any]] = {
    "slate-7b": {
        "scheduler.strategy_options": {"k": 5, "eta": 0.7, "bonus": 0.1},
        "scheduler.budget": 4, "scheduler.questions_per_update": 32,
        "learner.lr": 1e-6, "learner.kl_coef": 0.001, "learner.warmup_updates": 142,
    },
    **{
        f"vpr-{game}": {
            "scheduler.questions_per_update": 128, "scheduler.max_action_tokens": 4096,
            "learner.lr": 1e-6, "learner.warmup_updates": 5, "learner.betas": (0.9, 0.95),
            "learner.aggregation": "token", "learner.kl_coef": 0,
        }
        for game in ("tictactoe", "sudoku", "minesweeper")
    },
    **{
        f"ppr-{size}": {
            "scheduler.judge": "pprm", "scheduler.budget": 4,
            "scheduler.questions_per_update": 512, "scheduler.max_action_tokens": 500,
            "learner.scheme_options": {"normalisation": "constant"} | kl, "learner.lr": 1e-6,
            "learner.warmup_updates": 142, "learner.aggregation": "token",
            "learner.minibatches": 2, "learner.kl_coef": 0, "learner.entropy_coef": 0.001,
            "learner.critic.lr": 1e-5, "learner.critic.warmup_updates": 8,
        }
        for size, kl in {"3b": {"kl_coef": 0.001}, "7b": {}}.items()
    },
    "oprl-visualsokoban": {
        "scheduler.questions_per_update": 32, "scheduler.strategy_options": {"k": 8},
        "scheduler.max_action_tokens": 512, "learner.scheme": "oprl", "learner.lr": 5e-7,
        "learner.kl_coef": 0.0, "learner.prm.lr": 1e-6, "learner.prm.beta": 0.05,
    },
}  # fmt: skip
"""methods.md 1.8, 2.4, 3.2 to 3.6 and OPRL's appendix, by config."""
WORLDS = {
    "vpr-tictactoe": {"opponents": {"random": 0.5, "tictactoe_mcts": 0.5}, "second": 0.5},
    "vpr-sudoku": {"size": 9, "blanks": 40, "max_turns": 100, "terminate_on_wrong": False},
    "vpr-minesweeper": {"rows": 5, "columns": 5, "mines": 5, "centre_start": True, "max_turns": 25},
    "oprl-visualsokoban": {"pictures": True, "max_turns": 15},
}


@pytest.mark.parametrize("name", PAPERS)
def test_a_papers_config_holds_its_settings(name: str) -> None:
    config = load(ROOT / "configs" / f"{name}.toml", [])
    assert {key: operator.attrgetter(key)(config) for key in PAPERS[name]} == PAPERS[name]
    w = config.learner
    assert (w.correction, w.correction_options) == ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2})
    environment = registry.load(config.data.environment, config.data.options)
    expected = WORLDS.get(name, {})
    assert {key: getattr(environment, key) for key in expected} == expected


def test_a_plug_in_is_named_by_its_path(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "judges").mkdir()  # a folder that has the name of one of ours
    (tmp_path / "judges" / "mine.py").write_text(_GRADED)
    monkeypatch.chdir(tmp_path)
    load(DEFAULT, ["scheduler.judge=graded", 'judges.use."./judges/mine.py:Graded"={}'])


def test_a_part_that_is_taken_away_takes_its_options_along() -> None:
    sao = load(ROOT / "configs" / "sao-tiny.toml", ["learner.correction=null"])
    assert sao.learner.correction_options == {}


@pytest.mark.parametrize(
    "line",
    [
        "method=slate data.environment=other_python data.options.game=reasoning_gym"
        " data.options.arguments.name=gcd",
        'method=grpo data.environment="gymnasium" data.options.id=FrozenLake-v1',
        "method=grpo data.environment=textarena data.options.id=GuessTheNumber-v0"
        " data.options.actions=['[5]']",
    ],
)
def test_a_line_names_an_environment_of_another_library(line: str) -> None:
    for package in ("gymnasium", "textarena", "reasoning_gym"):
        pytest.importorskip(package)
    assert load(default(line.split()), line.split()).warm_start.steps
