"""Check that settings fit together. Contradictions and settings without effect are refused when a config is read."""

from pathlib import Path
from typing import Any

import msgspec

from actors.config import ActorsConfig, SGLangConfig
from actors.engines import registry as engines
from actors.environments import registry
from actors.environments.base import POLICY, Environment
from actors.environments.task_files import check_form, listed
from judges.config import SERVED, JudgesConfig, RetrieverConfig, uses_served_model, with_served_model
from judges.llm import PATIENCE_S
from judges.serve import KINDS, make_worker, service_of
from learner import corrections
from learner.config import LearnerConfig
from scheduler.config import UNJUDGED
from scheduler.tracking import TRACKERS
from tools.launching.method import Served, check_method
from tools.launching.settings import Config
from wire import storage
from wire.options import known


def check(config: Config) -> None:
    """Refuse settings that contradict each other or would silently do nothing. Raises ValueError or FileNotFoundError."""
    s, a, d = config.scheduler, config.actors, config.scheduler.dispatch
    if d.dead_after_s <= d.heartbeat_s:
        raise ValueError(
            f"scheduler.dispatch.dead_after_s = {d.dead_after_s}: expected more than scheduler.dispatch.heartbeat_s ="
            f" {d.heartbeat_s}, or every worker would be given up between two heartbeats"
        )
    if s.max_action_tokens >= a.max_context:
        raise ValueError(
            f"scheduler.max_action_tokens = {s.max_action_tokens} leaves no room for a prompt in"
            f" actors.max_context = {a.max_context}"
        )
    encoder = config.retriever.encoder
    if "/" not in encoder and not Path(encoder).is_dir():
        expected = [RetrieverConfig().encoder]
        known(f"retriever.encoder = {encoder!r}", encoder, expected, ", a folder, or a hub name with its owner")
    _check_exports(config)
    _check_shards(config)
    served = _check_judges(config)
    _check_engine(config)
    _check_environment(config, served)
    _check_learner(config.learner)
    _check_schedule(config)
    _check_cluster(config)
    if config.deterministic and (s.max_staleness or a.engine != "local"):
        raise ValueError(
            f"deterministic = true with scheduler.max_staleness = {s.max_staleness} and actors.engine = {a.engine!r}: expected 0 and 'local',"
            " since otherwise what is trained depends on time"
        )


def _check_cluster(config: Config) -> None:
    """Refuse a cluster of an unknown kind, and settings that a cluster cannot serve."""
    on, w = config.cluster.on, config.learner
    if on and on != "ray" and not on.startswith("ray://"):
        known(
            f"cluster.on = {on!r}",
            on,
            ["ray", "slurm", "kuberay"],
            " or ray://HOST:PORT; slurm and kuberay as --cluster alone",
        )
    if on and w.publish != "file" and w.publish_host == "127.0.0.1":
        raise ValueError(
            f"learner.publish = {w.publish!r} on a cluster with learner.publish_host = '127.0.0.1': expected an address that the actors reach"
        )
    if w.publish_url and w.publish == "memory":
        raise ValueError(
            "learner.publish_url with learner.publish = 'memory': there are no files to copy; expected 'file' or 'both'"
        )
    if w.publish_url:
        storage.check(w.publish_url)


def _check_exports(config: Config) -> None:
    """Check the names of the trackers and the address for Prometheus."""
    for name in config.scheduler.trackers:
        known(f"scheduler.trackers names {name!r}", name, TRACKERS)
    host, _, port = config.scheduler.prometheus.rpartition(":")
    if config.scheduler.prometheus and not (host and port.isdecimal() and int(port) < 2**16):
        raise ValueError(
            f"scheduler.prometheus = {config.scheduler.prometheus!r}: expected host:port, such as '127.0.0.1:9100', or port 0 for any free one"
        )


