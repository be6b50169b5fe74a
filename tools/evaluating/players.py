"""The measured player: a model folder, a run's weights or an endpoint, from the command line to an
engine that is not started."""

import argparse
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from coppice.actors.config import ActorProcess, ActorsConfig
from coppice.actors.engines.base import Engine
from coppice.actors.engines.endpoint import EndpointEngine
from coppice.common.http import Reached
from coppice.common.numbers import Count, Natural, NotNegative, Part, Positive
from coppice.common.options import option
from coppice.scheduler.config import SchedulerConfig, SchedulerProcess
from coppice.scheduler.growth.text import Text
from coppice.tools.evaluating import versions
from coppice.tools.evaluating.judged import saved
from coppice.wire import published
from coppice.wire.messages import LoadRequest

MAX_CONTEXT = 4096
"""Tokens of prompt and action, unless a run's settings say otherwise."""


def add_players(parser: Any) -> None:
    """Add the flags that say who is measured, how an endpoint is asked, how a model in this process
    computes, and how actions are sampled."""
    many: dict[str, Any] = {"action": "append", "default": []}
    add = parser.add_argument_group("players (--model and --run may be repeated)").add_argument
    add("--model", **many, metavar="NAME", help="a model folder, a built-in name or a hub id")
    add("--run", **many, type=Path, metavar="RUN", help="a run folder: its weights and settings")
    add("--endpoint", metavar="URL", help="an OpenAI-compatible endpoint, up to /v1")
    add = parser.add_argument_group("with --endpoint").add_argument
    add("--endpoint-model", metavar="NAME", help="the model to ask for")
    add("--api-key-env", metavar="VARIABLE", help="environment variable of the API key")
    field = "a field of each request, in TOML; repeatable"
    add("--endpoint-field", **many, metavar="KEY=VALUE", help=field)
    add("--timeout", type=Positive, help="seconds of one attempt (default: 300)")
    add("--attempts", type=Count, help="attempts of one request (default: 6)")
    add = parser.add_argument_group("with --model or --run").add_argument
    version = "a number (0: the start), or best on held-out tasks (default: the newest)"
    add("--version", type=versions.argument, metavar="VERSION", help=f"of --run: {version}")
    add("--no-thinking", action="store_true", help="ask a chat template that can for none")
    add("--threads", type=Count, help="compute threads (default: 1)")
    context = f"tokens of prompt and action (default: the run's, else {MAX_CONTEXT})"
    add("--max-context", type=Count, help=context)
    add = parser.add_argument_group("actions").add_argument
    add("--temperature", type=NotNegative, default=0.0, help="0, the default, is greedy")
    add("--top-p", type=Part, default=1.0, help="of the likeliest tokens (default: 1, all)")
    add("--top-k", type=Natural, default=0, help="number of likeliest tokens (default: 0, all)")
    add("--max-tokens", type=Count, help="most tokens of an action (default: the run's, else 500)")
    parser.add_argument("--concurrency", type=Count, default=16, help="tasks at once (default: 16)")


_NEEDS = {
    ("endpoint",): ("endpoint_model", "api_key_env", "endpoint_field", "timeout", "attempts"),
    ("run",): ("version",),
    ("model", "run"): ("threads", "max_context", "no_thinking"),
}
"""Flags, and those that have an effect only with one of them."""


