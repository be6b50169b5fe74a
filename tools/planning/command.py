"""The command coppice plan: what a run of a config will take, and which split of the GPUs is the
fastest."""

import argparse
import math
import textwrap
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.environments import registry
from coppice.common.options import check_choice, checked, command_parser, gave_up, option
from coppice.learner.model.memory import lacks, model_shape
from coppice.learner.model.memory import told as parts_told
from coppice.scheduler.growth import strategies
from coppice.tools.defaults.models import OURS, ensure_model
from coppice.tools.defaults.settings import cache_folder
from coppice.tools.launching.config import Config, default, load
from coppice.tools.launching.memory import gpu_lines
from coppice.tools.planning import formulas
from coppice.tools.planning.formulas import GPUS, SHAPES, Assumed, Dense, Served, Split
from coppice.tools.planning.growth import MadeUp, Work, work_of

EXAMPLES = """\
  coppice plan --config configs/slate-7b.toml --gpus 8 --assume turns=3
  coppice plan --config configs/ppr-7b.toml --gpu h200 --gpus 8
  coppice plan --set scheduler.strategy_options.k=8"""
UNPROVEN = """\
Nothing of this project was measured on a GPU: these times and bytes are
arithmetic over assumed efficiencies. docs/plan.md compares runs on CPUs."""
HEARTBEATS = 0.10
"""Share of a scheduler's time that the heartbeats of 11,000 workers take (docs/performance.md)."""
LENGTHS = ("instruction", "prompt", "action", "observation", "turns")
"""What ``Assumed`` says of texts, where none are known. All else is of GPUs."""


def parser() -> argparse.ArgumentParser:
    what = "Predict what a run takes: tokens, FLOPs, memory, time, cost."
    parser = command_parser("coppice plan", what, EXAMPLES)
    add, names = parser.add_argument, ", ".join(Assumed.__struct_fields__)
    add("--config", type=Path, metavar="FILE", help=f"TOML file (default: {default([]).name})")
    add("--set", action="append", metavar="KEY=VALUE", help="change a key; repeatable")
    add("--gpus", type=int, help="GPUs for actors and learner together")
    add("--gpu", default="h100", metavar="NAME", help=f"one of {', '.join(GPUS)} (default: h100)")
    assumption = f"{names} (docs/plan.md); repeatable"
    add("--assume", action="append", default=[], metavar="KEY=VALUE", help=assumption)
    add("--shape", type=Path, metavar="FOLDER", help="of a config.json, if the model is not here")
    add("--json", action="store_true", help="print the plan as JSON")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        given = checked("--assume", "coppice plan", Assumed, dict(map(option, options.assume)), ())
        check_choice(f"--gpu {options.gpu!r}", options.gpu, GPUS)
        if useless := sorted(given.keys() - LENGTHS if options.gpus is None else ()):
            raise ValueError(f"--assume {useless[0]} has no effect without --gpus: remove it")
        told = plan(options, given)
    except (OSError, ValueError) as error:
        return gave_up("coppice plan", error)
    whole = msgspec.json.format(msgspec.json.encode(told)).decode()
    print(whole if options.json else "\n".join(page(told)))
    return 0


class RunPlan(msgspec.Struct, frozen=True):
    """What a run of ``config`` will take. texts: their lengths; those that nobody gave are marked
    as assumed. unshared, shared: FLOPs of the learner's update without and with shared prefixes.
    gpu, splits: none without --gpus. placed: what each GPU holds in the config's own split, GiB."""

    config: Config
    weights: float
    texts: str
    work: Work
    unshared: float
    shared: float
    gpu: str
    assumed: Assumed
    splits: list[Split]
    served: list[Served]
    placed: list[dict[str, float]]