def _check_shards(config: Config) -> None:
    """Refuse several schedulers where their parts would not be equal, or where one of them would have nobody to work for it."""
    s, count = config.scheduler, config.scheduler.shards
    if count == 1:
        return
    for key in ("questions_per_update", "dynamic_sampling_budget"):
        if getattr(s, key) % count:
            raise ValueError(
                f"scheduler.{key} = {getattr(s, key)} with scheduler.shards = {count}: expected a multiple of {count}, since every scheduler"
                " gives an equal part of each update"
            )
    if config.actors.count < count:
        raise ValueError(
            f"actors.count = {config.actors.count} with scheduler.shards = {count}: expected at least {count}, one for each scheduler"
        )
    if not s.bind.endswith(":0"):
        raise ValueError(
            f"scheduler.bind = {s.bind!r} with scheduler.shards = {count}: expected port 0, since every scheduler needs a port of its own"
        )
    if config.deterministic:
        raise ValueError(
            f"deterministic = true with scheduler.shards = {count}: expected 1, since a scheduler that is started again alone grows its"
            " unfinished trees on"
        )


def doubts(config: Config) -> list[str]:
    """Warnings, printed when a run starts, about legal settings that do not do what their names promise."""
    w = config.learner
    doubts = corrections.load(w.correction, w.correction_options).doubts(w.steps, w.aggregation)
    if w.kl_estimator == "k1" and w.kl_coef:
        doubts.append(
            "learner.kl_estimator = 'k1': the gradient of this loss term is 0 in expectation; take 'k2' or 'k3', or learner.kl_reward_coef"
        )
    if config.actors.max_context > w.micro_tokens:
        doubts.append(
            f"actors.max_context = {config.actors.max_context} is more than learner.micro_tokens = {w.micro_tokens}: no path is divided over forwards"
            " or ranks, so the activations of a longer one must fit into one rank; raise micro_tokens if they do, or lower max_context"
        )
    s, urls = config.scheduler, config.actors.sglang.urls
    if urls and (s.top_p < 1 or s.top_k):  # only the actor, which asks it, knows whether a URL is a router
        doubts.append(
            f"scheduler.top_p = {s.top_p} and top_k = {s.top_k} with actors.sglang.urls = {urls}: a router among them would refuse every call; give each server's"
            " own URL, or set top_p = 1 and top_k = 0"
        )
    return doubts


def _check_engine(config: Config) -> None:
    """Refuse settings that the chosen engine, or the chosen way to reach it, would silently ignore."""
    a, publish, default = config.actors, config.learner.publish, ActorsConfig()
    g = a.sglang
    engines.check(a.engine, a.engine_options)
    if a.engine != "sglang":
        if g != default.sglang:
            raise ValueError(f"[actors.sglang] has no effect with actors.engine = {a.engine!r}: set it to 'sglang'")
        if publish == "memory" and a.engine == "local":
            raise ValueError("learner.publish = 'memory': the embedded engine reads files; expected 'file' (or 'both')")
        return
    for key in ("kv_cache_gib", "dtype"):
        if getattr(a, key) != getattr(default, key):
            raise ValueError(
                f"actors.{key} has no effect with actors.engine = 'sglang': SGLang's own settings are in"
                " [actors.sglang.arguments] (mem_fraction_static, dtype)"
            )
    if (g.way == "url") != bool(g.urls):
        raise ValueError(
            f"actors.sglang.way = {g.way!r} with actors.sglang.urls = {g.urls}: expected URLs with 'url', and only then"
        )
    if g.urls and a.count > len(g.urls):
        raise ValueError(
            f"actors.count = {a.count} and {len(g.urls)} actors.sglang.urls: expected one URL per actor, since each actor"
            " pauses and updates its own server"
        )
    if len(set(g.urls)) < len(g.urls):
        raise ValueError(
            f"actors.sglang.urls = {g.urls}: expected each URL once, since several actors would pause and update the same servers; a router"
            " spreads the requests of one actor"
        )
    idle = {"url": ("python", "arguments", "environment", "gpus")}.get(g.way, ("api_key_env",))
    for key in idle:
        if getattr(g, key):
            raise ValueError(f"actors.sglang.{key} has no effect with actors.sglang.way = {g.way!r}: remove it")
    if "SGLANG_RETURN_ORIGINAL_LOGPROB" in g.environment:
        raise ValueError(
            "actors.sglang.environment.SGLANG_RETURN_ORIGINAL_LOGPROB has no effect: log-probabilities are always those after"
            " temperature; remove it"
        )
    if g.weights in ("tensor", "distributed") and (publish == "file" or config.learner.lora.rank):
        raise ValueError(
            f"actors.sglang.weights = {g.weights!r} needs learner.publish = 'memory' or 'both', and learner.lora.rank = 0"
            " (adapters travel as files)"
        )
    _check_adapters(g, config.learner)


