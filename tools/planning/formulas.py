"""The arithmetic of a plan: work into FLOPs, seconds and bytes. A multiplication with its addition
is 2 FLOPs, a backward costs two forwards (Kaplan et al. 2020, arXiv 2001.08361, section 2.1);
decoding is bound by what it reads (Pope et al. 2022, arXiv 2211.05102)."""

import math
from typing import Any

import msgspec

from coppice.common.numbers import Count, Natural, NotNegative, Part, Positive
from coppice.learner.config import LearnerConfig
from coppice.learner.model.memory import lacks, rank_parts
from coppice.learner.update.plan import plan_of
from coppice.tools.launching import memory
from coppice.tools.launching.config import Config
from coppice.tools.planning.growth import Work


class Dense(msgspec.Struct):
    """The sizes of a dense model of the Llama or Qwen family, by their names in config.json."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads

    @classmethod
    def of(cls, settings: dict[str, Any], name: str) -> "Dense":
        """Return the sizes that a config.json states. Raises ValueError."""
        text, expected = settings.get("text_config", settings), "expected a dense model"
        if experts := [key for key in text if "experts" in key]:
            mixed = f"{experts[0]} = {text[experts[0]]!r}"
            raise ValueError(f"model {name} has {mixed}: {expected}, without experts")
        try:
            return msgspec.convert({k: v for k, v in text.items() if v is not None}, cls)
        except msgspec.ValidationError as error:
            family = "of the Llama or Qwen family"
            raise ValueError(f"config.json of {name}: {error}; {expected} {family}") from None

    @property
    def per_token(self) -> int:
        """The weights that one token passes in all layers: of attention, and three of the MLP."""
        heads = self.num_attention_heads + self.num_key_value_heads
        attention = 2 * self.hidden_size * self.head_dim * heads
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def per_pair(self) -> int:
        """The multiplications of one (query, key) pair in all layers: for score and value."""
        return 2 * self.num_hidden_layers * self.num_attention_heads * self.head_dim

    @property
    def head(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def weights(self) -> int:
        """The number of weights, without norms and biases (less than one in a thousand)."""
        return self.per_token + self.head * (1 if self.tie_word_embeddings else 2)

    def cached(self, size: int) -> int:
        """Return the bytes of one token's keys and values. size: bytes of a number."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * size

    def multiplications(self, tokens: float, pairs: float, targets: float) -> float:
        """Return those of a forward of ``tokens``, ``pairs`` of (query, key), and ``targets`` rows
        of the head."""
        return tokens * self.per_token + pairs * self.per_pair + targets * self.head


SHAPES = {
    "Qwen2.5-0.5B": Dense(24, 896, 4864, 14, 151_936, 2),
    "Qwen2.5-1.5B": Dense(28, 1536, 8960, 12, 151_936, 2),
    "Qwen2.5-3B": Dense(36, 2048, 11_008, 16, 151_936, 2),
    "Qwen2.5-7B": Dense(28, 3584, 18_944, 28, 152_064, 4, tie_word_embeddings=False),
    "Qwen2.5-VL-7B": Dense(28, 3584, 18_944, 28, 152_064, 4, tie_word_embeddings=False),
    "Qwen3-4B": Dense(36, 2560, 9728, 32, 151_936, 8, 128),
}
"""Models of the shipped configs, by the beginning of their names, from their config.json."""
GPUS = {
    "a100": {"flops": 312e12, "bandwidth": 2.039e12, "memory": 80.0},
    "h100": {"flops": 989e12, "bandwidth": 3.35e12, "memory": 80.0},
    "h200": {"flops": 989e12, "bandwidth": 4.8e12, "memory": 141.0},
    "b200": {"flops": 2250e12, "bandwidth": 8.0e12, "memory": 180.0},
    "l40s": {"flops": 362e12, "bandwidth": 0.864e12, "memory": 48.0},
}
"""Peaks from NVIDIA's data sheets (SXM where there is one, without sparsity). Prices differ by
seller, so there are none."""
JUDGE_SHARE = 0.5
"""The largest share of its GPUs that a judge's weights fill; the rest is for its cache."""


