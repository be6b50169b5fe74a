"""The command tools/plan: what a run of a config will take, and which split of the GPUs is the fastest."""

import argparse
import math
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec

from scheduler import strategies
from tools.inspecting import runs
from tools.launching import processes
from tools.launching.config import DEFAULT_CONFIG, Config, load
from tools.planning import formulas, prediction
from tools.planning.formulas import GPUS, Device, Efficiency
from tools.planning.growth import Work
from tools.planning.prediction import Split
from tools.planning.samples import Lengths, MadeUp, Source
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
        lines = compared(told) if isinstance(told, dict) else page(told)
    except runs.UNREADABLE as error:
        print(f"tools/plan: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.format(msgspec.json.encode(told)).decode() if options.json else "\n".join(lines))
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


class Plan(msgspec.Struct, frozen=True):
    """What a run of ``config`` will take. texts: the lengths that nobody gave are marked as assumed. apart, shared: FLOPs of the learner's update without
    and with shared prefixes. memory: main memory of the processes, as (how many, GiB of each); none with GPUs, whose splits say it."""

    config: Config
    weights: float
    texts: str
    work: Work
    apart: float
    shared: float
    memory: dict[str, tuple[int, float]]
    gpu: str
    efficiency: Efficiency | None
    splits: list[Split]


def plan(options: argparse.Namespace) -> Plan:
    """Return the plan of a config."""
    if options.run and not options.config:
        config = prediction.config_of(options.run, options.set)
    else:
        config = load(options.config or DEFAULT_CONFIG, options.set)
    model, learner = prediction.model_of(config, options.shape), config.learner
    source, texts = texts_of(options, config)
    work = prediction.work_of(config, source)
    memory, device, reach = dict[str, tuple[int, float]](), None, None
    if options.gpus is not None:
        own = {name: value for name in Device.__struct_fields__ if (value := getattr(options, name)) is not None}
        device = msgspec.structs.replace(GPUS.get(options.gpu, Device(1.0)), **own)
        reach = Efficiency(options.learner_share, options.prefill_share, options.decode_share, options.wait)
    else:
        memory = processes.memory_parts(config, model.settings, model.weights)
        device, reach = prediction.reached(options.run) if options.run else (None, None)
    splits = prediction.splits(config, model, work, device, reach, options.gpus) if device and reach else []
    apart, shared = (formulas.learner_flops(learner, model, work, share) for share in (False, True))
    gpu = options.gpu if options.gpus is not None else ""
    return Plan(config, model.weights, texts, work, apart, shared, memory, gpu, reach, splits)


def texts_of(options: argparse.Namespace, config: Config) -> tuple[Source, str]:
    """Return the texts of a plan, and what they are."""
    if options.run:
        return prediction.recorded(options.run, config), f"texts of {options.run}"
    size, assumed = prediction.made_up(config, {name: getattr(options, name) for name in Lengths.__struct_fields__})
    lengths = msgspec.structs.asdict(size).items()
    said = ", ".join(f"{name} {value:g}{' (assumed)' if name in assumed else ''}" for name, value in lengths)
    return MadeUp(size, config.scheduler.budget, prediction.environment_of(config).fresh), f"lengths: {said}"


def against(options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Return what is predicted of a run and what it measured, by quantity, with texts and speeds of ``--run``, or of itself."""
    config, texts = prediction.config_of(options.against), options.run or options.against
    model, work = (
        prediction.model_of(config, options.shape),
        prediction.work_of(config, prediction.recorded(texts, config)),
    )
    (own,) = prediction.splits(config, model, work, *prediction.reached(texts), None)
    predicted = msgspec.structs.asdict(work) | msgspec.structs.asdict(own.speed)
    return {name: (predicted[name], value) for name, value in prediction.measured(options.against).items()}


def compared(rows: dict[str, tuple[float, float]]) -> list[str]:
    """Return what the terminal shows of a comparison."""
    lines = ["per update", f"{'':<12}{'predicted':>14}{'measured':>14}{'error':>9}"]
    errors = {name: f"{guess / true - 1:+.0%}" if true else "-" for name, (guess, true) in rows.items()}
    return lines + [f"{n:<12}{number(p):>14}{number(m):>14}{errors[n]:>9}" for n, (p, m) in rows.items()]


def page(told: Plan) -> list[str]:
    """Return what the terminal shows of a plan, at most 80 columns wide."""
    c, s, w = told.config, told.config.scheduler, told.work
    options = strategies.load(s.strategy, s.strategy_options).options
    given = "".join(f" {name}={value}" for name, value in options.items())
    about = [
        f"plan of {c.name}: {s.strategy}{given}, budget {s.budget}",
        f"  {c.model.name}, {told.weights / 1e9:.3g} billion weights",
        f"  {s.updates} updates of {s.questions_per_update} questions, max_staleness {s.max_staleness}",
        f"  {told.texts}",
    ]
    sums = f"{number(w.nodes)} nodes, {number(w.calls)} calls, {number(w.sampled)} tokens sampled, {number(w.turns)} turns trained"
    rows = [
        ("tokens prefilled by actors", w.prompt, w.prefilled),
        ("tokens forwarded by the learner", w.path, w.forwarded),
        ("FLOPs of the learner", told.apart, told.shared),
    ]
    lines = [part for line in about for part in textwrap.wrap(line, 80, subsequent_indent="    ")]
    lines += ["", *textwrap.wrap(f"an update: {sums}", 80), f"  {'':<34}{'unshared':>12}{'shared':>12}{'saved':>8}"]
    lines += [f"  {name:<34}{number(a):>12}{number(b):>12}{1 - b / max(1, a):>8.0%}" for name, a, b in rows]
    return [*lines, "", *memory(told), "", *times(told)]


def memory(told: Plan) -> list[str]:
    """Return the memory of each kind of process."""
    if told.gpu:
        best = told.splits[0]
        actor = f"  an actor's GPU {best.actor_gib:8.1f}, with room for {number(best.cache)} tokens of cache"
        return ["memory, GiB", actor, f"  a rank's GPU   {best.rank_gib:8.1f}"]
    total = sum(count * each for count, each in told.memory.values())
    lines = [f"  {count:>3} {name:<20}{each:>8.2f} each" for name, (count, each) in told.memory.items()]
    return ["main memory, GiB", *lines, f"  {'all':<24}{total:>8.2f}"]


def times(told: Plan) -> list[str]:
    """Return the splits, the fastest first, and what the best one costs."""
    if not told.splits:
        return ["no times: give --gpus, or --run with a run of this machine"]
    which = "the fastest split first (*: the config's own)" if told.gpu else "at the speed of the run's processes"
    lines = [f"seconds of an update, {which}"]
    lines += [" actors ranks  generate    learn  latency   period  waits for   stale    hours"]
    for one in told.splits:
        s, own = one.speed, (one.engines, one.ranks) == (told.config.actors.count, told.config.learner.count)
        values = "".join(f"{number(value):>9}" for value in (s.learn, s.latency, s.period))
        line = f"{one.actors:>7}{one.ranks:>6}{number(s.generate):>10}{values}  {s.bound:<10}{s.staleness:>7.1f}"
        lines += [f"{line}{number(one.hours):>9}{' *' if own and told.gpu else ''}"]
        lines += [f"        does not fit: {one.lacks}"[:80]] if one.lacks else []
    best = told.splits[0]
    if not told.gpu:
        return lines
    if best.lacks:
        return [*lines, "no split fits: more memory, fewer weights, sharding or a smaller micro_tokens"]
    cost = f"cost {number(best.cost)}" if best.cost else "give --price for the cost"
    lines += [f"best: --set actors.count={best.engines} --set learner.count={best.ranks}"]
    lines += [f"  {number(best.hours)} hours without evaluations, {number(best.gpu_hours)} GPU hours, {cost}"]
    return [*lines, "", UNPROVEN]


def number(value: float) -> str:
    """Return a number in at most nine signs, with three significant digits."""
    if not math.isfinite(value):
        return "-"
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if letter == 'k' else factor):.4g}{letter}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