def plan(options: argparse.Namespace, given: dict[str, Any]) -> RunPlan:
    """Return the plan of a config. given: what --assume sets."""
    gpus, gpu = options.gpus, "" if options.gpus is None else options.gpu
    config = load(options.config or default(options.set or []), options.set or [])
    model = model_of(config, options.shape)
    assumed = msgspec.convert(GPUS.get(gpu, {}) | given, Assumed)
    source, lengths = made_up(config, assumed)
    marks = {name: "" if name in given else " (assumed)" for name in lengths}
    texts = ", ".join(f"{name} {value:g}{marks[name]}" for name, value in lengths.items())
    work = work_of(config, source)
    served = [] if gpus is None else formulas.served(config, assumed)
    others = assumed.retriever_gpus + sum(one.gpus for one in served)
    if gpus is not None and gpus <= others:
        own = f"{assumed.retriever_gpus} of the retriever and {others - assumed.retriever_gpus}"
        raise ValueError(
            f"--gpus {gpus}: expected one at least beside {own} of judges (--assume judge_gpus,"
            " retriever_gpus)"
        )
    splits = formulas.splits(config, model, work, assumed, (gpus or 0) - others, others)
    enough = gpus is not None and config.learner.here <= gpus - others
    placed = formulas.placed(config, model, assumed, gpus) if enough else []
    unshared, shared = (
        formulas.learner_flops(config.learner, model, work, one) for one in (False, True)
    )
    return RunPlan(
        config, model.weights, f"lengths: {texts}", work, unshared, shared, gpu, assumed, splits,
        served, placed,
    )  # fmt: skip


def model_of(config: Config, given: Path | None = None) -> Dense:
    """Return the sizes of a config's model: those of a config.json that is ``given``, of the
    model's folder, or as known by its name. Raises ValueError.

    A model of this project that is not here yet is made, which takes some seconds.
    """
    name = config.model.name
    folder = given or (ensure_model(name, cache_folder()) if name in OURS else Path(name))
    if shape := model_shape(folder):
        return Dense.of(shape, str(folder))
    for start, sizes in SHAPES.items():
        if not given and name.rpartition("/")[2].startswith(start):
            return sizes
    lacking = f"{given or f'model.name = {name!r}'}: no config.json there"
    raise ValueError(
        f"{lacking}, so the model's sizes are unknown: expected --shape FOLDER, with the model's"
        f" config.json in it, or a model that is here or known ({', '.join(SHAPES)})"
    )


