"""What a seed decides before its run starts. Every seed enables some kinds of faults only, and all
faults end at ``healthy_from``; from then on the run must get to its end."""

import random
from typing import Any

import msgspec

from coppice.common.shards import Shard
from coppice.scheduler.config import EvaluationConfig, SchedulerConfig
from coppice.scheduler.dispatch.dispatcher import DispatchConfig
from tests.simulation.peers import Manners

STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("slate", {"k": 2}),
    ("chain", {}),
    ("full", {"k": 2}),
    ("tree_grpo", {"trees": 1, "nodes": 1}),
]
KINDS = "freeze die cut error data_fault twice garbage hang short not_a_number crash".split()
LEARNER = -1
"""The last of a world's peers is struck most often, because its calls are open the longest."""


class Strike(msgspec.Struct, frozen=True):
    """kind: "freeze", "die" or "cut", for ``seconds``. peer: its place in the world's list."""

    at: float
    kind: str
    peer: int
    seconds: float


class Crash(msgspec.Struct, frozen=True):
    """The death of the scheduler, which ends the run until it is resumed. place: "time" (count is
    seconds), "before commit", "after commit", "send" (so many from its start) or "update" (within
    a second of the learner's next ones)."""

    place: str
    count: float


class Plan(msgspec.Struct, frozen=True):
    """kv: tokens that an actor's cache holds (0: it does not say); outside, alone: whether judges,
    or the learner, outlive a crash; batch: the samples that keep an actor busy (0: the cache
    always comes first); power: whether crashes are power cuts, which lose what was not synced."""

    settings: SchedulerConfig
    actors: int
    capacity: int
    kv: int
    checkpoint_every: int
    slow: float
    spikes: float
    manners: Manners
    strikes: list[Strike]
    crashes: list[Crash]
    healthy_from: float
    outside: bool
    alone: bool
    shard: Shard
    batch: int
    power: bool
    deterministic: bool


def plan(seed: int) -> Plan:
    rng, more = random.Random(f"plan/{seed}"), random.Random(f"more/{seed}")
    kinds = {kind for kind in KINDS if rng.random() < 0.35}
    healthy_from = rng.choice([5.0, 15.0, 40.0, 80.0])

    most = {"error": 0.3, "data_fault": 0.05, "twice": 0.5, "garbage": 0.05, "hang": 0.1}
    most |= {"short": 0.1, "not_a_number": 0.5}
    shares = {kind: rng.random() * part if kind in kinds else 0.0 for kind, part in most.items()}
    means = {"generate": [0.05, 0.5, 2.0], "load": [0.05, 1.0], "judge": [0.01, 0.3, 2.0]}
    means |= {"train": [0.1, 1.0, 5.0]}
    seconds = {service: rng.choice(choices) for service, choices in means.items()}
    seconds |= {"retrieve": 0.05, "close": 0.01}
    rare = {"lie": 0.3, "forget": 1.0}
    shares |= {kind: part * more.random() * (more.random() < 0.35) for kind, part in rare.items()}
    settings = msgspec.structs.replace(_settings(rng), keep_versions=seed % 2)
    power = more.random() < 0.3
    alone = (apart := random.Random(f"apart/{seed}")).random() < 0.3 and not power
    shard = Shard(1, 2) if apart.random() < 0.3 else Shard()
    actors, outage = rng.randint(1, 3), []
    if more.random() < 0.2:  # there is one retriever: calls wait until they expire
        outage = [Strike(more.random() * healthy_from, "die", actors + 3, 16 + 9 * more.random())]
    return Plan(
        settings=settings,
        batch=rng.choice([0, 2]),
        actors=actors,
        capacity=rng.choice([1, 2, 8]),
        kv=rng.choice([0, 0, 400, 2000]),
        checkpoint_every=rng.choice([1, 1, 2]),
        slow=rng.choice([0.001, 0.02, 0.2]),
        spikes=rng.choice([0.0, 0.1]),
        manners=Manners(**shares, seconds=seconds),
        strikes=_strikes(rng, kinds, healthy_from) + outage,
        crashes=_crashes(rng, healthy_from) if "crash" in kinds else [],
        healthy_from=healthy_from,
        outside=rng.random() < 0.5,
        alone=alone,
        shard=shard,
        power=power,
        deterministic=not alone and shard.count == 1 and more.random() < 0.5,
    )


def _settings(rng: random.Random) -> SchedulerConfig:
    strategy, options = rng.choice(STRATEGIES)
    drawn: dict[str, Any] = {
        "questions_per_update": rng.randint(1, 2),
        "updates": rng.randint(1, 3),
        "max_staleness": rng.choice([0, 1, 2]),
        "dynamic_sampling_budget": rng.choice([0, 0, 1]) if strategy != "chain" else 0,
        "evaluation": EvaluationConfig(questions=rng.choice([0, 0, 1]), every=rng.choice([0, 1])),
    }
    beat, dead = rng.choice([3.0, 6.0]), rng.choice([12.0, 20.0])
    return SchedulerConfig(
        strategy=strategy, strategy_options=options, budget=2, judge="slate_rules",
        dispatch=DispatchConfig(heartbeat_s=beat, dead_after_s=dead), max_action_tokens=64,
        generate_deadline_s=30.0, judge_deadline_s=15.0, startup_timeout_s=120.0, **drawn,
    )  # fmt: skip


def _strikes(rng: random.Random, kinds: set[str], until: float) -> list[Strike]:
    wanted = [kind for kind in ("freeze", "die", "cut") if kind in kinds]
    strikes: list[Strike] = []
    for _ in range(rng.randint(1, 5) if wanted else 0):
        at, kind = rng.random() * until, rng.choice(wanted)
        peer = LEARNER if rng.random() < 0.3 else rng.randrange(16)
        strikes.append(Strike(at, kind, peer, rng.choice([0.5, 3.0, 25.0]) * rng.random()))
    return strikes


def _crashes(rng: random.Random, until: float) -> list[Crash]:
    crashes: list[Crash] = []
    for _ in range(rng.randint(1, 3)):
        place = rng.choice(["time", "before commit", "after commit", "send", "update"])
        count = {"time": rng.random() * until, "update": rng.randint(1, 3)}
        crashes.append(Crash(place, count.get(place, rng.randint(1, 40))))
    return crashes