_ADAPTERS_AT_ONCE = {"max_loras_per_batch": 2, "max_loaded_loras": 3}
"""Running requests keep the adapter with which they began, new requests use the newest one, and a third may be loading."""


def _check_adapters(g: SGLangConfig, w: LearnerConfig) -> None:
    """Refuse arguments under which SGLang would refuse the learner's adapters at the first update, or ignore a part of them."""
    rank = w.lora.rank
    if rank and g.lora == "adapter" and w.train_vision:
        raise ValueError(
            "learner.train_vision with actors.sglang.lora = 'adapter': SGLang applies adapters to the language layers only; expected 'merged'"
        )
    if not rank or g.lora != "adapter":
        return
    if g.arguments.get("enable_lora") is False:
        raise ValueError(
            f"actors.sglang.arguments.enable_lora = False with learner.lora.rank = {rank}: remove it, or set actors.sglang.lora ="
            " 'merged'"
        )
    for key, value in {"max_lora_rank": rank, **_ADAPTERS_AT_ONCE}.items():
        limit = g.arguments.get(key)
        if isinstance(limit, int) and limit < value:
            raise ValueError(
                f"actors.sglang.arguments.{key} = {limit}: expected {value} or more for the adapters of learner.lora.rank = {rank}:"
                " raise or remove it"
            )


def with_adapters(config: Config) -> Config:
    """Add the arguments that a server which actors start needs for adapters. Their target layers follow from the model's files."""
    g, rank = config.actors.sglang, config.learner.lora.rank
    if config.actors.engine != "sglang" or g.way == "url" or g.lora != "adapter" or not rank:
        return config
    arguments = {"enable_lora": True, "max_lora_rank": rank} | g.arguments
    sglang = msgspec.structs.replace(g, arguments=arguments)
    return msgspec.structs.replace(config, actors=msgspec.structs.replace(config.actors, sglang=sglang))


def _check_environment(config: Config, served: Served) -> None:
    """Check the environment's options, the tasks' sources, and the services that episodes need."""
    data, s = config.data, config.scheduler
    environment = registry.load(data.environment, data.options)
    examined = registry.load(data.environment, data.options | s.evaluation.options)
    files = (data.train, data.heldout, data.corpus)
    if registry.makes_tasks(environment) and files != ("default", "default", "default"):
        raise ValueError(
            f"data.train, data.heldout and data.corpus have no effect: {data.environment!r} makes its own tasks"
        )
    if (environment.pictures or examined.pictures) and config.warm_start.steps:
        raise ValueError(
            f"warm_start.steps = {config.warm_start.steps}: {data.environment!r} shows pictures, which no warm start reads: expected 0"
        )
    _check_sources("data.train", data.train)
    _check_sources("data.heldout", data.heldout)
    _check_asked(config, served, environment, examined)
    check_method(config, served, environment)


