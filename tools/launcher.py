"""The command tools/launch: config -> assets -> run folder -> processes -> summary."""

import argparse
import fcntl
import sys
import time
from pathlib import Path

import msgspec

from tools import assets, plan
from tools.config import DEFAULT_CONFIG, Config, ConfigError, convert, load, saved
from tools.supervise import Supervisor


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parsed command line."""
    parser = argparse.ArgumentParser(prog="tools/launch", description="Train; everything is set up on the first start.")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="TOML file (default: %(default)s)")
    parser.add_argument("--actors", type=int, help="actor processes (actors.count)")
    parser.add_argument("--learner", type=int, help="learner ranks (learner.count)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key, e.g. learner.lr=1e-6"
    )
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with a stopped run")
    parser.add_argument("--run-folder", type=Path, help="where to put the run (default: runs/<name>-<time>)")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved config and the process plan, start nothing"
    )
    return parser.parse_args(given)


def resolve(given: argparse.Namespace) -> tuple[Config, Path]:
    """The config and the run folder. Raises ConfigError."""
    overrides = list(given.set)
    if given.actors is not None:
        overrides.append(f"actors.count={given.actors}")
    if given.learner is not None:
        overrides.append(f"learner.count={given.learner}")
    if given.resume is None:
        config = load(given.config, overrides)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return config, given.run_folder or Path(config.runs) / f"{config.name}-{stamp}"
    saved = given.resume / "config.json"
    if not saved.is_file():
        raise ConfigError(f"--resume {given.resume}: no config.json there; expected the folder of a run")
    return convert(msgspec.json.decode(saved.read_bytes()), overrides), given.resume


def main(command: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    given = arguments(command)
    try:
        config, run = resolve(given)
        if given.dry_run:
            return dry_run(config, run)
        found = assets.prepare(config)
    except (ConfigError, FileNotFoundError, ValueError, MemoryError) as error:
        print(f"tools/launch: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tools/launch: stopped during set-up; what was finished is cached", file=sys.stderr)
        return 130
    run = run.resolve()
    run.mkdir(parents=True, exist_ok=True)
    with (run / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(
                f"tools/launch: {run} is in use by another launch: stop that one, or choose --run-folder",
                file=sys.stderr,
            )
            return 2
        (run / "config.json").write_bytes(saved(config))
        try:
            made = plan.make(config, found, run)
        except ValueError as error:
            print(f"tools/launch: {error}", file=sys.stderr)
            return 2
        if warning := plan.memory_warning(config, _weights_gib(Path(found.model))):
            print(warning, flush=True)
        print(f"run folder {run}", flush=True)
        return Supervisor(run, made).watch()


def dry_run(config: Config, run: Path) -> int:
    """Print what would happen."""
    import tempfile

    print(msgspec.json.format(msgspec.json.encode(config), indent=1).decode())
    model = assets.cache_folder() / "models" / config.model.name
    model = model if model.is_dir() else Path(config.model.name)
    size = _weights_gib(model)
    with tempfile.TemporaryDirectory() as scratch:
        made = plan.make(config, assets.Assets("MODEL", "TRAIN", "HELDOUT", "INDEX"), Path(scratch))
    known = "" if size else " (the model is not here yet: its weights are counted as 0)"
    print(f"run folder {run}\nprocesses:\n{plan.describe(made, config, size)}{known}")
    return 0


def _weights_gib(model: Path) -> float:
    return sum(path.stat().st_size for path in model.glob("*.safetensors")) / 2**30
