"""The rules of judges, environments and tasks: each can be made with its options, and whatever an
episode asks is served by somebody."""

from collections.abc import Generator, Iterator
from typing import Any

from coppice.actors.environments import registry
from coppice.actors.environments.base import POLICY, Environment
from coppice.actors.environments.task_files import check_form, listed
from coppice.common.options import check_choice
from coppice.judges.config import SERVED, JudgesConfig, uses_served_model, with_served_model
from coppice.judges.llm import PATIENCE_S
from coppice.judges.serve import KINDS, make_worker
from coppice.scheduler.config import UNJUDGED
from coppice.tools.launching import method
from coppice.tools.launching.method import Served
from coppice.tools.launching.settings import Config


def of_judges(config: Config) -> Generator[str, None, Served]:
    """Make the judges, opponents and speakers of [judges.use] once, as their processes will make
    them, to check their options. Return them."""
    s, served = config.scheduler, Served()
    yield from _judge_model(config.judges)
    for spec, options in config.judges.use.items():
        worker = make_worker(spec, _with_url(spec, options, config.judges))
        served[worker.service] = worker
        endpoint = options.get("endpoint")
        patience = endpoint.get("patience_s", PATIENCE_S) if isinstance(endpoint, dict) else 0.0
        if patience >= s.judge_deadline_s:
            yield (
                f"judges.use.{spec}.endpoint.patience_s = {patience:g}: expected less than scheduler.judge_deadline_s ="
                f" {s.judge_deadline_s:g}, or a missing reply would fail the call instead of being an invalid judgement"
            )
    return served


def _judge_model(judges: JudgesConfig) -> Iterator[str]:
    """Some judge asks for the served model if there is a [judges.model], and only then."""
    asking = [spec for spec, options in judges.use.items() if uses_served_model(options)]
    if asking and judges.model is None:
        yield f"judges.use.{asking[0]}.endpoint.url = {SERVED!r} asks the run's own model: add [judges.model], or give a URL"
    if judges.model and not asking:
        yield f"[judges.model] has no effect: no endpoint of [judges.use] has url = {SERVED!r}; set one or remove the section"


def _with_url(spec: str, options: dict[str, Any], judges: JudgesConfig) -> dict[str, Any]:
    """The options as the judge will get them, but for the port, which is chosen when the run
    starts."""
    if judges.model is None:
        return options
    try:
        return with_served_model(options, "http://127.0.0.1/v1", judges.model)
    except ValueError as error:
        raise ValueError(f"judges.use.{spec}.{error}") from None


def of_environment(config: Config, served: Served) -> Iterator[str]:
    """Check the environment's options, the tasks' sources, the services that episodes need, and the
    method."""
    data, steps = config.data, config.warm_start.steps
    environment = registry.load(data.environment, data.options)
    examined = registry.load(data.environment, data.options | config.scheduler.evaluation.options)
    files = (data.train, data.heldout, data.corpus)
    if registry.makes_tasks(environment) and files != ("default", "default", "default"):
        yield f"data.train, data.heldout and data.corpus have no effect: {data.environment!r} makes its own tasks"
    if (environment.pictures or examined.pictures) and steps:
        yield f"warm_start.steps = {steps}: {data.environment!r} shows pictures, which no warm start reads: expected 0"
    for key, sources in {"data.train": data.train, "data.heldout": data.heldout}.items():
        try:
            for source in listed(sources):
                if source != "default":
                    check_form(source)
        except ValueError as error:
            yield f"{key}: {error}"
    yield from _asked(config, served, environment, examined)
    yield from method.faults(config, served, environment)


def _asked(
    config: Config, served: Served, environment: Environment, examined: Environment
) -> Iterator[str]:
    """Refuse a judge, an opponent or a speaker that neither the run nor [judges.outside] serves,
    because the run would wait for it forever."""
    s, outside = config.scheduler, config.judges.outside
    opponents = {**getattr(environment, "opponents", {}), **getattr(examined, "opponents", {})}
    asked = {f"judge.{s.judge}": f"scheduler.judge = {s.judge!r}"} if s.judge != UNJUDGED else {}
    if judge := environment.outcome_judge:
        asked[f"judge.{judge}"] = (
            f"data.environment = {config.data.environment!r} has its outcomes of judge {judge!r}"
        )
    for name in opponents.keys() - {"random"}:
        asked[f"player.{name}"] = f"the environment's opponents name {name!r}"
    for name in {*environment.speakers, *examined.speakers} - {POLICY}:
        asked[f"speaker.{name}"] = f"the environment speaks with {name!r}"
    for service, setting in asked.items():
        kind, _, name = service.partition(".")
        if service in served or name in outside:
            continue
        own = KINDS[kind]
        unserved = {"judge": UNJUDGED, "player": "random", "speaker": POLICY}[kind]
        if name not in own:
            names = {service.partition(".")[2] for service in served if service.startswith(kind)}
            bring = f"; for one that coppice serve brings, add --set 'judges.outside=[\"{name}\"]'"
            check_choice(setting, name, {*own, *names, unserved}, bring)
        yield f"{setting}, which nobody serves: add --set 'judges.use.{name}={{}}' (or its section)"
    for name in outside:
        if not any(f"{kind}.{name}" in asked for kind in KINDS):
            asks = [service.partition(".")[2] for service in asked]
            check_choice(f"judges.outside names {name!r}, which the run does not ask", name, asks)
