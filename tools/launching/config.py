"""One TOML an experiment -> typed structs. An unknown key, a wrong type or a value without effect is refused with its path.

A file may state only what differs from another: `extends = "slate-7b.toml"` at its top.
"""

import difflib
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal

import msgspec

from actors.config import ActorsConfig, SGLangConfig
from actors.environments import registry
from actors.environments.base import Environment
from actors.environments.task_files import check_form, listed
from judges.base import Judge
from judges.config import SERVED, JudgesConfig, RetrieverConfig, uses_served_model, with_served_model
from judges.llm import PATIENCE_S
from judges.players import Player
from judges.serve import BUILT_IN, PLAYERS, make_worker, service_of
from learner import corrections, schemes
from learner.config import LearnerConfig
from scheduler import strategies
from scheduler.config import UNJUDGED, SchedulerConfig
from tools.bootstrap import ROOT
from tools.defaults.settings import WarmStart
from tools.launching import ranges
from wire.atomic import as_json
from wire.options import known

DEFAULT_CONFIG = ROOT / "configs" / "slate-tiny.toml"


class ConfigError(ValueError):
    """A configuration that cannot be used: names the key, the value, what was expected."""


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [model]. name: "smollm2-135m", a Hugging Face folder or a hub id."""

    name: str = "smollm2-135m"


class DataConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [data]. "default" is the built-in corpus and its questions; else paths (JSONL, Parquet) or hub datasets.

    train, heldout: one source or a list of them, see actors/environments/task_files.py. environment: a name of
    actors/environments/registry.py, or module:Class. options: of its constructor. An environment that makes its own tasks (a game)
    reads no files.
    """

    train: str | list[str] = "default"
    heldout: str | list[str] = "default"
    corpus: str = "default"
    environment: str = "search_qa"
    options: dict[str, Any] = {}


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of an experiment. runs: the folder in which run folders are made. threads: of set-up work (index, warm start)."""

    name: str
    seed: int = 0
    runs: str = "runs"
    threads: int = 2
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    warm_start: WarmStart = WarmStart()
    scheduler: SchedulerConfig = SchedulerConfig()
    actors: ActorsConfig = ActorsConfig()
    judges: JudgesConfig = JudgesConfig()
    retriever: RetrieverConfig = RetrieverConfig()
    learner: LearnerConfig = LearnerConfig()


def load(path: Path, overrides: list[str]) -> Config:
    """The config of a TOML file, over the file that it ``extends``, with ``a.b=value`` overrides. Raises ConfigError."""
    return convert(_read(path), overrides)


def _read(path: Path, *heirs: Path) -> dict[str, Any]:
    """The tables of a TOML file over those of the file that its key ``extends`` names, by a path relative to its own folder.

    heirs: the files that extend this one, the nearest last.
    """
    named = f"config {path}" + (f", which {heirs[-1]} extends," if heirs else "")
    if path.resolve() in [heir.resolve() for heir in heirs]:
        raise ConfigError(f"{named} extends itself: {' -> '.join(map(str, (*heirs, path)))}; remove one `extends`")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{named} does not exist; there are {_shipped()}") from None
    except IsADirectoryError:
        raise ConfigError(f"{named} is a folder: expected a TOML file; there are {_shipped()}") from None
    except OSError as error:
        raise ConfigError(f"{named} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named} is not UTF-8 ({error}): save it in that encoding") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{named} is not TOML: {error}") from None
    if "extends" not in tree:
        return tree
    base = tree.pop("extends")
    if not isinstance(base, str):
        raise ConfigError(f"{named} has extends = {base!r}: expected the path of one TOML file, from {path.parent}")
    return _merged(_read(path.parent / base, *heirs, path), tree)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """base with changes: tables are merged key by key, every other value is replaced."""
    merged = dict(base)
    for key, value in changes.items():
        old = base.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _shipped() -> str:
    return ", ".join(str(path) for path in sorted(Path("configs").glob("*.toml")))


def saved(config: Config) -> bytes:
    """The config as a run folder keeps it."""
    return as_json(config)


def convert(tree: dict[str, Any], overrides: list[str]) -> Config:
    """The same from a table."""
    for override in overrides:
        _set(tree, override)
    try:
        _check_keys(tree, Config, "")
        config = msgspec.convert(tree, Config)
        check(config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config: {str(error).replace('`$.', '`')}") from None
    except ConfigError:
        raise
    except (ValueError, FileNotFoundError) as error:  # from where a name or an option of a plug-in is looked up
        raise ConfigError(f"config: {error}") from None
    return _with_adapters(config)


def _set(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override!r}: expected key=value, such as learner.lr=1e-6")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *path, last = key.strip().split(".")
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {override!r}: {part!r} is a value, not a section")
    tree[last] = value


def _check_keys(tree: dict[str, Any], kind: type, path: str) -> None:
    """Unknown keys, with the nearest known name, before msgspec checks types."""
    hints = typing.get_type_hints(kind)
    for key, value in tree.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, 1)
            guess = f"; did you mean {path}{near[0]!s}?" if near else f"; expected one of {sorted(hints)}"
            raise ConfigError(f"config: unknown key {path}{key} = {value!r}{guess}")
        if typing.get_origin(hints[key]) is Literal and isinstance(value, str):
            known(f"{path}{key} = {value!r}", value, typing.get_args(hints[key]))
        inner = _struct(hints[key])
        if inner is not None and isinstance(value, dict):
            _check_keys(value, inner, f"{path}{key}.")


def _struct(hint: Any) -> type | None:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, msgspec.Struct)), None)


def check(config: Config) -> None:
    """Values out of range, and settings that would silently do nothing."""
    if fault := ranges.fault(msgspec.to_builtins(config)):
        raise ConfigError(f"config: {fault}")
    s, a, d = config.scheduler, config.actors, config.scheduler.dispatch
    if d.dead_after_s <= d.heartbeat_s:
        raise ConfigError(
            f"config: scheduler.dispatch.dead_after_s = {d.dead_after_s}: expected more than scheduler.dispatch.heartbeat_s ="
            f" {d.heartbeat_s}, or every worker is given up between two beats"
        )
    if s.k > a.max_batch:
        raise ConfigError(
            f"config: scheduler.k = {s.k} samples cannot decode together in actors.max_batch = {a.max_batch}"
        )
    if s.max_action_tokens >= a.max_context:
        raise ConfigError(
            f"config: scheduler.max_action_tokens = {s.max_action_tokens} leaves no room for a prompt in"
            f" actors.max_context = {a.max_context}"
        )
    encoder = config.retriever.encoder
    if "/" not in encoder and not Path(encoder).is_dir():
        expected = [RetrieverConfig().encoder]
        known(f"retriever.encoder = {encoder!r}", encoder, expected, ", a folder, or a hub name with its owner")
    served = _check_judges(config)
    _check_environment(config, served)
    _check_engine(config)
    _check_effects(config, served)


def _check_engine(config: Config) -> None:
    """Settings of one engine, or of one way to it, that another would silently ignore."""
    a, publish, default = config.actors, config.learner.publish, ActorsConfig()
    g = a.sglang
    if a.engine == "local":
        if g != default.sglang:
            raise ConfigError("config: [actors.sglang] has no effect with actors.engine = 'local': set it to 'sglang'")
        if publish == "memory":
            raise ConfigError(
                "config: learner.publish = 'memory': the embedded engine reads files; expected 'file' (or 'both')"
            )
        return
    for key in ("kv_cache_gib", "dtype"):
        if getattr(a, key) != getattr(default, key):
            raise ConfigError(
                f"config: actors.{key} has no effect with actors.engine = 'sglang': SGLang's own settings are in"
                " [actors.sglang.arguments] (mem_fraction_static, dtype)"
            )
    if (g.way == "url") != bool(g.urls):
        raise ConfigError(
            f"config: actors.sglang.way = {g.way!r} with actors.sglang.urls = {g.urls}: expected URLs with 'url', and only then"
        )
    if g.urls and a.count > len(g.urls):
        raise ConfigError(
            f"config: actors.count = {a.count} and {len(g.urls)} actors.sglang.urls: expected a URL an actor, since each pauses and"
            " updates its own server"
        )
    if g.workers and (config.scheduler.top_p < 1 or config.scheduler.top_k):
        raise ConfigError(
            "config: scheduler.top_p and top_k behind a router (actors.sglang.workers): it drops the request for what they left, so"
            " log-probabilities would be of another distribution; set top_p = 1 and top_k = 0"
        )
    idle = {"url": ("python", "arguments", "environment", "gpus")}.get(g.way, ("workers", "api_key_env"))
    for key in idle:
        if getattr(g, key):
            raise ConfigError(
                f"config: actors.sglang.{key} has no effect with actors.sglang.way = {g.way!r}: remove it"
            )
    if g.workers and a.count > 1:
        raise ConfigError(
            f"config: actors.count = {a.count} with actors.sglang.workers = {g.workers}: expected 1, since each actor would pause and"
            " update the same servers; the router spreads what one actor sends"
        )
    if "SGLANG_RETURN_ORIGINAL_LOGPROB" in g.environment:
        raise ConfigError(
            "config: actors.sglang.environment.SGLANG_RETURN_ORIGINAL_LOGPROB has no effect: log-probabilities are always those after"
            " temperature; remove it"
        )
    if g.weights in ("tensor", "distributed") and (publish == "file" or config.learner.lora.rank):
        raise ConfigError(
            f"config: actors.sglang.weights = {g.weights!r} needs learner.publish = 'memory' or 'both', and learner.lora.rank = 0"
            " (adapters travel as files)"
        )
    _check_adapters(g, config.learner.lora.rank)


_ADAPTERS_AT_ONCE = {"max_loras_per_batch": 2, "max_loaded_loras": 3}
"""Running requests keep the adapter they began with beside the newest one's; the third is on its way."""


