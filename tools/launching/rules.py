"""Settings must fit together: contradictions and settings without effect are refused."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from coppice.actors.config import ServedConfig
from coppice.actors.engines import base as engines
from coppice.actors.environments import registry
from coppice.actors.environments.base import POLICY, Environment
from coppice.actors.environments.task_files import check_form, listed
from coppice.common.options import check_choice
from coppice.judges.config import SERVED, RetrieverConfig, uses_served_model, with_served_model
from coppice.judges.llm import PATIENCE_S
from coppice.judges.serve import KINDS, make_worker
from coppice.learner import schemes
from coppice.learner.update import corrections
from coppice.learner.update.plan import plan_of
from coppice.scheduler.config import UNJUDGED
from coppice.scheduler.ledger.journal import MOST_JOURNALS
from coppice.scheduler.telemetry.tracking import TRACKERS
from coppice.tools.launching import method
from coppice.tools.launching.method import Served
from coppice.tools.launching.settings import ADAPTERS_AT_ONCE, VLLM_ADAPTERS, Config, idle, setting

_UNSERVED = {"judge": UNJUDGED, "player": "random", "speaker": POLICY}
"""What a config may name of each kind although no worker serves it."""


def check(config: Config) -> None:
    """Refuse settings that contradict each other or would silently do nothing. Raises ValueError or
    FileNotFoundError."""
    for fault in _faults(config):
        raise ValueError(fault)


def _faults(config: Config) -> Iterator[str]:
    s, a, encoder = config.scheduler, config.actors, config.retriever.encoder
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.name):
        letters = "a letter or digit, then letters, digits, '.', '_' and '-'"
        yield f"name = {config.name!r}: expected {letters}, for it names folders and jobs"
    if s.dispatch.dead_after_s <= s.dispatch.heartbeat_s:
        least = setting(config, "scheduler.dispatch.heartbeat_s")
        yield f"{setting(config, 'scheduler.dispatch.dead_after_s')}: expected more than {least}"
    for key, heat in {"": s.temperature, "evaluation.": s.evaluation.temperature}.items():
        if 0 < heat < 1e-3:
            yield f"scheduler.{key}temperature = {heat}: expected at least 0.001"
    if s.max_action_tokens >= a.max_context:
        limit = setting(config, "actors.max_context")
        yield f"{setting(config, 'scheduler.max_action_tokens')}: expected less than {limit}"
    if "/" not in encoder and not Path(encoder).is_dir():
        names, others = [RetrieverConfig().encoder], ", a folder, or a hub name with its owner"
        check_choice(setting(config, "retriever.encoder"), encoder, names, others)
    for name in s.trackers:
        check_choice(f"scheduler.trackers names {name!r}", name, TRACKERS)
    host, _, port = s.prometheus.rpartition(":")
    if s.prometheus and not (host and port.isdecimal() and int(port) < 2**16):
        address = setting(config, "scheduler.prometheus")
        yield f"{address}: expected host:port, such as '127.0.0.1:9100', or port 0 for a free one"
    port = s.bind.rpartition(":")[2]
    if not (s.bind.startswith("tcp://") and port.isdecimal() and int(port) < 2**16):
        address = setting(config, "scheduler.bind")
        yield f"{address}: expected tcp://HOST:PORT, a port of 0 takes a free one"
    if s.shards > 1:
        yield from _several_schedulers(config)
    yield from _judge_model(config)
    served = _make_judges(config)
    yield from _engine(config)
    yield from _environment(config, served)
    yield from _learner(config)
    yield from _cluster(config)
    if config.deterministic and (s.max_staleness or a.engine != "local"):
        others = setting(config, "scheduler.max_staleness", "actors.engine")
        yield f"deterministic = true with {others}: expected 0 and 'local', whose work repeats"


def _several_schedulers(config: Config) -> Iterator[str]:
    s, count = config.scheduler, config.scheduler.shards
    several = f"with scheduler.shards = {count}: expected"
    for key in ("questions_per_update", "dynamic_sampling_budget"):
        if getattr(s, key) % count:
            yield f"scheduler.{key} = {getattr(s, key)} {several} a multiple of {count}"
    if count > MOST_JOURNALS:
        why = "as many journals as SQLite reads together"
        yield f"scheduler.shards = {count}: expected at most {MOST_JOURNALS}, {why}"
    if config.actors.count < count:
        actors = setting(config, "actors.count")
        yield f"{actors} {several} at least {count}, one for each scheduler"
    if not s.bind.endswith(":0"):
        bind = setting(config, "scheduler.bind")
        yield f"{bind} {several} port 0, since every scheduler needs a port of its own"
    if config.deterministic:
        yield f"deterministic = true {several} 1: a restarted scheduler grows other trees"


def _make_judges(config: Config) -> Served:
    judges, served, deadline = config.judges, Served(), config.scheduler.judge_deadline_s
    for spec, options in judges.use.items():
        if judges.model is not None:  # the port is chosen when the run starts
            try:
                options = with_served_model(options, "http://127.0.0.1/v1", judges.model)
            except ValueError as error:
                raise ValueError(f"judges.use.{spec}.{error}") from None
        worker = make_worker(spec, options)
        served[worker.service] = worker
        endpoint = options.get("endpoint")
        patience = endpoint.get("patience_s", PATIENCE_S) if isinstance(endpoint, dict) else 0.0
        if patience >= deadline:  # a missing reply would fail the call, and be no invalid judgement
            waits = f"judges.use.{spec}.endpoint.patience_s = {patience:g}"
            less = f"expected less than scheduler.judge_deadline_s = {deadline:g}"
            raise ValueError(f"{waits}: {less}")
    return served


def _judge_model(config: Config) -> Iterator[str]:
    judges = config.judges
    asking = [spec for spec, options in judges.use.items() if uses_served_model(options)]
    if asking and judges.model is None:
        endpoint = f"judges.use.{asking[0]}.endpoint.url = {SERVED!r}"
        yield f"{endpoint} asks the run's own model: add [judges.model], or give a URL"
    if judges.model and not asking:
        yield f"[judges.model] has no effect: set url = {SERVED!r} of an endpoint, or remove it"


def _engine(config: Config) -> Iterator[str]:
    a, w, g = config.actors, config.learner, config.actors.served
    say, engine = partial(setting, config), f"with actors.engine = {config.actors.engine!r}"
    engines.check(a.engine, a.engine_options)
    others = ("sglang", "vllm")
    yield from idle(config, engine, *(f"actors.{name}" for name in others if name != a.engine))
    if g is None:
        if w.publish == "memory" and a.engine == "local":
            yield f"{say('learner.publish')}: the embedded engine reads files; expected 'file'"
        return
    section = f"actors.{a.engine}"
    memory = "gpu_memory_utilization" if a.engine == "vllm" else "mem_fraction_static"
    own = f"{section}.arguments has {memory} and dtype"
    yield from idle(config, f"{engine} ({own})", "actors.kv_cache_gib", "actors.dtype")
    urls, way = say(f"{section}.urls"), say(f"{section}.way")
    if (g.way == "url") != bool(g.urls):
        yield f"{way} with {urls}: expected URLs with 'url', and only then"
    if g.urls and a.count > len(g.urls):
        count = say("actors.count")
        yield f"{count} with {urls}: expected one URL per actor, which updates its own server"
    if len(set(g.urls)) < len(g.urls):
        yield f"{urls}: expected each URL once; a router spreads the requests of one actor"
    useless = ("python", "arguments", "environment", "gpus") if g.way == "url" else ("api_key_env",)
    yield from idle(config, f"with {way}", *(f"{section}.{key}" for key in useless))
    if a.engine == "vllm":
        yield from _vllm(config)
    if a.colocated:
        yield from _colocated(config)
    broadcasts = a.engine == "sglang" and a.sglang.weights == "distributed"
    if broadcasts and (w.publish == "file" or w.lora.rank):
        expected = "learner.publish = 'memory' or 'both', and learner.lora.rank = 0"
        yield f"{say('actors.sglang.weights')}: expected {expected} (adapters travel as files)"
    reads = a.engine == "sglang" and a.sglang.weights != "disk" and not w.lora.rank
    if reads and w.publish != "file" and config.scheduler.max_staleness > 1:
        both = say("learner.publish", "scheduler.max_staleness")
        yield f"{both}: memory holds two versions; expected 'file', or a max_staleness of 0 or 1"
    if w.lora.rank:
        yield from _adapters(a.engine, g, w.lora.rank, w.train_vision)


def _vllm(config: Config) -> Iterator[str]:
    """Yield what vLLM cannot promise."""
    s, w, say = config.scheduler, config.learner, partial(setting, config)
    if w.publish == "memory":
        yield f"{say('learner.publish')}: vLLM reads files; expected 'file'"
    if w.routing_replay:
        yield f"{say('learner.routing_replay')}: vLLM's experts are not read; expected False"
    if s.top_p < 1 or s.top_k:
        cut = say("scheduler.top_p", "scheduler.top_k")
        yield f"{cut}: vLLM does not report the tokens that they leave; expected 1 and 0"


def _colocated(config: Config) -> Iterator[str]:
    a, w, say = config.actors, config.learner, partial(setting, config)
    expected = "with actors.sglang.colocated = True: expected"
    if a.sglang.way == "url" or w.outside or config.cluster.on:
        places = say("actors.sglang.way", "learner.outside", "cluster.on")
        yield f"{places} {expected} 'server', False and '', so one machine"
    if w.publish != "file":
        yield f"{say('learner.publish')} {expected} 'file', as NCCL takes no GPU twice"
    if a.count * a.sglang.gpus != w.count:
        counts = say("actors.count", "actors.sglang.gpus", "learner.count")
        yield f"{counts} {expected} as many GPUs of all actors as learner ranks"
    for name in ("enable_memory_saver", "enable_weights_cpu_backup"):
        if a.sglang.arguments.get(name) is False:
            yield f"actors.sglang.arguments.{name} = False {expected} True: remove it"


def _adapters(engine: str, g: ServedConfig, rank: int, vision: bool) -> Iterator[str]:
    adapters, arguments = f"learner.lora.rank = {rank}", f"actors.{engine}.arguments"
    limits = VLLM_ADAPTERS if engine == "vllm" else ADAPTERS_AT_ONCE
    if vision:
        applies = "SGLang applies adapters to the language layers only; expected rank 0"
        yield f"learner.train_vision with {adapters}: {applies}"
    if g.arguments.get("enable_lora") is False:
        yield f"{arguments}.enable_lora = False with {adapters}: remove it"
    for key, value in {"max_lora_rank": rank, **limits}.items():
        limit = g.arguments.get(key)
        if isinstance(limit, int) and limit < value:
            yield f"{arguments}.{key} = {limit}: expected {value} or more for {adapters}"


def _environment(config: Config, served: Served) -> Iterator[str]:
    data, warm = config.data, setting(config, "warm_start.steps")
    environment = registry.load(data.environment, data.options)
    examined = registry.load(data.environment, data.options | config.scheduler.evaluation.options)
    if registry.makes_tasks(environment):
        own = f"because {data.environment!r} makes its own tasks"
        yield from idle(config, own, "data.train", "data.heldout", "data.corpus")
    if examined.searches and not environment.searches:
        options = f"scheduler.evaluation.options = {config.scheduler.evaluation.options}"
        yield f"{options}: only the evaluation would search; let data.options say the same"
    if (environment.pictures or examined.pictures) and config.warm_start.steps:
        yield f"{warm}: {data.environment!r} shows pictures, which no warm start reads: expected 0"
    for key, sources in {"data.train": data.train, "data.heldout": data.heldout}.items():
        try:
            for source in listed(sources):
                if source != "default":
                    check_form(source)
        except ValueError as error:
            yield f"{key}: {error}"
    yield from _services(config, served, environment, examined)
    yield from method.faults(config, served, environment)


def _services(
    config: Config, served: Served, environment: Environment, examined: Environment
) -> Iterator[str]:
    s, outside, named = config.scheduler, config.judges.outside, setting(config, "data.environment")
    opponents = {**getattr(environment, "opponents", {}), **getattr(examined, "opponents", {})}
    needed = {f"judge.{s.judge}": setting(config, "scheduler.judge")} if s.judge != UNJUDGED else {}
    for judge in {environment.outcome_judge, examined.outcome_judge} - {""}:
        needed[f"judge.{judge}"] = f"{named} has its outcomes of judge {judge!r}"
    for name in opponents.keys() - {"random"}:
        needed[f"player.{name}"] = f"the environment's opponents name {name!r}"
    for name in {*environment.speakers, *examined.speakers} - {POLICY}:
        needed[f"speaker.{name}"] = f"the environment speaks with {name!r}"
    for service, said in needed.items():
        kind, _, name = service.partition(".")
        if service in served or name in outside:
            continue
        if name not in KINDS[kind]:
            names = {one.partition(".")[2] for one in served if one.startswith(kind)}
            bring = f"; for one that coppice serve brings, add --set 'judges.outside=[\"{name}\"]'"
            check_choice(said, name, {*KINDS[kind], *names, _UNSERVED[kind]}, bring)
        yield f"{said}, which nobody serves: add --set 'judges.use.{name}={{}}' (or its section)"
    for name in outside:
        if not any(f"{kind}.{name}" in needed for kind in KINDS):
            names = [service.partition(".")[2] for service in needed]
            check_choice(f"judges.outside names {name!r}, which the run does not ask", name, names)


def _learner(config: Config) -> Iterator[str]:
    w, s, updates = config.learner, config.scheduler, setting(config, "scheduler.updates")
    plan, long = plan_of(w), w.soft_overlong
    say, no_effect = partial(setting, config), partial(idle, config)
    one_step, of = "with one optimizer step per update", "learner.soft_overlong.max_tokens"
    if (w.aggregation == "constant") != (w.constant_tokens > 0):
        both = say("learner.constant_tokens", "learner.aggregation")
        yield f"{both}: 'constant' needs a number of tokens, the others take none"
    if without := plan.correct.idle(w.steps):
        more = "raise learner.epochs or learner.minibatches, or remove them"
        yield f"learner.correction_options {without} have no effect {one_step}: {more}"
    if w.epochs * w.minibatches == 1:
        yield from no_effect(one_step, "learner.target_kl")
    if not plan.kl:
        yield from no_effect("without a KL (kl_coef or kl_reward_coef)", "learner.adaptive_kl")
    if not w.kl_coef:
        yield from no_effect("with learner.kl_coef = 0", "learner.kl_estimator")
    elif w.kl_reward_coef:
        yield f"{say('learner.kl_coef', 'learner.kl_reward_coef')}: expected 0 for one of them"
    if w.lr_schedule == "constant":
        keys = "learner.decay_updates", "learner.lr_min_ratio"
        yield from no_effect("with learner.lr_schedule = 'constant'", *keys)
    if long and long.cache_tokens > long.max_tokens:
        yield f"learner.soft_overlong = {long}: expected cache_tokens of at most max_tokens"
    if long and long.max_tokens > s.max_action_tokens:
        limit = say("scheduler.max_action_tokens")
        yield f"{of} = {long.max_tokens} is never reached: expected at most {limit}"
    if w.count == 1:
        yield from no_effect("with learner.count = 1", "learner.sharding")
    if w.sharding != "hybrid":
        yield from no_effect(f"with {say('learner.sharding')}", "learner.shard_ranks")
    elif (w.shards in (1, w.count) or w.count % w.shards) and (w.shard_ranks or not w.outside):
        shards = say("learner.sharding", "learner.count", "learner.shard_ranks")
        yield f"{shards}: expected a divisor of the ranks between 1 and all of them"
    if 0 < w.decay_updates < s.updates:
        yield f"{say('learner.decay_updates')}: expected 0 (just as many) or at least {updates}"
    if w.scheme == "prime" and plan.prm is not None:
        right, positive = w.scheme_options.get("threshold", 0.0), plan.prm.threshold
        if right != positive:
            both = f"learner.scheme_options.threshold = {right:g}"
            yield f"{both}: expected learner.prm.threshold = {positive:g}, what counts as right"
    if w.critic is not None and w.critic.policy_frozen_updates >= s.updates:
        frozen = say("learner.critic.policy_frozen_updates")
        yield f"{frozen}: expected less than {updates}, or the policy never trains"


def _cluster(config: Config) -> Iterator[str]:
    on, w = config.cluster.on, config.learner
    if on and on != "ray" and not on.startswith("ray://"):
        others = " or ray://HOST:PORT; slurm and kuberay as --cluster alone"
        check_choice(setting(config, "cluster.on"), on, ["ray", "slurm", "kuberay"], others)
    if on and w.publish != "file" and w.publish_host == "127.0.0.1":
        both = setting(config, "learner.publish", "learner.publish_host")
        yield f"{both} on a cluster: expected an address that the actors reach"


def doubts(config: Config) -> list[str]:
    """Warnings, printed when a run starts, about legal settings that do not do what their names
    promise."""
    w, say = config.learner, partial(setting, config)
    doubts = corrections.load(w.correction, w.correction_options).doubts(w.steps, w.aggregation)
    for key in ("scheduler.strategy", "learner.scheme") if config.method else ():
        section, _, part = key.partition(".")
        if f"{key} = {(own := method.bundles()[config.method][section][part])!r}" != say(key):
            doubts.append(f"method {config.method} with {say(key)} instead of {own!r}")
    remedy = schemes.load(w.scheme, w.scheme_options).needs.pushes_equal
    if remedy and not config.scheduler.dynamic_sampling_budget:
        doubts.append(
            f"{say('learner.scheme')} whitens over the batch, so a question whose trajectories all"
            " earn the same gets an advantage, though it compares nothing:"
            f" set {remedy} to end that, or scheduler.dynamic_sampling_budget to replace it"
        )
    if w.kl_estimator == "k1" and w.kl_coef:
        doubts.append(
            "learner.kl_estimator = 'k1': the gradient of this loss term is 0 in expectation;"
            " take 'k2' or 'k3', or learner.kl_reward_coef"
        )
    if w.warmup_updates >= config.scheduler.updates:
        doubts.append(
            f"{say('learner.warmup_updates', 'scheduler.updates')}: the rate never reaches"
            " learner.lr; lower the first, or raise the second"
        )
    if config.actors.max_context > w.micro_tokens:
        doubts.append(
            f"{say('actors.max_context')} is more than learner.micro_tokens = {w.micro_tokens}: no"
            " path is divided over forwards or ranks, so a longer one must fit into one rank;"
            " raise micro_tokens if it does, or lower max_context"
        )
    return doubts