def made_up(config: Config, assumed: Assumed) -> tuple[MadeUp, dict[str, float]]:
    """Return texts of the assumed lengths, and these lengths. Raises ValueError."""
    s, options, a = config.scheduler, config.data.options, assumed
    seen = options.get("max_observation_characters", 400) // 4
    environment = registry.load(config.data.environment, options)
    instruction, action = min(a.instruction, a.prompt - 1), a.action or -(-s.max_action_tokens // 2)
    observation, turns = seen if a.observation < 0 else a.observation, a.turns or float(s.budget)
    if action > s.max_action_tokens:
        most = f"expected at most scheduler.max_action_tokens = {s.max_action_tokens}"
        raise ValueError(f"--assume action={a.action}: {most}")
    if not 1 <= turns <= (s.budget if environment.forced_prefix else math.inf):
        most = f"at most scheduler.budget = {s.budget} where that ends an episode"
        raise ValueError(f"--assume turns={turns:g}: expected at least 1, and {most}")
    lengths = (instruction, a.prompt, action, observation)
    source = MadeUp(*lengths, turns, s.budget, environment.fresh)
    return source, dict(zip(LENGTHS, (*lengths, turns), strict=True))


def page(told: RunPlan) -> list[str]:
    """Return what the terminal shows of a plan, at most 80 columns wide."""
    c, s, w = told.config, told.config.scheduler, told.work
    options = strategies.load(s.strategy, s.strategy_options).options
    given = "".join(f" {name}={value}" for name, value in options.items())
    about = [
        f"plan of {c.name}: {s.strategy}{given}, budget {s.budget}",
        f"  {c.model.name}, {told.weights / 1e9:.3g} billion weights",
        f"  {s.updates} updates of {s.questions_per_update} questions"
        f", max_staleness {s.max_staleness}",
        f"  {told.texts}",
    ]
    sums = {"nodes": w.nodes, "calls": w.calls, "tokens sampled": w.sampled}
    sums |= {"turns trained": w.turns}
    lines = [part for line in about for part in textwrap.wrap(line, 80, subsequent_indent="    ")]
    counts = ", ".join(f"{number(value)} {name}" for name, value in sums.items())
    lines += ["", *textwrap.wrap(f"an update: {counts}", 80)]
    lines += [f"  {'':<34}{'unshared':>12}{'shared':>12}{'saved':>8}"]
    for name, a, b in (
        ("tokens prefilled by actors", w.prompt, w.prefilled),
        ("tokens forwarded by the learner", w.path, w.forwarded),
        ("FLOPs of the learner", told.unshared, told.shared),
    ):
        lines += [f"  {name:<34}{number(a):>12}{number(b):>12}{1 - b / max(1, a):>8.0%}"]
    if not told.gpu:
        return [*lines, "", "no times: give --gpus; main memory: coppice launch --dry-run"]
    lines += ["", *memory(told)]
    if not told.splits:
        return [*lines, "", "no times: actors and learner have no GPUs of their own", "", UNPROVEN]
    return [*lines, "", *times(told), *summed(told, told.splits[0])]


def memory(told: RunPlan) -> list[str]:
    """Return what each GPU holds in the config's own split, and which GPUs judges take."""
    room, used = told.assumed.memory, told.assumed.retriever_gpus
    lines = gpu_lines(told.placed)
    for number, why in enumerate(lacks(parts, room) for parts in told.placed):
        lines += [f"GPU {number} does not fit: {why}"] if why else []
    lines += [f"retriever: {used} GPUs (assumed)"] if used else []
    for one in told.served:
        size = f"its weights {one.gib:.1f} GiB of each" if one.gib else "of unknown size"
        lines += [f"judge {one.judge}: {one.gpus} GPUs for {one.model}, {size} (assumed)"]
    heading = [f"memory of the config's own split, of {room:g} GiB a GPU"] * bool(told.placed)
    indents: Any = {"initial_indent": "  ", "subsequent_indent": "    "}
    return [*heading, *(part for line in lines for part in textwrap.wrap(line, 80, **indents))]


def times(told: RunPlan) -> list[str]:
    """Return the memory of the fastest split, and the times of all, the fastest first."""
    best, c = told.splits[0], told.config
    room = f"with room for {number(best.cache)} tokens of cache"
    lines = [
        "memory in the fastest split, GiB",
        f"  an actor's GPU {best.actor_gib:8.1f}, {room}",
        *textwrap.wrap(f"  a rank's GPU {parts_told(best.rank)}", 80, subsequent_indent="    "),
        "",
        "seconds of an update, the fastest split first (*: the config's own)",
        " actors ranks  generate    learn  latency   period  waits for   stale    hours",
    ]
    for one in told.splits:
        s, own = one.speed, (one.engines, one.ranks) == (c.actors.count, c.learner.count)
        values = "".join(f"{number(value):>9}" for value in (s.learn, s.latency, s.period))
        line = f"{one.actors:>7}{one.ranks:>6}{number(s.generate):>10}{values}"
        line += f"  {s.bound:<10}{s.staleness:>7.1f}{number(one.hours):>9}"
        lines += [line + " *" * own]
        why, margin = f"does not fit: {one.lacks}", " " * 8
        wrapped = textwrap.wrap(why, 80, initial_indent=margin, subsequent_indent=margin)
        lines += wrapped if one.lacks else []
    return lines


def summed(told: RunPlan, best: Split) -> list[str]:
    """Return what the best split costs, and how many schedulers and judges it keeps busy, by
    Little's law."""
    if best.lacks:
        return ["no split fits"]
    assumed, period, shards = told.assumed, best.speed.period, told.config.scheduler.shards
    trees = 3600 * told.config.scheduler.questions_per_update / period
    bears = 3600 * (1 - HEARTBEATS) * 1000 / assumed.tree_ms
    need = max(1, math.ceil(trees / bears))
    scheduler = f"a scheduler bears {number(bears)} at {assumed.tree_ms:g} ms each (assumed)"
    scheduler += f": --set scheduler.shards={need}" if need > shards else ""
    judged = number(told.work.judged / period * assumed.wait)
    cost = f"cost {number(best.cost)}" if best.cost else "no price was given"
    hours = f"{number(best.hours)} hours without evaluations, {number(best.gpu_hours)} GPU hours"
    return [
        f"best: --set actors.count={best.engines} --set learner.count={best.ranks}",
        f"  {hours}, {cost}",
        f"  {number(trees)} trees an hour; {scheduler}",
        f"  {judged} actions at judges at once, each for {assumed.wait:g} s (assumed)",
        *("", UNPROVEN),
    ]


def number(value: float) -> str:
    """Return a number in at most nine signs, with three significant digits."""
    if not math.isfinite(value):
        return "-"
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if letter == 'k' else factor):.4g}{letter}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