def _check_adapters(g: SGLangConfig, rank: int) -> None:
    """Arguments under which SGLang would refuse the learner's adapters, at the first update."""
    if not rank or g.lora != "adapter":
        return
    if g.arguments.get("enable_lora") is False:
        raise ConfigError(
            f"config: actors.sglang.arguments.enable_lora = False with learner.lora.rank = {rank}: remove it, or set actors.sglang.lora ="
            " 'merged'"
        )
    for key, value in {"max_lora_rank": rank, **_ADAPTERS_AT_ONCE}.items():
        given = g.arguments.get(key)
        if isinstance(given, int) and given < value:
            raise ConfigError(
                f"config: actors.sglang.arguments.{key} = {given}: expected {value} or more for the adapters of learner.lora.rank = {rank}:"
                " raise or remove it"
            )


def _with_adapters(config: Config) -> Config:
    """Arguments that a server needs to take adapters, where actors start it; which layers they change follows from the model's files."""
    g, rank = config.actors.sglang, config.learner.lora.rank
    if config.actors.engine != "sglang" or g.way == "url" or g.lora != "adapter" or not rank:
        return config
    arguments = {"enable_lora": True, "max_lora_rank": rank} | g.arguments
    sglang = msgspec.structs.replace(g, arguments=arguments)
    return msgspec.structs.replace(config, actors=msgspec.structs.replace(config.actors, sglang=sglang))