def check(flags: argparse.Namespace) -> None:
    """Refuse sampling out of range or without effect, and a flag without its player. Raises
    ValueError."""
    t, top = flags.temperature, (flags.top_p, flags.top_k)
    if 0 < t < 1e-3:
        raise ValueError(f"--temperature {t}: expected 0 (greedy) or at least 0.001")
    if t == 0 and top != (1.0, 0):
        raise ValueError("--top-p and --top-k have no effect with --temperature 0: leave them out")
    if flags.endpoint and not flags.endpoint_model:
        raise ValueError("--endpoint needs --endpoint-model, the name of a model served there")
    for needed, names in _NEEDS.items():
        given = [name for name in names if getattr(flags, name) not in (None, [], False)]
        if given and not any(getattr(flags, one) for one in needed):
            one_of = " or ".join(map(_flag, needed))
            raise ValueError(f"{_flag(given[0])} has no effect without {one_of}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def key_values(name: str, texts: list[str]) -> dict[str, Any]:
    """The KEY=VALUE texts of the flag ``name``. A value is read as TOML; a bare word is a string.
    Raises ValueError."""
    try:
        return dict(option(text) for text in texts)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def weights_digest(folder: str) -> str:
    """A digest of the weights in a model folder, of which the whole files are read."""
    total = hashlib.sha256()
    for file in sorted(Path(folder).glob("*.safetensors")):
        total.update(f"{file.name} {file.stat().st_size} 0\n".encode())
        with file.open("rb") as content:
            total.update(hashlib.file_digest(content, "sha256").digest())
    return total.hexdigest()[:16]


class MeasuredPolicy(msgspec.Struct, frozen=True):
    """Who is measured, not started yet.

    name: a short one. described: its part of the settings. make: makes its engine, None without a
    model. max_context: tokens of a prompt and its action, 0 without a limit. own: a run's settings.
    """

    name: str
    described: dict[str, Any]
    text: Text
    make: Callable[[], Engine | None]
    max_context: int = 0
    load: LoadRequest | None = None
    own: SchedulerProcess | None = None


class PlayerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the results of all evaluations depend on.

    source: the model folder, the run, the endpoint's URL or the baseline. weights: the digest of
    local weights, "" for an endpoint. options: the environment's.
    """

    player: str
    source: str
    model: str = ""
    version: int = 0
    weights: str = ""
    fields: dict[str, Any] = {}
    options: dict[str, Any]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    thinking: bool

    def config(self, judge: str, **more: Any) -> SchedulerConfig:
        """The scheduler's settings for one trajectory per task. The deadlines are long because
        nothing could take over from an engine or a service in this process."""
        return SchedulerConfig(
            judge=judge, max_action_tokens=self.max_tokens, generate_deadline_s=3600.0,
            judge_deadline_s=3600.0, temperature=self.temperature, top_p=self.top_p,
            top_k=self.top_k, thinking=self.thinking, **more,
        )  # fmt: skip


def sampled(
    flags: argparse.Namespace, policy: MeasuredPolicy, own: SchedulerConfig, thinking: bool
) -> dict[str, Any]:
    """The fields of ``PlayerSettings`` but its options. own: whose number of tokens is the default.
    thinking: of the run."""
    given = {name: getattr(flags, name) for name in ("temperature", "top_p", "top_k")}
    most = flags.max_tokens or own.max_action_tokens
    thinking = thinking and not flags.no_thinking
    return policy.described | given | {"max_tokens": most, "thinking": thinking}


def policies(
    flags: argparse.Namespace, least_context: int = 0, engine: type[EndpointEngine] = EndpointEngine
) -> list[MeasuredPolicy]:
    """The players of a command line. least_context: a lower bound of a run's context, unless a flag
    gives it. engine: of an endpoint. Raises ValueError or OSError."""
    everyone = [_of_model(name, flags) for name in flags.model]
    everyone += [_of_run(path, flags, least_context) for path in flags.run]
    return everyone + ([_of_endpoint(flags, engine)] if flags.endpoint else [])


def _of_model(name: str, flags: argparse.Namespace) -> MeasuredPolicy:
    from coppice.tools.defaults.models import ensure_model
    from coppice.tools.defaults.settings import cache_folder  # these import torch

    try:
        folder = str(ensure_model(name, cache_folder()))
    except (FileNotFoundError, ValueError) as error:
        reason = str(error).removeprefix(f"model.name = {name!r}: ")
        raise ValueError(f"--model {name}: {reason}") from None
    config = _local(ActorsConfig(max_context=MAX_CONTEXT), flags)
    described = {"player": "model", "source": folder, "weights": weights_digest(folder)}
    return MeasuredPolicy(
        _short(Path(name).name or Path(folder).resolve().name), described, Text(folder),
        lambda: _engine(folder, config), config.max_context,
    )  # fmt: skip


def _of_run(path: Path, flags: argparse.Namespace, least_context: int) -> MeasuredPolicy:
    scheduler = saved(path / "processes" / "scheduler.json", SchedulerProcess)
    actor = saved(path / "processes" / "actor-0.json", ActorProcess)
    number, weights = versions.chosen(path, flags.version)
    folder, own, load = actor.model, actor.actors, None
    if weights is not None:
        proof = saved(weights / published.NAME, published.Manifest).digest
        load = LoadRequest(number, str(weights.resolve()), proof)
    room = max(own.max_context, least_context)
    config = _local(msgspec.structs.replace(own, max_context=room), flags)
    described: dict[str, Any] = {"player": "run", "source": str(path.resolve()), "model": folder}
    described |= {"version": load.version if load else 0}
    described |= {"weights": load.digest if load else weights_digest(folder)}
    return MeasuredPolicy(
        _short(f"{path.resolve().name}-v{described['version']}"), described, Text(folder),
        lambda: _engine(folder, config), config.max_context, load, scheduler,
    )  # fmt: skip


def _of_endpoint(flags: argparse.Namespace, engine: type[EndpointEngine]) -> MeasuredPolicy:
    parts = urlsplit(flags.endpoint)
    good = parts.scheme in ("http", "https") and parts.hostname and not parts.query
    if not good or "@" in parts.netloc:
        expected = "http(s)://host[:port]/v1, without a key (see --api-key-env)"
        raise ValueError(f"--endpoint: expected {expected}")
    more = {
        "timeout_s": flags.timeout,
        "attempts": flags.attempts,
        "api_key_env": flags.api_key_env,
    }
    reached = Reached(
        flags.endpoint, flags.endpoint_model, concurrency=flags.concurrency,
        fields=key_values("--endpoint-field", flags.endpoint_field),
        **{key: value for key, value in more.items() if value is not None},
    )  # fmt: skip
    described = {"player": "endpoint", "source": flags.endpoint, "model": reached.model}
    described |= {"fields": reached.fields}
    text: Any = engine.text  # stands for a Text
    return MeasuredPolicy(_short(reached.model), described, text, lambda: engine(reached))


def _short(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)


def _local(config: ActorsConfig, flags: argparse.Namespace) -> ActorsConfig:
    """The settings of the embedded engine, with a batch that holds all concurrent requests of the
    command line (at most 64)."""
    return msgspec.structs.replace(
        config,
        max_batch=max(config.max_batch, min(flags.concurrency, 64)),
        max_context=flags.max_context or config.max_context,
        threads=flags.threads or config.threads,
    )


def _engine(folder: str, config: ActorsConfig) -> Engine:
    from transformers.utils import logging  # these import torch, which the other players do without

    from coppice.actors.engines.local import LocalEngine

    logging.disable_progress_bar()
    return LocalEngine(folder, config)
