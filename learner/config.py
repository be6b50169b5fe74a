"""Settings of the learner."""

from typing import Any, Literal

import msgspec

from wire.numbers import Count, Discount, Natural, NotNegative, Positive


class LoraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Low-rank adapters on all linear layers. rank 0 trains every weight instead."""

    rank: Natural = 16
    alpha: Positive = 64.0


class OptimizerConfig(msgspec.Struct, frozen=True):
    """AdamW: the learning rate rises linearly over warmup_updates, then stays, or falls by a cosine to 0 at decay_updates."""

    lr: float
    warmup_updates: int
    decay_updates: int
    betas: tuple[float, float]
    weight_decay: float
    grad_clip: float


class CriticConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [learner.critic]: the value model of schemes with targets (gae, ppr, oprl on ppo), started from the policy's weights.

    value_clip: a new value may leave the one the update began with by so much before its error counts no more (methods.md 2.4).
    """

    lr: Positive = 1e-5
    warmup_updates: Natural = 0
    value_clip: Positive = 0.5
    loss_factor: Positive = 0.5
    grad_clip: Positive = 1.0
    lora: LoraConfig | None = None


class PrmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [learner.prm]: the implicit reward model of oprl and prime, started from the policy's weights (methods.md 4.1, 4.5).

    loss: "dpo" over all positive x negative pairs of a question, or "cross_entropy" against the outcome. A trajectory is positive when
    its outcome (column) is above threshold. score: a trajectory's score sums its step scores, or takes their mean. order: score the
    batch with the old model, then update it ("score_first"), or the reverse. reference: the policy that sampled ("behaviour"), or
    the policy at version 0 ("initial").
    """

    beta: Positive = 0.05
    loss: Literal["dpo", "cross_entropy"] = "dpo"
    outcome: str = "outcome"
    threshold: float = 0.0
    score: Literal["sum", "mean"] = "sum"
    order: Literal["score_first", "update_first"] = "score_first"
    reference: Literal["behaviour", "initial"] = "behaviour"
    lr: Positive = 1e-6
    warmup_updates: Natural = 0
    grad_clip: Positive = 10.0
    lora: LoraConfig | None = None


class WatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [learner.watch]: where the numerics watch warns. 0 switches a warning off.

    engine_gap: 99th percentile of |learner - engine log-probability| on turns that the version being trained sampled whole;
    engine_gap_bfloat16 holds instead where the learner computes in bfloat16, whose rounding alone gives .17 to .20 with
    SmolLM2-135M. sample_share: the effective sample size over the number of tokens. clip_share, mask_share: of the tokens. entropy: nats. kl: to the initial policy.
    grad_norm: times the running median. turns: of correct or wrong trajectories,
    times as many or as few as in the first updates (scheme ppr).
    """

    engine_gap: NotNegative = 0.05
    engine_gap_bfloat16: NotNegative = 0.4
    sample_share: NotNegative = 0.5
    clip_share: NotNegative = 0.3
    mask_share: NotNegative = 0.3
    entropy: NotNegative = 0.01
    kl: NotNegative = 1.0
    grad_norm: NotNegative = 10.0
    turns: NotNegative = 1.3


class LearnerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [learner].

    count: ranks. sharding: whether each rank holds the whole model ("replicate") or a part of it ("fsdp"). scheme: a module of
    learner/schemes; correction: a function of learner/corrections.py; *_options: their keyword arguments.
    aggregation: how token terms are weighted (learner/objective.py); constant_tokens: the divisor of aggregation "constant".
    epochs, minibatches: optimizer steps an update are epochs x minibatches, each on its share of the questions.
    kl_coef: weight of the k3 KL to the initial policy, in the loss. entropy_coef: weight of the entropy bonus.
    attention: how a forest is attended ("auto": cascade on a CPU, flex on CUDA). micro_tokens: most packed tokens in one forward.
    warmup_updates, decay_updates: the learning rate rises linearly, then stays, or falls by a cosine to 0 at decay_updates (if set).
    checkpoint_every: updates between checkpoints. keep: checkpoints and published weights kept. collective_timeout_s: a rank that
    is silent longer ends the run. publish: where a version's whole weights are, a "file" in the run folder, only in the learner's
    "memory" (engines on GPUs take them there), or "both". publish_host: where the memory's rendezvous listens. critic, prm: settings of the models the scheme needs; refused when it needs none.
    """

    count: Count = 4
    sharding: Literal["replicate", "fsdp"] = "replicate"
    scheme: str = "slate"
    scheme_options: dict[str, Any] = {}
    correction: str = "ppo_clip"
    correction_options: dict[str, Any] = {}
    aggregation: Literal["turn", "trajectory", "token", "constant"] = "turn"
    constant_tokens: Natural = 0
    mean_over_steps: bool = False
    epochs: Count = 1
    minibatches: Count = 1
    kl_coef: NotNegative = 0.001
    entropy_coef: float = 0.0
    lr: Positive = 1e-6
    warmup_updates: Natural = 0
    decay_updates: Natural = 0
    betas: tuple[Discount, Discount] = (0.9, 0.999)
    weight_decay: NotNegative = 0.0
    grad_clip: Positive = 1.0
    lora: LoraConfig = LoraConfig()
    critic: CriticConfig | None = None
    prm: PrmConfig | None = None
    watch: WatchConfig = WatchConfig()
    attention: Literal["auto", "dense", "cascade", "flex"] = "auto"
    micro_tokens: Count = 1536
    gradient_checkpointing: bool = False
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    checkpoint_every: Count = 1
    keep: Count = 3
    publish: Literal["file", "memory", "both"] = "file"
    publish_host: str = "127.0.0.1"
    threads: Count = 1
    collective_timeout_s: Positive = 1800.0

    @property
    def optimizer(self) -> OptimizerConfig:
        """The policy's."""
        return OptimizerConfig(
            self.lr, self.warmup_updates, self.decay_updates, self.betas, self.weight_decay, self.grad_clip
        )


class LearnerProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A learner process file, the same for all ranks. model: a Hugging Face folder (policy version 0).

    questions_per_update: closed trees that make one update. temperature: the sampling temperature, at which the learner's
    log-probabilities are taken too.
    """

    name: str
    run: str
    seed: int
    model: str
    questions_per_update: int
    temperature: float
    learner: LearnerConfig