Served = dict[str, Judge | Player]
"""Judges and opponents of [judges.use] by the service that each offers."""


def _check_environment(config: Config, served: Served) -> None:
    """The environment's options, and the services its episodes need."""
    data, s = config.data, config.scheduler
    environment = registry.load(data.environment, data.options)
    examined = registry.load(data.environment, data.options | s.evaluation.options)
    if environment.rewarded_by_judge and s.judge == SchedulerConfig().judge:
        raise ConfigError(
            f"config: scheduler.judge = {s.judge!r} judges searches: data.environment = {data.environment!r} needs its oracle"
        )
    files = (data.train, data.heldout, data.corpus)
    if registry.makes_tasks(environment) and files != ("default", "default", "default"):
        raise ConfigError(
            f"config: data.train, data.heldout and data.corpus have no effect: {data.environment!r} makes its own tasks"
        )
    _check_sources("data.train", data.train)
    _check_sources("data.heldout", data.heldout)
    if s.strategy == "ppr" and not environment.outcome_judge:
        raise ConfigError(
            f"config: scheduler.strategy = 'ppr' is for search: data.environment = {data.environment!r} needs 'chain'"
        )
    if s.judge in registry.KNOWN and s.judge != data.environment and ":" not in data.environment:
        raise ConfigError(
            f"config: scheduler.judge = {s.judge!r} is the oracle of another game: data.environment = {data.environment!r}"
        )
    _check_asked(config, served, environment, examined)