class Assumed(msgspec.Struct, frozen=True):
    """All that a plan assumes, which ``--assume`` changes; docs/plan.md says what each means and
    which default a 0 or -1 stands for. No run of this project has tested it on a GPU.

    Lengths are in tokens. A GPU: flops, dense bfloat16 operations a second; bandwidth, bytes a
    second; memory, GiB; price of an hour.
    """

    instruction: Natural = 200
    prompt: Count = 300
    action: Natural = 0
    observation: int = -1
    turns: NotNegative = 0.0
    flops: Positive = math.inf
    bandwidth: Positive = math.inf
    memory: Positive = math.inf
    price: NotNegative = 0.0
    learner_share: Part = 0.2
    prefill_share: Part = 0.4
    decode_share: Part = 0.5
    judge_gpus: int = -1
    retriever_gpus: Natural = 0
    wait: NotNegative = 1.0
    tree_ms: Positive = 20.0


def learner_flops(w: LearnerConfig, model: Dense, work: Work, shared: bool = True) -> float:
    """Return the FLOPs of an update, with prefixes shared (packed trees) or every turn complete. A
    trunk that a cut repeats has its pairs repeated."""
    tokens, pairs, targets = work.path, work.path_pairs, work.path_targets
    if shared:
        tokens, targets = work.forwarded, work.targets
        pairs = work.pairs * work.forwarded / max(1, work.packed)
    attention, again, total = 2 * model.multiplications(0, pairs, 0), w.gradient_checkpointing, 0.0
    for part in plan_of(w).models.values():
        weights = 2 * model.multiplications(tokens, 0, targets if part.vocabulary else 0)
        own = 2 if part.lora.rank else 3
        total += (weights + attention) * part.forwards
        total += part.backwards * (weights * (own + again) + attention * (3 + again))
    return total


def actor_flops(model: Dense, work: Work) -> tuple[float, float]:
    """Return the FLOPs of an update's prefill and of its decoding."""
    before = work.context / max(1, work.sampled)
    prefill = 2 * model.multiplications(work.prefilled, work.prefilled * before / 2, work.calls)
    return prefill, 2 * model.multiplications(work.sampled, work.context, work.sampled)


class Speed(msgspec.Struct, frozen=True):
    """What a plan takes, in seconds for an update. generate: of the actors' time, all of them busy;
    latency: from the first admission of an update's trees to their ends; learn: of the learner's;
    period: from one update to the next. bound: what the period waits for. staleness: the mean over
    trained tokens, in updates."""

    generate: float
    latency: float
    learn: float
    period: float
    bound: str
    staleness: float


def speed(
    w: LearnerConfig, model: Dense, work: Work, reach: Assumed, stale: int, actors: int,
    most: float, size: int = 2, turns: bool = False,
) -> Speed:  # fmt: skip
    """Return the times of an update, by a roofline and Little's law. stale: max_staleness. actors:
    devices that generate. most: samples that the memory of all actors together has room for, or
    that they decode at once if that is less. size: bytes of a number. turns: whether generation and
    training take turns on shared GPUs, as they do without staleness: no more than (stale + 1)
    updates' trees are in flight. The latency is that of one update's trees alone.
    """
    prefill, decode = actor_flops(model, work)
    alone = work.sampled / max(1.0, work.longest)  # samples in flight of one update's trees
    prefilling = prefill / (reach.flops * reach.prefill_share)

    def decoding(batch: float) -> float:
        read = work.sampled / batch * model.weights * size + work.context * model.cached(size)
        seconds = read / (reach.bandwidth * reach.decode_share)
        return max(seconds, decode / (reach.flops * reach.prefill_share))

    batch, small = (max(1.0, min(most, many * alone) / actors) for many in (stale + 1, 1))
    generate = (decoding(batch) + prefilling) / actors
    longest = work.longest * decoding(small) * small / max(1, work.sampled) + prefilling / actors
    latency = max(generate, longest) + work.steps * reach.wait
    learn = learner_flops(w, model, work) / (w.count * reach.flops * reach.learner_share)
    bounds = {"actors": generate, "learner": learn, "latency": (latency + learn) / (stale + 1)}
    bounds |= {"turns": generate + learn} if turns else {}
    bound = max(bounds, key=lambda name: bounds[name])
    age = staleness(bound, stale, latency, learn, bounds[bound])
    return Speed(generate, latency, learn, bounds[bound], bound, age)


def staleness(bound: str, stale: int, latency: float, learn: float, period: float) -> float:
    """Return the expected mean age of a trained token's weights, in updates.

    Where actors are the bottleneck, a batch is sampled while the one before is trained, and only
    tokens of that time are one version old. Otherwise its trees begin ``stale`` versions before,
    and what is sampled later in the latency meets newer weights.
    """
    if bound == "actors":
        return min(float(stale), learn / period)
    whole, rest = divmod(latency, period)
    newer = (whole * (whole - 1) / 2 * period + whole * rest) / latency if latency else 0.0
    return max(0.0, stale - newer)