def _check_asked(config: Config, served: Served, environment: Environment, examined: Environment) -> None:
    """Refuse a judge, an opponent or a speaker that neither the run nor [judges.outside] serves, because the run would wait for it forever."""
    s, outside = config.scheduler, config.judges.outside
    opponents = {**getattr(environment, "opponents", {}), **getattr(examined, "opponents", {})}
    asked = {f"judge.{s.judge}": f"scheduler.judge = {s.judge!r}"} if s.judge != UNJUDGED else {}
    if judge := environment.outcome_judge:
        asked[f"judge.{judge}"] = f"data.environment = {config.data.environment!r} has its outcomes of judge {judge!r}"
    asked |= {f"player.{name}": f"the environment's opponents name {name!r}" for name in opponents if name != "random"}
    speakers = {*environment.speakers, *examined.speakers} - {POLICY}
    asked |= {f"speaker.{name}": f"the environment speaks with {name!r}" for name in speakers}
    for service, setting in asked.items():
        kind, _, name = service.partition(".")
        if service in served or name in outside:
            continue
        own, unserved = KINDS[kind], {"judge": UNJUDGED, "player": "random", "speaker": POLICY}[kind]
        if name not in own:
            names = {service.partition(".")[2] for service in served if service.startswith(kind)}
            bring = f"; for one that tools/serve brings, add --set 'judges.outside=[\"{name}\"]'"
            known(setting, name, {*own, *names, unserved}, bring)
        raise ValueError(f"{setting}, which nobody serves: add --set 'judges.use.{name}={{}}' (or its section)")
    for name in outside:
        if not any(f"{kind}.{name}" in asked for kind in KINDS):
            known(
                f"judges.outside names {name!r}, which the run does not ask",
                name,
                [service.partition(".")[2] for service in asked],
            )


def _check_sources(key: str, sources: str | list[str]) -> None:
    """Check the form of a set's sources without reading them."""
    try:
        for source in listed(sources):
            if source != "default":
                check_form(source)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _check_judges(config: Config) -> Served:
    """Make the judges, opponents and speakers of [judges.use] once, as their processes will make them, to check their options."""
    s, served = config.scheduler, Served()
    _check_judge_model(config.judges)
    for spec, options in config.judges.use.items():
        worker = make_worker(spec, _with_url(spec, options, config.judges))
        served[service_of(worker)] = worker
        endpoint = options.get("endpoint")
        patience = endpoint.get("patience_s", PATIENCE_S) if isinstance(endpoint, dict) else 0.0
        if patience >= s.judge_deadline_s:
            raise ValueError(
                f"judges.use.{spec}.endpoint.patience_s = {patience:g}: expected less than scheduler.judge_deadline_s ="
                f" {s.judge_deadline_s:g}, or a missing reply would fail the call instead of being an invalid judgement"
            )
    return served


def _check_judge_model(judges: JudgesConfig) -> None:
    """Refuse [judges.model] if no judge asks for the served model, and a judge that asks for it if the section is missing."""
    asking = [spec for spec, options in judges.use.items() if uses_served_model(options)]
    if judges.model is None:
        if asking:
            raise ValueError(
                f"judges.use.{asking[0]}.endpoint.url = {SERVED!r} asks the run's own model: add [judges.model], or give a URL"
            )
        return
    if not asking:
        raise ValueError(
            f"[judges.model] has no effect: no endpoint of [judges.use] has url = {SERVED!r}; set one or remove the section"
        )


def _with_url(spec: str, options: dict[str, Any], judges: JudgesConfig) -> dict[str, Any]:
    """The options as the judge will get them, but for the port, which is chosen when the run starts."""
    try:
        return options if judges.model is None else with_served_model(options, "http://127.0.0.1/v1", judges.model)
    except ValueError as error:
        raise ValueError(f"judges.use.{spec}.{error}") from None