def _check_asked(config: Config, served: Served, environment: Environment, examined: Environment) -> None:
    """Every judge and opponent that the run asks is served by it, or said to come from outside; else it would wait for it in vain."""
    s, outside = config.scheduler, config.judges.outside
    opponents = {**getattr(environment, "opponents", {}), **getattr(examined, "opponents", {})}
    asked = {f"judge.{s.judge}": f"scheduler.judge = {s.judge!r}"} if s.judge != UNJUDGED else {}
    if judge := environment.outcome_judge:
        asked[f"judge.{judge}"] = f"data.environment = {config.data.environment!r} has its outcomes of judge {judge!r}"
    asked |= {f"player.{name}": f"the environment's opponents name {name!r}" for name in opponents if name != "random"}
    for service, what in asked.items():
        kind, _, name = service.partition(".")
        if service in served or name in outside:
            continue
        own = BUILT_IN if kind == "judge" else PLAYERS
        if name not in own:
            names = {service.partition(".")[2] for service in served if service.startswith(kind)}
            bring = f"; for one that tools/serve brings, add --set 'judges.outside=[\"{name}\"]'"
            known(what, name, {*own, *names, *([UNJUDGED] if kind == "judge" else ["random"])}, bring)
        raise ValueError(f"{what}, which nobody serves: add --set 'judges.use.{name}={{}}' (or its section)")
    for name in outside:
        if f"judge.{name}" not in asked and f"player.{name}" not in asked:
            known(
                f"judges.outside names {name!r}, which the run does not ask",
                name,
                [service.partition(".")[2] for service in asked],
            )


def _check_sources(key: str, given: str | list[str]) -> None:
    """The form of a set's sources; nothing is read."""
    try:
        for source in listed(given):
            if source != "default":
                check_form(source)
    except ValueError as error:
        raise ConfigError(f"config: {key}: {error}") from None


def _check_judges(config: Config) -> Served:
    """The judges and opponents of [judges.use], made once as their processes will make them, and not kept."""
    s, served = config.scheduler, Served()
    _check_judge_model(config.judges)
    for spec, options in config.judges.use.items():
        worker = make_worker(spec, _with_url(spec, options, config.judges))
        served[service_of(worker)] = worker
        endpoint = options.get("endpoint")
        patience = endpoint.get("patience_s", PATIENCE_S) if isinstance(endpoint, dict) else 0.0
        if patience >= s.judge_deadline_s:
            raise ConfigError(
                f"config: judges.use.{spec}.endpoint.patience_s = {patience:g}: expected less than scheduler.judge_deadline_s ="
                f" {s.judge_deadline_s:g}, or a reply that does not come fails the call instead of being an invalid judgement"
            )
    return served