class Split(msgspec.Struct, frozen=True):
    """Who gets how many of the GPUs, and what follows. engines: actor processes. hours: of the
    whole run without its evaluations. cache: tokens that an engine has room for. actor_gib:
    memory of an actor's GPU. rank: what a rank's holds, GiB. lacks: why it cannot work, or "".
    gpu_hours: of all GPUs; cost: 0 without a price."""

    actors: int
    ranks: int
    engines: int
    speed: Speed
    hours: float
    cache: float
    actor_gib: float
    rank: dict[str, float]
    lacks: str
    gpu_hours: float
    cost: float


def split(
    config: Config, model: Dense, work: Work, reach: Assumed, actors: int, ranks: int, others: int
) -> Split:
    """Return what follows if this many GPUs generate and train, beside ``others``."""
    a, s, size = config.actors, config.scheduler, 2
    learner = msgspec.structs.replace(memory.typed(config).learner, count=ranks)
    each = max(1, (a.served or a.sglang).gpus)
    engines, held = actors // each, model.weights * size / 2**30
    room = memory.share_of(a) * reach.memory * each
    cache = (room - held) * 2**30 / model.cached(size)
    context = max(1.0, work.context / max(1, work.sampled))
    most = engines * min(a.max_batch, max(1.0, cache / context))
    timed = speed(learner, model, work, reach, s.max_staleness, actors, most, size, a.colocated)
    hours = timed.period * s.updates / 3600
    shape = msgspec.structs.asdict(model)
    rank = rank_parts(learner, shape, model.weights, size) | {"CUDA": memory.CUDA_GIB}
    spent = hours * (actors + ranks + others)
    if a.colocated:
        shared = msgspec.structs.replace(config, learner=learner)
        rank = memory.shared_parts(shared, shape, model.weights, reach.memory)
        spent = hours * (ranks + others)
    lacking = lacks(rank, reach.memory)
    if cache < a.max_context:
        lacking = f"an engine has {max(0.0, cache):.0f} tokens of cache"
        lacking += f", less than actors.max_context = {a.max_context}"
    return Split(
        actors, ranks, engines, timed, hours, cache, room / each, rank, lacking, spent,
        spent * reach.price,
    )  # fmt: skip


class Served(msgspec.Struct, frozen=True):
    """A judge's model that others serve on this machine. gib: of its weights on each GPU, 0 if its
    name does not say."""

    judge: str
    model: str
    gpus: int
    gib: float


def served(config: Config, reach: Assumed) -> list[Served]:
    """Return the judges' models that have GPUs of this machine."""
    found = dict[str, Served]()  # by address
    for name, options in config.judges.use.items():
        endpoint = options.get("endpoint")
        url, model = (endpoint.get(key, "") for key in ("url", "model")) if endpoint else ("", "")
        if ("127.0.0.1" in url or "localhost" in url) and reach.judge_gpus:
            gib = memory.billions(model) * 2e9 / 2**30
            gpus = max(1, math.ceil(gib / (JUDGE_SHARE * reach.memory)))
            gpus = gpus if reach.judge_gpus < 0 else reach.judge_gpus
            found[url] = Served(name, model, gpus, gib / gpus)
    return list(found.values())


def placed(config: Config, model: Dense, reach: Assumed, gpus: int) -> list[dict[str, float]]:
    """Return what each of ``gpus`` holds in the config's own split, in GiB, by what it is."""
    shape, names = msgspec.structs.asdict(model), list(map(str, range(gpus)))
    parts = memory.gpu_parts(config, shape, model.weights, names, reach.memory)
    last = gpus
    for one in served(config, reach):
        for own in parts[max(0, last - one.gpus) : last]:
            own |= {"judges' cache with weights": memory.ENGINE_SHARE * reach.memory}
        last -= one.gpus
    return parts


def splits(
    config: Config, model: Dense, work: Work, reach: Assumed, gpus: int, others: int = 0
) -> list[Split]:
    """Return every split of ``gpus`` between actors and learner, the fastest that fits first, none
    if there are too few for both. others: GPUs of judges and retrievers."""
    if config.actors.colocated:
        return [split(config, model, work, reach, gpus, gpus, others)] if gpus else []
    each = max(1, (config.actors.served or config.actors.sglang).gpus)
    many = range(each, gpus, each)
    every = [split(config, model, work, reach, actors, gpus - actors, others) for actors in many]
    return sorted(every, key=lambda one: (bool(one.lacks), one.speed.period))
