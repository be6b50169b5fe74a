"""The command coppice launch: config -> assets -> run folder -> processes -> summary."""

import argparse
import contextlib
import errno
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

import msgspec

from coppice.common import hardware
from coppice.common.atomic import as_json, fresh
from coppice.common.jsonl import MALFORMED
from coppice.common.options import command_parser, gave_up
from coppice.common.process import locked
from coppice.learner.model.memory import sizes
from coppice.scheduler.telemetry import health, tracking
from coppice.tools.defaults.settings import cache_folder
from coppice.tools.launching import changes, forks, jobs, memory, processes, record, rules
from coppice.tools.launching.config import Config, ConfigError, convert, default, load
from coppice.tools.launching.nodes import Nodes
from coppice.tools.launching.prepare import lacking_files, lacking_machine, prepare
from coppice.tools.launching.record import existing, no_space
from coppice.tools.launching.screen import RunScreen
from coppice.tools.launching.settings import Assets
from coppice.tools.launching.supervisor import supervise

_EXAMPLES = """\
  tools/launch --actors 4 --learner 4           train the default task
  coppice launch --config configs/slate-cpu.toml --actors 2 --learner 2
  coppice launch scheduler.updates=20 learner.lr=1e-4    change keys
  coppice launch --resume runs/NAME-TIME          go on after a stop or a crash
  coppice launch --track wandb --quiet            W&B, and hardly a line here
  coppice launch --json 2> words | jq '."score/reward"'
"""


def parser() -> argparse.ArgumentParser:
    what = "Train a policy, or go on with a run; everything is set up on the first start."
    parser = command_parser("coppice launch", what, _EXAMPLES)
    new = parser.add_argument_group("what to train").add_argument
    file = f"TOML file (default: configs/{default([]).name})"
    new("--config", type=Path, metavar="FILE", help=file)
    new("--actors", type=int, help="actor processes (default: the config's actors.count)")
    new("--learner", type=int, help="learner ranks (default: the config's learner.count)")
    change = "change a key, e.g. method=grpo or learner.lr=1e-6; null takes a key or section away"
    new("changes", nargs="*", metavar="KEY=VALUE", help=change)
    same = "the same; repeatable"
    new("--set", action="append", default=[], metavar="KEY=VALUE", help=same)
    cluster = "ray (the cluster of this machine), ray://HOST:PORT; slurm or kuberay prints a job"
    new("--cluster", metavar="WHERE", help=f"where to run: {cluster} that does")
    place = "where to put the run (default: runs/<name>-<time>)"
    new("--run-folder", type=Path, metavar="FOLDER", help=place)
    dry = "print the resolved config and the process plan, start nothing"
    new("--dry-run", action="store_true", help=dry)
    old = parser.add_argument_group("a run that is there").add_argument
    old("--resume", type=Path, metavar="RUN", help="go on with a stopped run")
    shown = parser.add_argument_group("what is shown").add_argument
    track = f"also send the records to {' or '.join(tracking.TRACKERS)}; repeatable"
    shown("--track", action="append", metavar="NAME", help=track)
    shown("--quiet", action="store_true", help="print the run folder, faults and the end only")
    records = "print records as JSON lines, all else on stderr"
    shown("--json", action="store_true", help=records)
    return parser


def arguments(options: list[str] | None = None) -> argparse.Namespace:
    command = parser()
    parsed = command.parse_intermixed_args(options)
    if parsed.dry_run and (parsed.quiet or parsed.json):
        flag = "--quiet" if parsed.quiet else "--json"
        command.error(f"{flag} has no effect with --dry-run, which starts nothing: remove it")
    if parsed.resume and (parsed.config or parsed.run_folder):
        own = "--resume goes on in its own folder with its own config"
        command.error(f"{own}: remove --config and --run-folder, change keys with --set")
    if parsed.cluster in jobs.WRITERS and (parsed.resume or parsed.run_folder):
        own = f"--cluster {parsed.cluster} prints a job that chooses its run folder"
        command.error(f"{own}: leave out --resume and --run-folder")
    return parsed


def resolve(options: argparse.Namespace) -> tuple[Config, Path]:
    """Return the config and the run folder that the command line asks for. Raises ConfigError."""
    where = "ray" if options.cluster in jobs.WRITERS else options.cluster
    given = {"actors.count": options.actors, "learner.count": options.learner, "cluster.on": where}
    given |= {"scheduler.trackers": options.track}
    overrides = [*options.set, *options.changes]
    overrides += [f"{key}={value}" for key, value in given.items() if value is not None]
    if options.resume is None:
        config = load(options.config or default(overrides), overrides)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return config, options.run_folder or Path(config.runs) / f"{config.name}-{stamp}"
    saved = options.resume / "config.json"
    if not saved.is_file():
        lacking = "no config.json there; expected the folder of a run"
        raise ConfigError(f"--resume {options.resume}: {lacking}")
    try:
        tree = msgspec.json.decode(saved.read_bytes(), type=dict[str, Any])
    except MALFORMED as error:
        torn = f"its config.json is torn ({error}): restore it, or start anew"
        raise ConfigError(f"--resume {options.resume}: {torn}") from None
    config = convert(tree, overrides, f"config {saved}")
    changes.check(options.resume, config)
    return config, options.resume