def _check_judge_model(judges: JudgesConfig) -> None:
    """The run serves a model to its judges exactly where one of them asks for it."""
    asking = [spec for spec, options in judges.use.items() if uses_served_model(options)]
    if judges.model is None:
        if asking:
            raise ConfigError(
                f"config: judges.use.{asking[0]}.endpoint.url = {SERVED!r} asks the run's own model: add [judges.model], or give a URL"
            )
        return
    if not asking:
        raise ConfigError(
            f"config: [judges.model] has no effect: no endpoint of [judges.use] has url = {SERVED!r}; set one or remove the section"
        )


def _with_url(spec: str, options: dict[str, Any], judges: JudgesConfig) -> dict[str, Any]:
    """The options as the judge will have them; the port is chosen at the start."""
    try:
        return options if judges.model is None else with_served_model(options, "http://127.0.0.1/v1", judges.model)
    except ValueError as error:
        raise ValueError(f"judges.use.{spec}.{error}") from None


def _check_learner(w: LearnerConfig) -> None:
    """Scheme, correction and the models they need; a setting without effect is refused."""
    scheme = schemes.load(w.scheme, w.scheme_options)
    corrections.load(w.correction, w.correction_options)
    for name, column in (("critic", "value"), ("prm", "prm")):
        if getattr(w, name) is not None and column not in scheme.needs:
            raise ConfigError(
                f"config: learner.{name} has no effect with learner.scheme = {w.scheme!r} and its options: remove the section"
            )
    if w.scheme == "prime" and (w.prm is None or w.prm.loss != "cross_entropy"):
        raise ConfigError(
            "config: learner.scheme = 'prime' trains its reward model with learner.prm.loss = 'cross_entropy': set it"
        )
    if w.scheme_options.get("kl_coef") and w.kl_coef:
        raise ConfigError(
            f"config: learner.scheme_options.kl_coef = {w.scheme_options['kl_coef']} (in the reward) and learner.kl_coef = {w.kl_coef}"
            " (in the loss) would count the KL twice: set one of them to 0"
        )
    if (w.aggregation == "constant") != (w.constant_tokens > 0):
        raise ConfigError(
            f"config: learner.constant_tokens = {w.constant_tokens} with learner.aggregation = {w.aggregation!r}: 'constant' needs"
            " a number of tokens, the others take none"
        )
    near = sorted({"clip_low", "clip_high", "dual_clip"} & set(w.correction_options))
    if w.correction == "decoupled" and w.epochs * w.minibatches == 1 and near:
        raise ConfigError(
            f"config: learner.correction_options {near} have no effect with one optimizer step an update, where current and proximal"
            " policy are equal: raise learner.epochs or learner.minibatches, or remove them"
        )
    if w.sharding == "fsdp" and w.count == 1:
        raise ConfigError("config: learner.sharding = 'fsdp' has no effect with learner.count = 1: remove it")


_JUDGED = ("slate", "slate_full", "ppr", "turn_grpo")
"""Schemes that read what a judge says of each turn."""


def _check_columns(s: SchedulerConfig, scheme: str, served: Served, rewarded_by_judge: bool) -> None:
    """A scheme that reads a judge's columns has a judge that gives them. rewarded_by_judge: the environment's reward is a column too."""
    if s.judge == UNJUDGED and (scheme in _JUDGED or s.strategy == "slate"):
        raise ConfigError(
            f"config: scheduler.judge = 'none' leaves learner.scheme = {scheme!r} without scores: name a judge"
        )
    columns = getattr(served.get(f"judge.{s.judge}"), "columns", ())
    components = {"reward"} if rewarded_by_judge else {"think", "query", "answer"}
    needed = {"ppr": {"process"}, "slate": components, "slate_full": components}.get(scheme, set[str]())
    if columns and not needed <= set(columns):
        raise ConfigError(
            f"config: scheduler.judge = {s.judge!r} gives {sorted(columns)}, learner.scheme = {scheme!r} reads {sorted(needed)}: name"
            " another judge"
        )


