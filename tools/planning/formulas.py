"""The arithmetic of a plan: work into FLOPs, seconds and bytes. Every formula is here, with its units.

Sources: a multiplication with an addition is 2 FLOPs, and a backward costs two forwards (Kaplan et al. 2020, arXiv 2001.08361, section 2.1); decoding is
bound by what it reads, weights once for a batch and each sample's keys and values (Pope et al. 2022, arXiv 2211.05102). How much of a device's
peak is reached is an input (``Efficiency``): nothing of this project was measured on a GPU.
"""

import math
from typing import Any

import msgspec

from learner import corrections, schemes
from learner.config import CriticConfig, LearnerConfig, LoraConfig, PrmConfig
from tools.planning.growth import Work


class Dense(msgspec.Struct, frozen=True):
    """The sizes of a dense model of the Llama or Qwen family. tied: its head is its embedding."""

    layers: int
    width: int
    inner: int
    heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    tied: bool = True

    @classmethod
    def of(cls, settings: dict[str, Any], name: str) -> "Dense":
        """Return the sizes that a config.json states. Raises ValueError."""
        text = settings.get("text_config", settings)
        if expert := next((key for key in text if "experts" in key), None):
            raise ValueError(
                f"model {name} has {expert} = {text[expert]!r}: expected a dense model, the formulas know no experts"
            )
        try:
            heads = text["num_attention_heads"]
            return cls(
                text["num_hidden_layers"], text["hidden_size"], text["intermediate_size"], heads, text.get("num_key_value_heads") or heads,
                text.get("head_dim") or text["hidden_size"] // heads, text["vocab_size"], bool(text.get("tie_word_embeddings", True)),
            )  # fmt: skip
        except KeyError as key:
            raise ValueError(
                f"config.json of {name} has no {key}: expected a dense model of the Llama or Qwen family"
            ) from None

    @property
    def settings(self) -> dict[str, int]:
        """The sizes by their names in config.json, as far as the estimate of memory reads them."""
        return {"hidden_size": self.width, "intermediate_size": self.inner, "num_hidden_layers": self.layers}

    @property
    def per_token(self) -> int:
        """The weights that one token passes in all layers: queries and output, keys and values, and the three of the MLP."""
        attention = 2 * self.width * self.head_width * (self.heads + self.key_heads)
        return self.layers * (attention + 3 * self.width * self.inner)

    @property
    def per_pair(self) -> int:
        """The multiplications of one (query, key) pair in all layers: the score and the weighted value."""
        return 2 * self.layers * self.heads * self.head_width

    @property
    def head(self) -> int:
        """The weights of the head."""
        return self.vocabulary * self.width

    @property
    def weights(self) -> int:
        """The number of weights, without norms and biases (less than one in a thousand)."""
        return self.per_token + self.head * (1 if self.tied else 2)

    def cached(self, size: int) -> int:
        """Return the bytes of one token's keys and values. size: bytes of a number."""
        return 2 * self.layers * self.key_heads * self.head_width * size

    def multiplications(self, tokens: float, pairs: float, targets: float) -> float:
        """Return those of a forward of ``tokens``, ``pairs`` of (query, key), and ``targets`` rows of the head."""
        return tokens * self.per_token + pairs * self.per_pair + targets * self.head


SHAPES = {
    "Qwen2.5-1.5B": Dense(28, 1536, 8960, 12, 2, 128, 151_936),
    "Qwen2.5-3B": Dense(36, 2048, 11_008, 16, 2, 128, 151_936),
    "Qwen2.5-7B": Dense(28, 3584, 18_944, 28, 4, 128, 152_064, False),
    "Qwen3-4B": Dense(36, 2560, 9728, 32, 8, 128, 151_936),
}
"""Models of the shipped configs by the beginning of their names, for a machine that does not have them. From their config.json."""


class Device(msgspec.Struct, frozen=True):
    """A GPU. flops: dense bfloat16 operations a second. bandwidth: bytes a second of its memory. memory: GiB. price: of an hour, in any currency."""

    flops: float
    bandwidth: float = math.inf
    memory: float = math.inf
    price: float = 0.0


GPUS = {
    "a100": Device(312e12, 2.039e12, 80),
    "h100": Device(989e12, 3.35e12, 80),
    "h200": Device(989e12, 4.8e12, 141),
    "b200": Device(2250e12, 8.0e12, 180),
    "l40s": Device(362e12, 0.864e12, 48),
}
"""Peaks from NVIDIA's data sheets (SXM where there is one, without sparsity). Prices differ by seller, so there are none."""


class Efficiency(msgspec.Struct, frozen=True):
    """What share of a peak is reached, and what is waited for. All defaults are assumptions that no run of this project has tested.

    learner: of the FLOPs in forwards and backwards (PaLM reached .46, arXiv 2204.02311, appendix B; forests are irregular, so less). prefill: of the FLOPs
    where prompts are read. decode: of the memory bandwidth where tokens are sampled. wait: seconds that a step of an episode waits for judges,
    retrievers and the scheduler.
    """

    learner: float = 0.35
    prefill: float = 0.4
    decode: float = 0.5
    wait: float = 1.0


class Pass(msgspec.Struct, frozen=True):
    """What an update does with one model: forwards alone, and forwards with backwards, over all its tokens. lora: adapters train. head: it
    has the policy's head (a critic has a row)."""

    alone: int
    trained: int
    lora: bool
    head: bool = True


