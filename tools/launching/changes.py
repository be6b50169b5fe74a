"""What a resume may change of a run's config, and the record of what it changed:
``RUN/config.json`` is the newest config; ``config-1.json`` .. are the former ones, oldest first."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from coppice.common.atomic import as_json, write_whole
from coppice.tools.launching.config import ConfigError
from coppice.tools.launching.record import resume_command
from coppice.tools.launching.settings import Config

NAME = "config.json"
FIXED = {
    "its tasks and ids were drawn by it": ("seed", "scheduler.shards", "scheduler.hops_in_turn"),
    "its trees were admitted by that": ("scheduler.questions_per_update",),
    "its promise is that of the whole run": ("deterministic",),
    "its trees grew from that": ("data.*", "retriever.encoder"),
    "its weights began with that": ("model.name", "warm_start.*"),
    "its checkpoints hold that": (
        "learner.train_vision", "learner.lora.*", "learner.critic", "learner.critic.lora*",
        "learner.prm", "learner.prm.lora*",
    ),
    "its trees were sampled so": (
        "scheduler.temperature", "scheduler.top_p", "scheduler.top_k", "scheduler.thinking",
    ),
    "its trees have that shape": (
        "method", "scheduler.strategy", "scheduler.strategy_options*", "scheduler.budget",
    ),
    "its trees were scored so": (
        "scheduler.judge", "judges.use.*", "judges.model", "judges.model.name",
    ),
    "its trees have the score columns of that": (
        "learner.scheme", "learner.scheme_options*", "learner.prm.outcome",
    ),
}  # fmt: skip
"""Reason -> keys that a resume must not change, because old trees or checkpoints would be wrong;
``*`` stands for any text. Every other key may change: how many updates, the optimizer, limits and
time-outs, where and how many processes run, logs and evaluation."""
_ENDPOINT = ("url", "api_key_env", "concurrency", "attempts", "*_s")
REACHED = ("judges.use.*.concurrency", *(f"judges.use.*.endpoint.{key}" for key in _ENDPOINT))
"""Keys of a judge that may change all the same: how it is reached, not how it judges."""


class Change(msgspec.Struct, frozen=True):
    """A key whose value is another one; None where the key is not there."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        old, new = (json.dumps(value, ensure_ascii=False) for value in (self.old, self.new))
        return f"{self.key}: {old} -> {new}"

    @property
    def refused(self) -> str:
        """Why a resume must not make this change, "" if it may."""

        def among(keys: Iterable[str]) -> bool:
            return any(fnmatchcase(self.key, key) for key in keys)

        whys = (why for why, keys in FIXED.items() if among(keys))
        return "" if among(REACHED) else next(whys, "")


def changes(run: Path, config: Config) -> list[Change]:
    """Return what differs between the config in the run folder, if there is one, and ``config``.
    Raises OSError."""
    if not (run / NAME).is_file():
        return []
    old = msgspec.json.decode((run / NAME).read_bytes())
    # keys that an earlier release lacked had their defaults
    with contextlib.suppress(msgspec.ValidationError):
        old = msgspec.json.decode(as_json(msgspec.convert(old, Config)))
    return list(differences(old, msgspec.json.decode(as_json(config))))


def differences(old: dict[str, Any], new: dict[str, Any], path: str = "") -> Iterator[Change]:
    """Yield a change for each value that is not the same in two tables of settings."""
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from differences(before, after, f"{path}{key}.")
        elif before != after:
            yield Change(f"{path}{key}", before, after)


def check(run: Path, config: Config) -> None:
    """Refuse a config under which old trees or checkpoints of the run would be wrong. Raises
    ConfigError and OSError."""
    refused = [f"{change} ({change.refused})" for change in changes(run, config) if change.refused]
    if refused:
        raise ConfigError(
            f"--resume {run} cannot change {'; '.join(refused)}: remove the change, or begin"
            " another run with --config and another --run-folder"
        )


def record(run: Path, config: Config) -> list[Change]:
    """Write the run's config, and keep the former one beside it if the two differ. Return what
    differs. Raises OSError."""
    changed = changes(run, config)
    if changed:
        write_whole(run / f"config-{len(former(run)) + 1}.json", (run / NAME).read_bytes())
    write_whole(run / NAME, config, durable=True)
    return changed


def former(run: Path) -> list[dict[str, Any]]:
    """Return the configs that a run had before its newest one, the oldest first. Raises OSError and
    msgspec.DecodeError."""
    paths = sorted(run.glob("config-*.json"), key=lambda path: (len(path.name), path.name))
    return [msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) for path in paths]


def check_free(run: Path) -> None:
    """Refuse a folder that holds a run already, because a new run would be mixed with it. Raises
    ConfigError."""
    # the scheduler refuses checkpoints alone
    if not any((run / name).exists() for name in (NAME, "journal.sqlite")):
        return
    again = f"go on with it by {resume_command(run)}, or choose another --run-folder"
    raise ConfigError(f"{run} holds a run already: {again}")