def main(command: list[str] | None = None) -> int:
    options = arguments(command)
    resumed = options.resume is not None
    with contextlib.ExitStack() as held:
        try:
            config, run = resolve(options)
            if not (place := existing(run)).is_dir():
                raise ConfigError(
                    f"run folder {run}: {place} is a file, expected a folder: choose another"
                    " --run-folder"
                )
            if not resumed:  # before the set-up, which may take minutes
                changes.check_free(run)
            tracking.check_installed(config.scheduler.trackers)
            if options.cluster in jobs.WRITERS:
                flags = [f"--{flag}" for flag in ("quiet", "json") if getattr(options, flag)]
                print(jobs.WRITERS[options.cluster](config, " ".join(flags)), end="")
                return 0
            for lack in lacking_files(config):
                raise ConfigError(lack)
            if options.dry_run:
                return dry_run(config, run)
            for lack in lacking_machine(config):
                raise ConfigError(lack)
            s, records = config.scheduler, _records() if options.json else None
            screen = RunScreen(s.updates, options.quiet, records, schedulers=s.shards)
            nodes = None
            if config.cluster.on:
                nodes = held.enter_context(contextlib.closing(Nodes(config, screen.say)))
            for number in (signal.SIGTERM, signal.SIGHUP):
                # nohup ignores SIGHUP, and so do we then
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, signal.default_int_handler)
            if nodes is None:
                forks.serve(processes.key_variables(msgspec.to_builtins(config)) | tracking.KEYS)
                held.callback(forks.end)
            assets = prepare(config, options.quiet)
            if lack := memory.gpu_lacks(config, Path(assets.model)):
                raise ConfigError(lack)
        except (ConfigError, OSError, ValueError, MemoryError) as error:
            return gave_up("coppice launch", " ".join(str(error).split()))
        except KeyboardInterrupt:
            stopped = "stopped during set-up; what was finished is cached"
            return gave_up("coppice launch", stopped, 130)
        try:
            run = (run if resumed or options.run_folder else fresh(run)).resolve()
            return _launch(config, assets, run, screen, nodes, resumed)
        except (OSError, ValueError) as error:
            return gave_up("coppice launch", _told(error, run))


def _told(error: OSError | ValueError, run: Path) -> str:
    match error.errno if isinstance(error, OSError) else None:
        case errno.ENOSPC:
            return no_space(run)
        case errno.EROFS | errno.EACCES:
            return f"{error}: make it writable and launch again, or choose another --run-folder"
    return str(error)


def _records() -> TextIO:
    """Return the stdout of now as a stream for records alone; what this process and its children
    write there from now on goes to stderr."""
    sys.stdout.flush()
    records = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return records


def _launch(
    config: Config, assets: Assets, run: Path, screen: RunScreen, nodes: Nodes | None, resumed: bool
) -> int:
    """Lock the run folder for this launch alone and run the processes in it. Raises OSError, and
    ValueError with the remedy."""
    run.mkdir(parents=True, exist_ok=True)
    in_use = f"{run} is in use by another launch: stop that one, or choose --run-folder"
    with locked(run / "lock", in_use):
        if not resumed:  # another launch may have begun and ended here during the set-up
            changes.check_free(run)
        changed = changes.record(run, config)
        record.write_environment(run)
        (run / health.PAUSED).unlink(missing_ok=True)  # whoever launches wants the run to go on
        _announce(config, Path(assets.model), run, screen, changed)
        placed = nodes.reaching(config) if nodes is not None else config
        return supervise(run, lambda: processes.make(placed, assets, run), screen, nodes)


def _announce(
    config: Config, model: Path, run: Path, screen: RunScreen, changed: list[changes.Change]
) -> None:
    """Show what a resume changes, the warnings about a config, its number type and the run folder.
    model: the policy's folder."""
    lines = [f"changed: {change}" for change in changed]
    lines += [f"warning: {doubt}" for doubt in rules.doubts(config)]
    (actors, ranks), a, w = processes.at_once(config), config.actors, config.learner
    if (actors, ranks) != (a.count, w.count):
        few = f"{actors} of {a.count} actors and {ranks} of {w.count} ranks compute"
        lines.append(f"{hardware.cores()} cores: {few}, the others are spare")
    if gpus := hardware.visible_gpus():
        versions = [f"{name} {found or '?'}" for name, found in hardware.gpu_software().items()]
        lines.append(f"GPUs {len(gpus)}, {', '.join(versions)}")
        if room := hardware.gpu_gib():
            lines += memory.gpu_lines(memory.gpu_parts(config, *sizes(model), gpus, room))
    for line in (*lines, memory.memory_warning(config, model), memory.number_type(config, model)):
        if line:
            screen.say(line, "fault" if line.startswith("warning: ") else "detail")
    if config.learner.outside:
        screen.say(processes.torchrun(config.learner, run), "summary")
    screen.say(f"run folder {run}", "summary")


def dry_run(config: Config, run: Path) -> int:
    """Print the resolved config, the process plan and a memory estimate, and start nothing. Raises
    FileNotFoundError for a wrong model."""
    from coppice.tools.defaults.models import check_name  # it imports transformers

    check_name(config.model.name)
    print(as_json(config).decode())
    model = cache_folder() / "models" / config.model.name
    model = model if model.is_dir() else Path(config.model.name)
    with tempfile.TemporaryDirectory() as scratch:
        plan = processes.make(config, Assets("MODEL", "TRAIN", "HELDOUT", "INDEX"), Path(scratch))
    screen = RunScreen(config.scheduler.updates)
    _announce(config, model, run, screen, changes.changes(run, config))
    for lack in lacking_machine(config):
        screen.say(f"warning: {lack}")
    print("processes:")
    for p in plan:
        command = f"python -m {p.module} processes/{p.file}.json"
        print(f"  {p.name:<12} {command}   {p.threads} thread(s)")
    here = (model / "config.json").is_file()
    unknown = "" if here else " (the model is not here yet: its weights are counted as 0)"
    need, free = memory.memory_gib(config, model), hardware.free_memory() / 2**30
    needs = f"memory: about {need:.1f} GiB of {free:.1f} GiB free"
    print(f"{needs} (weights, caches, activations){unknown}")
    return 0