def _check_learner(w: LearnerConfig) -> None:
    """Check the settings of the correction, the aggregation and the ranks."""
    correction = corrections.load(w.correction, w.correction_options)
    if (w.aggregation == "constant") != (w.constant_tokens > 0):
        raise ValueError(
            f"learner.constant_tokens = {w.constant_tokens} with learner.aggregation = {w.aggregation!r}: 'constant' needs"
            " a number of tokens, the others take none"
        )
    if idle := correction.idle(w.steps):
        raise ValueError(
            f"learner.correction_options {idle} have no effect with one optimizer step per update, where current and proximal"
            " policy are equal: raise learner.epochs or learner.minibatches, or remove them"
        )
    _check_objective(w)
    if w.sharding != "replicate" and w.count == 1:
        raise ValueError(f"learner.sharding = {w.sharding!r} has no effect with learner.count = 1: remove it")
    if w.shard_ranks and w.sharding != "hybrid":
        raise ValueError(
            f"learner.shard_ranks = {w.shard_ranks} has no effect with learner.sharding = {w.sharding!r}: remove it, or set 'hybrid'"
        )
    if w.sharding == "hybrid" and (w.shards in (1, w.count) or w.count % w.shards) and (w.shard_ranks or not w.outside):
        raise ValueError(
            f"learner.sharding = 'hybrid' with learner.count = {w.count} and learner.shard_ranks = {w.shard_ranks}: expected a divisor of the"
            " ranks between 1 and all of them; 'fsdp' shards over all ranks, 'replicate' over none"
        )


def _check_objective(w: LearnerConfig) -> None:
    """Refuse settings of the KL, of the learning rate and of lengths that do nothing or count twice."""
    one_step, long = w.epochs * w.minibatches == 1, w.soft_overlong
    constant, decay = w.lr_schedule == "constant", w.decay_updates or w.lr_min_ratio
    kl, reward_kl = w.kl_coef > 0, w.kl_reward_coef > 0 or bool(w.scheme_options.get("kl_coef"))
    refused = [
        (w.target_kl and one_step, f"target_kl = {w.target_kl} has no effect with one optimizer step per update: remove it"),
        (w.adaptive_kl and not (kl or reward_kl), "adaptive_kl has no effect without a KL: set learner.kl_coef or kl_reward_coef"),
        (w.kl_estimator != "k3" and not kl, f"kl_estimator = {w.kl_estimator!r} has no effect with learner.kl_coef = 0: remove it"),
        (kl and w.kl_reward_coef, f"kl_coef = {w.kl_coef} and learner.kl_reward_coef = {w.kl_reward_coef}: expected 0 for one of them"),
        (constant and decay, "decay_updates and lr_min_ratio have no effect with learner.lr_schedule = 'constant': remove them"),
        (long and long.cache_tokens > long.max_tokens, f"soft_overlong = {long}: expected cache_tokens of at most max_tokens"),
    ]  # fmt: skip
    for applies, fault in refused:
        if applies:
            raise ValueError(f"learner.{fault}")


def _check_schedule(config: Config) -> None:
    """Check the decay of the learning rate, and the data of the warm start."""
    decay, updates = config.learner.decay_updates, config.scheduler.updates
    if 0 < decay < updates:
        raise ValueError(
            f"learner.decay_updates = {decay} leaves the smallest learning rate for the rest of scheduler.updates ="
            f" {updates}: expected 0 (just as many) or more"
        )
    critic, long = config.learner.critic, config.learner.soft_overlong
    if critic is not None and critic.policy_frozen_updates >= updates:
        raise ValueError(
            f"learner.critic.policy_frozen_updates = {critic.policy_frozen_updates}: expected less than scheduler.updates = {updates}, or the"
            " policy never trains"
        )
    if long is not None and long.max_tokens > config.scheduler.max_action_tokens:
        raise ValueError(
            f"learner.soft_overlong.max_tokens = {long.max_tokens} is never reached: expected at most scheduler.max_action_tokens ="
            f" {config.scheduler.max_action_tokens}"
        )
    if config.data.train != "default" and config.warm_start.steps and config.data.corpus != "default":
        raise ValueError(
            f"warm_start.steps = {config.warm_start.steps}: the built-in warm start knows the default data only;"
            " set warm_start.steps = 0 (and use tools/sft if your model needs one)"
        )
