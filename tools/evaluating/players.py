"""The measured player: a model folder, a run's weights or an endpoint, from the command line to an
engine that is not started."""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from coppice.actors.config import ActorProcess, ActorsConfig
from coppice.actors.engines.base import Engine
from coppice.common.http import Reached
from coppice.common.options import option
from coppice.scheduler.config import SchedulerProcess
from coppice.tools.evaluating import versions
from coppice.wire import published
from coppice.wire.messages import LoadRequest

MAX_CONTEXT = 4096
"""Tokens of prompt and action, unless a run's settings say otherwise."""
_READ_WHOLE = 2**30
"""Bytes of weights up to which the whole files are read for their digest, which takes about a
second."""


def add_endpoint(parser: Any) -> None:
    """Add the flags that say how an endpoint is asked."""
    remote = parser.add_argument_group("with --endpoint")
    remote.add_argument("--endpoint-model", metavar="NAME", help="the model to ask for")
    remote.add_argument(
        "--api-key-env", metavar="VARIABLE", help="the environment variable that holds the API key"
    )
    remote.add_argument(
        "--endpoint-field",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a field of each request, its value in TOML; repeatable",
    )
    remote.add_argument("--timeout", type=float, help="seconds of one attempt (default: 300)")
    remote.add_argument("--attempts", type=int, help="attempts of one request (default: 6)")


def add_local(parser: Any) -> None:
    """Add the flags that say how a model in this process computes."""
    local = parser.add_argument_group("with --model or --run")
    local.add_argument(
        "--version",
        type=versions.argument,
        metavar="VERSION",
        help="of --run: this version, or best (on its held-out tasks), instead of the newest; 0 is the start",
    )
    local.add_argument(
        "--no-thinking",
        action="store_true",
        help="ask a chat template that knows the switch for none",
    )
    local.add_argument("--threads", type=int, help="compute threads (default: 1)")
    local.add_argument(
        "--max-context",
        type=int,
        help=f"tokens of a prompt and its action together (default: the run's, else {MAX_CONTEXT})",
    )


def add_actions(parser: Any) -> None:
    """Add the flags that say how actions are sampled."""
    actions = parser.add_argument_group("actions")
    actions.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    nucleus = (
        "sample from the likeliest tokens of this total probability (default: %(default)s, all)"
    )
    actions.add_argument("--top-p", type=float, default=1.0, help=nucleus)
    top = "sample from so many likeliest tokens (default: %(default)s, all)"
    actions.add_argument("--top-k", type=int, default=0, help=top)
    actions.add_argument(
        "--max-tokens",
        type=int,
        help="tokens of one action, at most (default: the run's, else 500)",
    )


# ----------------------------------------------------------------------------------------------
# checks


def check(flags: argparse.Namespace, positive: Sequence[str]) -> None:
    """Refuse values and sampling out of range or without effect, and a flag without its player.
    Raises ValueError. positive: flags above 0."""
    for name in positive:
        value = getattr(flags, name)
        if value is not None and value <= 0:
            raise ValueError(f"{flag(name)} {value}: expected more than 0")
    if not (flags.temperature == 0 or flags.temperature >= 1e-3):
        raise ValueError(
            f"--temperature {flags.temperature}: expected 0 (greedy) or at least 0.001"
        )
    if not 0 < flags.top_p <= 1 or flags.top_k < 0 or flags.seed < 0:
        raise ValueError(
            "--top-p: expected above 0 and at most 1; --top-k and --seed: expected 0 or more"
        )
    if flags.temperature == 0 and (flags.top_p, flags.top_k) != (1.0, 0):
        raise ValueError("--top-p and --top-k have no effect with --temperature 0: leave them out")
    if flags.endpoint and not flags.endpoint_model:
        raise ValueError("--endpoint needs --endpoint-model, the name of a model served there")
    local = "--model or --run"
    needs = dict.fromkeys(
        ("endpoint_model", "api_key_env", "endpoint_field", "timeout", "attempts"), "--endpoint"
    )
    needs |= {"version": "--run", "threads": local, "max_context": local, "no_thinking": local}
    for name, needed in needs.items():
        if getattr(flags, name) not in (None, [], False) and not any(
            getattr(flags, _name(one)) for one in needed.split(" or ")
        ):
            raise ValueError(f"{flag(name)} has no effect without {needed}")


def flag(name: str) -> str:
    """The flag of a value's name."""
    return "--" + name.replace("_", "-")


