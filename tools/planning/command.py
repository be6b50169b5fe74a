"""The command tools/plan: what a run of a config will take, and which split of the GPUs is the fastest."""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import msgspec

from scheduler import strategies
from tools.inspecting import runs
from tools.launching import processes
from tools.launching.config import DEFAULT_CONFIG, Config, load
from tools.planning import formulas, prediction
from tools.planning.formulas import GPUS, Dense, Device, Efficiency
from tools.planning.growth import Work
from tools.planning.prediction import Split
from tools.planning.samples import Lengths
from wire.options import command_parser, known

EXAMPLES = """\
  tools/plan --config configs/slate-7b.toml --gpus 8 --gpu h100 --turns 3
  tools/plan --config configs/ppr-7b.toml --gpus 8 --gpu h200 --price 3.5
  tools/plan --run runs/NAME-TIME --set scheduler.strategy_options.k=8
  tools/plan --against runs/NAME-TIME          what it predicts of a run"""
UNPROVEN = """\
Nothing of this project was measured on a GPU: these times and bytes are
arithmetic over assumed efficiencies. docs/plan.md compares runs on CPUs."""


DEFAULT = Efficiency()
OPTIONS: dict[str, dict[str, tuple[type, Any, str]]] = {
    "a run that is known": {
        "--run": (Path, None, "take texts, and without --gpus speeds, from this run that ended"),
        "--against": (Path, None, "compare what is predicted of this run with what it measured"),
    },
    "expected lengths in tokens, without --run": {
        "--prompt": (int, None, "first prompt of an episode (default: 300)"),
        "--instruction": (int, None, "its part that all questions share (default: 200)"),
        "--action": (int, None, "one action (default: half of max_action_tokens)"),
        "--observation": (int, None, "what follows an action (default: 100, or the config's limit)"),
        "--turns": (float, None, "actions of an episode (default: the budget)"),
    },
    "GPUs": {
        "--gpus": (int, None, "GPUs for actors and learner together"),
        "--gpu": (str, "h100", f"their kind: {', '.join(GPUS)} or custom (default: h100)"),
        "--flops": (float, None, "dense bfloat16 FLOPs a second of one"),
        "--bandwidth": (float, None, "bytes a second of its memory"),
        "--memory": (float, None, "its memory in GiB"),
        "--price": (float, None, "price of one for an hour"),
    },
    "assumed efficiencies (docs/plan.md)": {
        "--learner-share": (float, DEFAULT.learner, "of the FLOPs, training (default: %(default)s)"),
        "--prefill-share": (float, DEFAULT.prefill, "of the FLOPs, reading prompts (default: %(default)s)"),
        "--decode-share": (float, DEFAULT.decode, "of the bandwidth, sampling (default: %(default)s)"),
        "--wait": (float, DEFAULT.wait, "seconds a step waits for judges and tools (default: %(default)s)"),
    },
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of tools/plan."""
    parser = command_parser("tools/plan", "Predict what a run takes: tokens, FLOPs, memory, time, cost.", EXAMPLES)
    default = f"TOML file, as for tools/launch (default: that of --run, else {DEFAULT_CONFIG.name})"
    parser.add_argument("--config", type=Path, metavar="FILE", help=default)
    change = "change a key, as for tools/launch; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=change)
    parser.add_argument(
        "--shape", type=Path, metavar="FOLDER", help="folder of a config.json, if the model is not here"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    for title, options in OPTIONS.items():
        group = parser.add_argument_group(title)
        for name, (kind, value, told) in options.items():
            metavar = {"--run": "RUN", "--against": "RUN", "--gpu": "NAME"}.get(name)
            group.add_argument(name, type=kind, default=value, metavar=metavar, help=told)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parser().parse_args(arguments)
    try:
        check(options)
        told = against(options) if options.against else plan(options)
    except runs.UNREADABLE as error:
        print(f"tools/plan: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.format(msgspec.json.encode(told)).decode() if options.json else "\n".join(page(told)))
    return 0


def check(options: argparse.Namespace) -> None:
    """Raise ValueError for options that are out of range or without effect."""
    said = {name: getattr(options, name) for name in ("flops", "bandwidth", "memory", "price")}
    lengths = [name for name in Lengths.__struct_fields__ if getattr(options, name) is not None]
    known(f"--gpu {options.gpu!r}", options.gpu, [*GPUS, "custom"])
    if (options.run or options.against) and lengths:
        raise ValueError(f"--{lengths[0]} has no effect with --run and --against, whose texts are known: remove one")
    if options.against and (options.gpus or options.set or options.config):
        raise ValueError(
            "--gpus, --set and --config have no effect with --against, which takes that run's: remove them"
        )
    if options.gpus is None and (chosen := [name for name, value in said.items() if value is not None]):
        raise ValueError(f"--{chosen[0]} has no effect without --gpus: say how many there are")
    lacking = [name for name in ("flops", "bandwidth", "memory") if said[name] is None]
    if options.gpus is not None and options.gpu == "custom" and lacking:
        raise ValueError(f"--gpu custom lacks --{lacking[0]}: expected it, or one of the GPUs {', '.join(GPUS)}")
    said |= {name: getattr(options, name) for name in ("learner_share", "prefill_share", "decode_share", "wait")}
    for name, value in said.items():
        most = 1.0 if name.endswith("share") else math.inf
        if value is not None and not (
            math.isfinite(value) and 0 <= value <= most and (value or name in ("price", "wait"))
        ):
            expected = "a share above 0, 1 at most" if most == 1 else "a finite number above 0"
            raise ValueError(f"--{name.replace('_', '-')} {value:g}: expected {expected}")


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """Return the plan of a config, as plain values."""
    if options.run and not options.config:
        config = prediction.config_of(options.run, options.set)
    else:
        config = load(options.config or DEFAULT_CONFIG, options.set)
    model, s = prediction.model_of(config, options.shape), config.scheduler
    lengths: dict[str, Any] = {"run": str(options.run)}
    if options.run:
        source = prediction.recorded(options.run, config)
    else:
        given = {name: getattr(options, name) for name in Lengths.__struct_fields__}
        size, assumed = prediction.made_up(config, **given)
        source = prediction.source_of(config, size)
        lengths = {
            name: {"tokens": value, "assumed": name in assumed} for name, value in msgspec.structs.asdict(size).items()
        }
    work = prediction.work_of(config, source)
    shared, apart = (formulas.learner_flops(config.learner, model, work, share) for share in (True, False))
    method = f"{s.strategy} {strategies.load(s.strategy, s.strategy_options).options or ''}".strip()
    told = {
        "config": config.name,
        "method": method,
        "model": config.model.name,
        "weights": model.weights,
        "lengths": lengths,
    }
    told |= {
        "budget": s.budget,
        "questions": s.questions_per_update,
        "updates": s.updates,
        "max_staleness": s.max_staleness,
    }
    told |= {"work": msgspec.structs.asdict(work), "flops": {"shared": shared, "apart": apart}}
    return told | costs(options, config, model, work)


def costs(options: argparse.Namespace, config: Config, model: Dense, work: Work) -> dict[str, Any]:
    """Return memory, times and cost of a plan: with GPUs of every split of them, else of the config's own processes."""
    if options.gpus is None:
        parts = processes.memory_parts(config, model.settings, model.weights)
        main = {"main_memory": {name: {"count": count, "gib": each} for name, (count, each) in parts.items()}}
        if options.run is None:
            return main | {"splits": []}
        device, reach = prediction.reached(options.run)
        return main | {
            "splits": [
                told(
                    config,
                    prediction.split(
                        config, model, work, device, reach, config.actors.count, config.learner.count, False
                    ),
                    0.0,
                )
            ]
        }
    device = GPUS.get(options.gpu, Device(1.0))
    device = msgspec.structs.replace(
        device, **{n: v for n in Device.__struct_fields__ if (v := getattr(options, n)) is not None}
    )
    reach = Efficiency(options.learner_share, options.prefill_share, options.decode_share, options.wait)
    every = prediction.splits(config, model, work, device, reach, options.gpus)
    return {
        "gpu": options.gpu,
        "gpus": options.gpus,
        "efficiency": reach,
        "splits": [told(config, one, device.price) for one in every],
    }


def told(config: Config, split: Split, price: float) -> dict[str, Any]:
    """Return a split as plain values, with the hours of the whole run and its cost (without its evaluations)."""
    hours = split.speed.period * config.scheduler.updates / 3600
    gpu_hours = hours * (split.actors + split.ranks)
    own = config.actors.count == split.engines and config.learner.count == split.ranks
    return msgspec.to_builtins(split) | {
        "own": own,
        "hours": hours,
        "gpu_hours": gpu_hours,
        "cost": gpu_hours * price or None,
    }


def against(options: argparse.Namespace) -> dict[str, Any]:
    """Return what is predicted of a run and what it measured, with texts and speeds of ``--run``, or of itself."""
    config, texts = prediction.config_of(options.against), options.run or options.against
    model, work = (
        prediction.model_of(config, options.shape),
        prediction.work_of(config, prediction.recorded(texts, config)),
    )
    speed = prediction.split(
        config, model, work, *prediction.reached(texts), config.actors.count, config.learner.count, False
    ).speed
    predicted = msgspec.structs.asdict(work) | msgspec.structs.asdict(speed)
    measured = msgspec.structs.asdict(prediction.measured(options.against))
    rows = {name: {"predicted": predicted[name], "measured": value} for name, value in measured.items()}
    return {"against": str(options.against), "run": str(texts), "quantities": rows}


def page(told: dict[str, Any]) -> list[str]:
    """Return what the terminal shows, at most 80 columns wide."""
    if "against" in told:
        lines = [
            "per update, texts and speeds of " + ("another run" if told["run"] != told["against"] else "the run itself")
        ]
        lines.append(f"{'':<12}{'predicted':>14}{'measured':>14}{'error':>9}")
        for name, row in told["quantities"].items():
            error = f"{row['predicted'] / row['measured'] - 1:+9.0%}" if row["measured"] else f"{'-':>9}"
            lines.append(f"{name:<12}{number(row['predicted']):>14}{number(row['measured']):>14}{error}")
        return lines
    return [*head(told), *tree(told), *processes_of(told), *table(told)]


def head(told: dict[str, Any]) -> list[str]:
    """Return what is planned, and with which lengths."""
    lines = [f"plan of {told['config']}: {told['method']}, budget {told['budget']}"]
    lines.append(f"  {told['model']}, {told['weights'] / 1e9:.3g} billion weights")
    lines.append(f"  {told['updates']} updates of {told['questions']} questions, max_staleness {told['max_staleness']}")
    lengths = told["lengths"]
    if "run" in lengths:
        lines.append(f"  texts of {lengths['run']}")
    else:
        said = [
            f"{name} {value['tokens']:g}{' (assumed)' if value['assumed'] else ''}" for name, value in lengths.items()
        ]
        lines += [f"  lengths: {', '.join(said[:3])}", f"           {', '.join(said[3:])}"]
    return [line if len(line) <= 80 else f"{line[:77]}..." for line in lines]


def tree(told: dict[str, Any]) -> list[str]:
    """Return the tokens and FLOPs of an update, with and without sharing."""
    w, flops = told["work"], told["flops"]
    rows = [
        ("tokens prefilled by actors", w["prompt"], w["prefilled"]),
        ("tokens forwarded by the learner", w["path"], w["forwarded"]),
        ("FLOPs of the learner", flops["apart"], flops["shared"]),
    ]
    lines = [
        "",
        f"an update: {number(w['nodes'])} nodes, {number(w['calls'])} calls, {number(w['sampled'])} tokens sampled, {number(w['turns'])} turns trained",
    ]
    lines.append(f"  {'':<34}{'unshared':>12}{'shared':>12}{'saved':>8}")
    return lines + [f"  {name:<34}{number(a):>12}{number(b):>12}{1 - b / max(1, a):>8.0%}" for name, a, b in rows]


def processes_of(told: dict[str, Any]) -> list[str]:
    """Return the memory of each kind of process."""
    if "main_memory" in told:
        rows = told["main_memory"].items()
        total = sum(row["count"] * row["gib"] for _, row in rows)
        return [
            "",
            "main memory, GiB",
            *(f"  {row['count']:>3} {name:<20}{row['gib']:>8.2f} each" for name, row in rows),
            f"  {'all':<24}{total:>8.2f}",
        ]
    best = told["splits"][0]
    lines = [
        "",
        f"memory of a GPU, GiB: {best['actor_gib']:.0f} of an actor's (room for {number(best['cache'])} tokens of cache),",
    ]
    return [*lines, f"  {best['rank_gib']:.0f} of a rank's"]


def table(told: dict[str, Any]) -> list[str]:
    """Return the splits, the fastest first, and what the best one costs."""
    if not told["splits"]:
        return ["", "no times: give --gpus, or --run with a run of this machine"]
    lines = [
        "",
        "seconds of an update, the fastest split first (*: the config's own)"
        if "gpu" in told
        else "seconds of an update, at the speed of the run's processes",
    ]
    lines.append(
        f"  {'actors':>6}{'ranks':>6}{'generate':>10}{'learn':>9}{'latency':>9}{'period':>9}  {'waits for':<10}{'stale':>5}{'hours':>8}"
    )
    for one in told["splits"]:
        s = one["speed"]
        values = "".join(
            f"{number(s[name]):>{width}}"
            for name, width in (("generate", 10), ("learn", 9), ("latency", 9), ("period", 9))
        )
        lines.append(
            f"  {one['actors']:>6}{one['ranks']:>6}{values}  {s['bound']:<10}{s['staleness']:>5.1f}{number(one['hours']):>8}{' *' if one['own'] else ''}"
        )
        lines += [f"         does not fit: {one['lacks']}"[:80]] if one["lacks"] else []
    best = told["splits"][0]
    if "gpu" not in told:
        return lines
    if best["lacks"]:
        return [*lines, "no split fits: more memory, fewer weights, sharding or a smaller micro_tokens"]
    cost = "give --price for the cost" if best["cost"] is None else f"cost {number(best['cost'])}"
    lines.append(f"best: --set actors.count={best['engines']} --set learner.count={best['ranks']}")
    lines.append(
        f"  {number(best['hours'])} hours without evaluations, {number(best['gpu_hours'])} {told['gpu']} hours, {cost}"
    )
    return [*lines, "", UNPROVEN]


def number(value: float) -> str:
    """Return a number in at most nine signs, with three significant digits."""
    if not math.isfinite(value):
        return "-"
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if letter == 'k' else factor):.4g}{letter}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
