"""Configurations that load, and those that are refused with a reason."""

import tomllib
from pathlib import Path

import msgspec
import pytest

from tools.config import ConfigError, convert, load

ROOT = Path(__file__).parent.parent.parent
DEFAULT = ROOT / "configs" / "slate-cpu.toml"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_every_shipped_config_loads_and_survives_being_saved(path: Path) -> None:
    config = load(path, [])
    assert convert(msgspec.json.decode(msgspec.json.encode(config)), []) == config


def test_the_7b_config_holds_the_papers_settings() -> None:
    config = load(ROOT / "configs" / "slate-7b.toml", [])
    s, w = config.scheduler, config.learner
    assert (s.k, s.budget, s.eta, s.bonus, s.questions_per_update, s.updates) == (5, 4, 0.7, 0.1, 32, 500)
    assert (w.lr, w.kl_coef, w.lora.rank, w.lora.alpha) == (1e-6, 0.001, 16, 64)
    assert (w.correction, w.correction_options) == ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.2})
    assert round(w.warmup_updates / s.updates, 3) == 0.284


def test_set_changes_a_key() -> None:
    config = load(DEFAULT, ["learner.lr=1e-6", "scheduler.selection=best-of-k", "learner.lora.rank=0"])
    assert config.learner.lr == 1e-6
    assert config.scheduler.selection == "best-of-k"
    assert config.learner.lora.rank == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.lrr=1", "learner.lrr = 1; did you mean learner.lr"),
        ("learner.lora.rnk=1", "learner.lora.rnk"),
        ("zzz=1", "expected one of"),
        ("learner.lr=fast", "learner.lr"),
        ("scheduler.k=0", "scheduler.k = 0"),
        ("scheduler.k=99", "actors.max_batch"),
        ("scheduler.max_staleness=-1", "synchronous"),
        ("scheduler.temperature=0", "scheduler.temperature"),
        ("scheduler.selection=best", "scheduler.selection"),
        ("actors.engine=vllm", "actors.engine"),
        ("learner.scheme=grpo", "needs scheduler.strategy = 'full'"),
        ("learner.scheme_options.dof=1", "takes"),
        ("learner.correction=tiss", "expected one of"),
        ("learner.correction_options.uper=2", "takes"),
        ("learner.correction_options.level=step", "expected one of"),
        ("learner.aggregation=constant", "learner.constant_tokens = 0"),
        ("learner.scheme_options.ddof=one", "a whole number"),
        ("learner.epochs=0", "learner.epochs = 0"),
        ("noequals", "expected key=value"),
        ("seed.x=1", "is a value"),
    ],
)
def test_a_bad_key_or_value_is_refused_with_its_path(override: str, message: str) -> None:
    tree = tomllib.loads(DEFAULT.read_text()) | {"seed": 0}
    with pytest.raises(ConfigError, match=message):
        convert(tree, [override])


def test_a_setting_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="no effect"):
        load(DEFAULT, ["scheduler.selection=best-of-k", "scheduler.eta=0.5"])
    with pytest.raises(ConfigError, match="no effect"):
        load(DEFAULT, ["learner.critic.lr=1e-5"])
    with pytest.raises(ConfigError, match="no effect"):
        load(DEFAULT, ["learner.correction=decoupled", "learner.correction_options.clip_high=0.3"])
    with pytest.raises(ConfigError, match="cross_entropy"):
        load(DEFAULT, ["scheduler.strategy=full", "learner.scheme=prime"])
    with pytest.raises(ConfigError, match="twice"):
        load(
            DEFAULT,
            [
                "scheduler.strategy=full",
                "learner.scheme=gae",
                "learner.scheme_options.kl_coef=0.1",
                "learner.kl_coef=0.1",
            ],
        )
    with pytest.raises(ConfigError, match="no effect"):
        load(DEFAULT, ["learner.sharding=fsdp", "learner.count=1"])


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.toml"):
        load(tmp_path / "nope.toml", [])
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match=r"bad\.toml is not TOML"):
        load(tmp_path / "bad.toml", [])