def passes(w: LearnerConfig) -> list[Pass]:
    """Return what an update does with the policy, and with a critic and a reward model if the scheme needs them (``learner.trainer``)."""
    needs, correct = (
        schemes.load(w.scheme, w.scheme_options).needs.models,
        corrections.load(w.correction, w.correction_options),
    )
    critic, prm = w.critic or CriticConfig(), w.prm or PrmConfig()
    recomputed, initial = (
        prm.reference in names and "prm" in needs for names in (("auto", "recomputed"), ("initial",))
    )
    proximal = "log_ratio" in needs or correct.needs_proximal(w.steps) or w.target_kl > 0 or recomputed
    reference = "kl" in needs or w.kl_coef > 0 or w.kl_reward_coef > 0 or initial
    done = [Pass(proximal + reference, w.epochs, w.lora.rank > 0)]
    done += [Pass(1, w.epochs * critic.steps, _adapts(critic.lora), False)] if "value" in needs else []
    return done + ([Pass(1, prm.epochs, _adapts(prm.lora))] if "prm" in needs else [])


def _adapts(lora: LoraConfig | None) -> bool:
    return lora is not None and lora.rank > 0


def learner_flops(w: LearnerConfig, model: Dense, work: Work, shared: bool = True) -> float:
    """Return the FLOPs of an update, with prefixes shared (packed trees) or every turn complete.

    2 FLOPs a multiplication. A backward is two forwards, so training takes 6 FLOPs a weight and token; with adapters the weights need no gradient of
    their own, so it takes 4. Gradient checkpointing makes one forward more. A trunk that a cut repeats has its pairs repeated.
    """
    tokens, pairs, targets = work.path, work.path_pairs, work.path_targets
    if shared:
        tokens, pairs, targets = work.forwarded, work.pairs * work.forwarded / max(1, work.packed), work.targets
    again, total = 1 if w.gradient_checkpointing else 0, 0.0
    for one in passes(w):
        weights = 2 * model.multiplications(tokens, 0, targets if one.head else 0)
        attention = 2 * model.multiplications(0, pairs, 0)
        total += (weights + attention) * one.alone
        total += one.trained * (weights * ((2 if one.lora else 3) + again) + attention * (3 + again))
    return total


class Speed(msgspec.Struct, frozen=True):
    """What a plan takes, in seconds for an update. generate: of the actors' time, all of them busy; latency: from the first admission of an update's trees to
    their ends; learn: of the learner's; period: from one update to the next. bound: what the period waits for. staleness: the mean over trained
    tokens, in updates. batch: samples that an actor decodes together."""

    generate: float
    latency: float
    learn: float
    period: float
    bound: str
    staleness: float
    batch: float


def actor_flops(model: Dense, work: Work) -> tuple[float, float]:
    """Return the FLOPs of an update's prefill, and of its decoding. A sampled token passes the head, a prompt once."""
    before = work.context / max(1, work.sampled)
    prefill = 2 * model.multiplications(work.prefilled, work.prefilled * before / 2, work.calls)
    return prefill, 2 * model.multiplications(work.sampled, work.context, work.sampled)


class Fleet(msgspec.Struct, frozen=True):
    """Who works. actors: devices that generate. ranks: devices that train. trees: of an update. stale: max_staleness. most: samples that the
    memory of all actors together has room for, or that they decode at once if that is less. size: bytes of a number."""

    actors: int
    ranks: int
    trees: int
    stale: int
    most: float
    size: int = 2


def speed(w: LearnerConfig, model: Dense, work: Work, device: Device, reach: Efficiency, fleet: Fleet) -> Speed:
    """Return the times of an update, by a roofline and Little's law.

    Decoding: a batch reads the weights once a token, and each sample its context's keys and values; or its FLOPs take longer. The period is the
    longest of: the actors' time, the learner's, and (latency + learn) / (stale + 1), since no more than (stale + 1) updates' trees are in
    flight. So without staleness generation and training take turns. The latency is that of one update's trees alone.
    """
    prefill, decode = actor_flops(model, work)
    alone = work.sampled / max(1.0, work.longest)  # samples in flight of one update's trees
    prefilling = prefill / (device.flops * reach.prefill)

    def decoding(batch: float) -> float:
        read = work.sampled / batch * model.weights * fleet.size + work.context * model.cached(fleet.size)
        return max(read / (device.bandwidth * reach.decode), decode / (device.flops * reach.prefill))

    batch, small = (max(1.0, min(fleet.most, many * alone) / fleet.actors) for many in (fleet.stale + 1, 1))
    generate = (decoding(batch) + prefilling) / fleet.actors
    longest = work.longest * decoding(small) * small / max(1, work.sampled) + prefilling / fleet.actors
    latency = max(generate, longest) + work.steps * reach.wait
    learn = learner_flops(w, model, work) / (fleet.ranks * device.flops * reach.learner)
    bounds = {"actors": generate, "learner": learn, "latency": (latency + learn) / (fleet.stale + 1)}
    bound = max(bounds, key=lambda name: bounds[name])
    age = staleness(bound, fleet.stale, latency, learn, bounds[bound])
    return Speed(generate, latency, learn, bounds[bound], bound, age, batch)


def staleness(bound: str, stale: int, latency: float, learn: float, period: float) -> float:
    """Return the expected mean age of a trained token's weights, in updates.

    Where actors are the bottleneck, a batch is sampled while the one before is trained, and only tokens of that time are one version old. Otherwise its
    trees begin ``stale`` versions before, and what is sampled later in the latency meets newer weights.
    """
    if bound == "actors":
        return min(float(stale), learn / period)
    whole, rest = divmod(latency, period)
    newer = (whole * (whole - 1) / 2 * period + whole * rest) / latency if latency else 0.0
    return max(0.0, stale - newer)