_GROUPED = ("grpo", "rloo", "gigpo", "prime", "oprl")
"""Schemes that compare several trajectories of one task."""


def _check_strategy(strategy: str, scheme: str) -> None:
    """A scheme needs the columns and the groups its strategy gives."""
    needed = {"slate": "slate", "mc_pr": "mc_value", "ppr": "ppr"}.get(scheme, "")
    if needed and strategy != needed and not (scheme, strategy) == ("slate", "full"):
        raise ConfigError(f"config: learner.scheme = {scheme!r} needs scheduler.strategy = {needed!r}")
    if strategy == "slate" and scheme != "slate":
        raise ConfigError(
            f"config: learner.scheme = {scheme!r} compares whole trajectories: it needs scheduler.strategy = 'full'"
        )
    if strategy == "ppr" and scheme not in (*_GROUPED, "ppr", "gae", "outcome", "reinforce_pp"):
        raise ConfigError(
            f"config: learner.scheme = {scheme!r} reads rewards that scheduler.strategy = 'ppr' does not give: expected 'ppr', or 'gae',"
            " 'outcome' or 'reinforce_pp' (with scheme_options.column = 'outcome') for the outcome alone"
        )
    if strategy == "mc_value" and scheme != "mc_pr":
        raise ConfigError(
            f"config: scheduler.strategy = 'mc_value' has no effect with learner.scheme = {scheme!r}: use 'chain', or 'mc_pr'"
        )
    if strategy in ("chain", "ppr") and scheme in _GROUPED:
        raise ConfigError(
            f"config: learner.scheme = {scheme!r} compares trajectories of one task: it needs scheduler.strategy = 'full'"
        )


def _check_effects(config: Config, served: Served) -> None:
    s, w = config.scheduler, config.learner
    strategies.load(s.strategy)
    default = SchedulerConfig()
    if (s.selection == "best-of-k" or s.strategy != "slate") and s.eta != default.eta:
        setting = (
            "scheduler.selection = 'best-of-k'" if s.strategy == "slate" else f"scheduler.strategy = {s.strategy!r}"
        )
        raise ConfigError(f"config: scheduler.eta = {s.eta} has no effect with {setting}: remove it")
    if s.strategy != "slate" and s.selection != default.selection:
        raise ConfigError(
            f"config: scheduler.selection has no effect with scheduler.strategy = {s.strategy!r}: remove it"
        )
    if s.strategy in ("chain", "mc_value", "ppr") and s.k != default.k:
        raise ConfigError(
            f"config: scheduler.k = {s.k} has no effect with scheduler.strategy = {s.strategy!r} (one trajectory a task): remove it"
        )
    if s.strategy != "mc_value" and s.continuations != default.continuations:
        raise ConfigError(
            f"config: scheduler.continuations has no effect with scheduler.strategy = {s.strategy!r}: remove it"
        )
    if s.bonus != default.bonus and (s.strategy == "ppr" or s.judge == UNJUDGED):
        raise ConfigError(f"config: scheduler.bonus = {s.bonus} has no effect without SLATE's rewards: remove it")
    _check_learner(w)
    _check_strategy(s.strategy, w.scheme)
    environment = registry.load(config.data.environment, config.data.options)
    _check_columns(s, w.scheme, served, environment.rewarded_by_judge)
    if 0 < w.decay_updates < s.updates:
        raise ConfigError(
            f"config: learner.decay_updates = {w.decay_updates} leaves a learning rate of 0 for the rest of scheduler.updates ="
            f" {s.updates}: expected 0 (no decay) or at least as many"
        )
    if config.data.train != "default" and config.warm_start.steps and config.data.corpus != "default":
        raise ConfigError(
            f"config: warm_start.steps = {config.warm_start.steps}: the built-in warm start knows the default data only;"
            " set warm_start.steps = 0 (and use tools/sft if your model needs one)"
        )