def _name(one: str) -> str:
    return one.removeprefix("--").replace("-", "_")


def table(name: str, texts: list[str]) -> dict[str, Any]:
    """The KEY=VALUE texts of the flag ``name``. A value is read as TOML; a bare word is a string.
    Raises ValueError."""
    try:
        return dict(option(text) for text in texts)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


# ----------------------------------------------------------------------------------------------
# players


class Trained(msgspec.Struct, frozen=True):
    """A run folder as a player: its process files, and the weights to load (None: the weights of
    its model folder)."""

    scheduler: SchedulerProcess
    actor: ActorProcess
    load: LoadRequest | None

    @property
    def version(self) -> int:
        """The version of the weights; 0 is the model folder's."""
        return self.load.version if self.load else 0

    @property
    def weights(self) -> str:
        """The digest of the weights, as published or of the model folder."""
        return self.load.digest if self.load else weights_digest(self.actor.model)


def read_run(run: Path, version: int | str | None) -> Trained:
    """The run with one version (None: the newest, "best": on its held-out tasks). Raises ValueError
    or FileNotFoundError."""
    folder = run / "processes"
    if not (folder / "scheduler.json").is_file():
        raise FileNotFoundError(
            f"--run {run}: no processes/scheduler.json there; expected the folder of a run"
        )
    scheduler = saved(folder / "scheduler.json", SchedulerProcess)
    actor = saved(folder / "actor-0.json", ActorProcess)
    number, weights = versions.chosen(run, version)
    load = None
    if weights is not None:
        load = LoadRequest(
            number,
            str(weights.resolve()),
            saved(weights / published.NAME, published.Manifest).digest,
        )
    return Trained(scheduler, actor, load)


_Read = TypeVar("_Read")


def saved(path: Path, kind: type[_Read]) -> _Read:
    """Read a file that a run wrote. Raises ValueError with the remedy if the file is missing, torn
    or of another form."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"--run: {path}: {reason}; expected a file that a run wrote: copy the run folder again, or measure another run or version"
        ) from None


def model_folder(name: str) -> str:
    """The folder of --model. Raises ValueError."""
    from coppice.tools.defaults.models import ensure_model
    from coppice.tools.defaults.settings import cache_folder  # these import torch

    try:
        return str(ensure_model(name, cache_folder()))
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(
            f"--model {name}: {str(error).removeprefix(f'model.name = {name!r}: ')}"
        ) from None


def weights_digest(folder: str) -> str:
    """A digest that changes when other weights replace those in a model folder.

    It is computed from the contents of the files, or from their names, sizes and times if the files
    are large.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    small = sum(file.stat().st_size for file in files) <= _READ_WHOLE
    total = hashlib.sha256()
    for file in files:
        size, time_ns = file.stat().st_size, file.stat().st_mtime_ns
        total.update(f"{file.name} {size} {0 if small else time_ns}\n".encode())
        if small:
            with file.open("rb") as content:
                total.update(hashlib.file_digest(content, "sha256").digest())
    return total.hexdigest()[:16]


def check_url(url: str) -> None:
    """Raises ValueError if ``url`` is not the address of an endpoint."""
    parts = urlsplit(url)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.query
        or "@" in parts.netloc
    ):
        raise ValueError(
            "--endpoint: expected http(s)://host[:port]/v1, without a key (see --api-key-env)"
        )


def endpoint_of(flags: argparse.Namespace) -> Reached:
    """The endpoint that a command line describes."""
    more = {
        "timeout_s": flags.timeout,
        "attempts": flags.attempts,
        "api_key_env": flags.api_key_env,
    }
    more = {key: value for key, value in more.items() if value is not None}
    fields = table("--endpoint-field", flags.endpoint_field)
    return Reached(
        flags.endpoint, flags.endpoint_model, concurrency=flags.concurrency, fields=fields, **more
    )


def local_engine(folder: str, config: ActorsConfig, flags: argparse.Namespace) -> Engine:
    """The embedded engine, with a batch that holds all concurrent requests of the command line (at
    most 64)."""
    from transformers.utils import logging  # these import torch, which the other players do without

    from coppice.actors.engines.local import LocalEngine

    logging.disable_progress_bar()
    config = msgspec.structs.replace(
        config,
        max_batch=max(config.max_batch, min(flags.concurrency, 64)),
        max_context=flags.max_context or config.max_context,
        threads=flags.threads or config.threads,
    )
    return LocalEngine(folder, config)
