"""Check that settings fit together. Contradictions and settings without effect are refused when a
config is read."""

from collections.abc import Iterator
from pathlib import Path

from coppice.common import storage
from coppice.common.options import check_choice
from coppice.judges.config import RetrieverConfig
from coppice.learner import schemes
from coppice.learner.update import corrections
from coppice.scheduler.telemetry.tracking import TRACKERS
from coppice.tools.launching import engine_rules, learner_rules, plug_in_rules
from coppice.tools.launching.settings import Config


def check(config: Config) -> None:
    """Refuse settings that contradict each other or would silently do nothing. Raises ValueError or
    FileNotFoundError."""
    for fault in _faults(config):
        raise ValueError(fault)


def _faults(config: Config) -> Iterator[str]:
    """Yield what is wrong, in order. The rules of each subject yield theirs; what a plug-in refuses
    itself is raised."""
    s, a, encoder = config.scheduler, config.actors, config.retriever.encoder
    d = s.dispatch
    if d.dead_after_s <= d.heartbeat_s:
        yield (
            f"scheduler.dispatch.dead_after_s = {d.dead_after_s}: expected more than scheduler.dispatch.heartbeat_s ="
            f" {d.heartbeat_s}, or every worker would be given up between two heartbeats"
        )
    if s.max_action_tokens >= a.max_context:
        yield f"scheduler.max_action_tokens = {s.max_action_tokens} leaves no room for a prompt in actors.max_context = {a.max_context}"
    if "/" not in encoder and not Path(encoder).is_dir():
        expected = [RetrieverConfig().encoder]
        check_choice(
            f"retriever.encoder = {encoder!r}",
            encoder,
            expected,
            ", a folder, or a hub name with its owner",
        )
    yield from _exports(config)
    yield from _shards(config)
    served = yield from plug_in_rules.of_judges(config)
    yield from engine_rules.faults(config)
    yield from plug_in_rules.of_environment(config, served)
    yield from learner_rules.faults(config)
    yield from _cluster(config)
    if config.deterministic and (s.max_staleness or a.engine != "local"):
        yield (
            f"deterministic = true with scheduler.max_staleness = {s.max_staleness} and actors.engine = {a.engine!r}: expected 0 and 'local',"
            " since otherwise what is trained depends on time"
        )


def _cluster(config: Config) -> Iterator[str]:
    """A cluster is of a known kind, and what leaves the machine has an address that is reached."""
    on, w = config.cluster.on, config.learner
    if on and on != "ray" and not on.startswith("ray://"):
        others = " or ray://HOST:PORT; slurm and kuberay as --cluster alone"
        check_choice(f"cluster.on = {on!r}", on, ["ray", "slurm", "kuberay"], others)
    if on and w.publish != "file" and w.publish_host == "127.0.0.1":
        yield f"learner.publish = {w.publish!r} on a cluster with learner.publish_host = '127.0.0.1': expected an address that the actors reach"
    if w.publish_url and w.publish == "memory":
        yield "learner.publish_url with learner.publish = 'memory': there are no files to copy; expected 'file' or 'both'"
    if w.publish_url:
        storage.check(w.publish_url)


def _exports(config: Config) -> Iterator[str]:
    """The trackers are known, and Prometheus has an address."""
    for name in config.scheduler.trackers:
        check_choice(f"scheduler.trackers names {name!r}", name, TRACKERS)
    address = config.scheduler.prometheus
    host, _, port = address.rpartition(":")
    if address and not (host and port.isdecimal() and int(port) < 2**16):
        yield f"scheduler.prometheus = {address!r}: expected host:port, such as '127.0.0.1:9100', or port 0 for any free one"


def _shards(config: Config) -> Iterator[str]:
    """The parts of several schedulers are equal, and each of them has somebody who works for it."""
    s, count = config.scheduler, config.scheduler.shards
    beside = f"with scheduler.shards = {count}: expected"
    if count == 1:
        return
    for key in ("questions_per_update", "dynamic_sampling_budget"):
        if getattr(s, key) % count:
            yield f"scheduler.{key} = {getattr(s, key)} {beside} a multiple of {count}, since every scheduler gives an equal part of each update"
    if config.actors.count < count:
        yield f"actors.count = {config.actors.count} {beside} at least {count}, one for each scheduler"
    if not s.bind.endswith(":0"):
        yield f"scheduler.bind = {s.bind!r} {beside} port 0, since every scheduler needs a port of its own"
    if config.deterministic:
        yield f"deterministic = true {beside} 1, since a scheduler that is started again alone grows its unfinished trees on"


def doubts(config: Config) -> list[str]:
    """Warnings, printed when a run starts, about legal settings that do not do what their names
    promise."""
    w = config.learner
    doubts = corrections.load(w.correction, w.correction_options).doubts(w.steps, w.aggregation)
    remedy = schemes.load(w.scheme, w.scheme_options).needs.pushes_equal
    if remedy and not config.scheduler.dynamic_sampling_budget:
        doubts.append(
            f"learner.scheme = {w.scheme!r} whitens over the batch, so a question whose trajectories all earn the same still gets an advantage other"
            f" than 0, though it compares nothing: set {remedy} to end that, or scheduler.dynamic_sampling_budget to replace it"
        )
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
    # only the actor, which asks it, knows whether a URL is a router
    if urls and (s.top_p < 1 or s.top_k):
        doubts.append(
            f"scheduler.top_p = {s.top_p} and top_k = {s.top_k} with actors.sglang.urls = {urls}: a router among them would refuse every call; give each server's"
            " own URL, or set top_p = 1 and top_k = 0"
        )
    return doubts
