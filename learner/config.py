"""Settings of the learner."""

from typing import Any, Literal

import msgspec

from coppice.common.numbers import Count, Discount, Natural, NotNegative, Positive, Share


class LoraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [learner.lora], and lora of a critic or reward model: low-rank adapters on all linear
    layers.

    rank: their rank; with 0, every weight trains instead. alpha: their products are scaled by alpha
    / rank.
    """

    rank: Natural = 16
    alpha: Positive = 64.0


class OptimizerConfig(msgspec.Struct, frozen=True):
    """AdamW and its learning rate (``Stepper.rate``). frozen_updates: updates at the run's
    beginning that make no step and are not counted."""

    lr: float
    warmup_updates: int
    decay_updates: int
    betas: tuple[float, float]
    weight_decay: float
    grad_clip: float
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_ratio: float = 0.0
    frozen_updates: int = 0


class AdaptiveKl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [learner.adaptive_kl]: PPO's adaptive KL coefficient (Ziegler et al. 2019;
    learner/update/kl.py).

    target: the KL to the initial policy that is aimed at, in nats per token. horizon: the number of
    trajectories over which an error of the KL changes the coefficient by about as much.
    """

    target: Positive
    horizon: Positive = 10_000.0


class SoftOverlong(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [learner.soft_overlong]: the soft overlong punishment (DAPO, Yu et al. 2025, eq. 13),
    one per action.

    max_tokens: the length from which an action's reward is lowered by 1. cache_tokens: the
    punishment rises linearly over this many tokens below.
    """

    max_tokens: Count
    cache_tokens: Count


class CriticConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [learner.critic]: the value model of schemes with targets (gae, ppr, sao, oprl on
    ppo), which starts from the policy's weights.

    lr: the critic's learning rate. warmup_updates: it rises linearly over them.
    policy_frozen_updates: the critic's warm-up, in which the critic trains alone: the version
    advances, and the policy makes no step. steps: optimizer steps of the critic for each of the
    policy. value_clip: PPO's value-clip range around the value before the update (methods.md 2.4).
    loss_factor: a factor of the critic's loss. grad_clip: the largest norm of a gradient. lora: its
    adapters; without this setting, those of [learner.lora].
    """

    lr: Positive = 1e-5
    warmup_updates: Natural = 0
    policy_frozen_updates: Natural = 0
    steps: Count = 1
    value_clip: Positive = 0.5
    loss_factor: Positive = 0.5
    grad_clip: Positive = 1.0
    lora: LoraConfig | None = None


class PrmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [learner.prm]: the implicit reward model of oprl and prime, which starts from the
    policy's weights (methods.md 4.1, 4.5).

    beta: the factor of the log-ratio that is a token's reward. loss: "dpo" over all positive x
    negative pairs of a question, or "cross_entropy" against the outcome. outcome: the score column
    that is compared with threshold. threshold: a trajectory above it is positive. score: a
    trajectory's score is the sum or the mean of its step scores. order: "score_first" scores the
    batch with the old model and then updates the model; "update_first" does the reverse. epochs,
    minibatches: an update makes epochs x minibatches optimizer steps, each on its share of the
    questions. reference: the log-probabilities of the policy before the update, which the learner
    computes ("recomputed"), those that the engine recorded when it sampled ("behaviour"), or those
    of the policy at version 0 ("initial"). lr: the reward model's learning rate. warmup_updates: it
    rises linearly over them. grad_clip: the largest norm of a gradient. lora: its adapters; without
    this setting, those of [learner.lora].
    """

    beta: Positive = 0.05
    loss: Literal["dpo", "cross_entropy"] = "dpo"
    outcome: str = "outcome"
    threshold: float = 0.0
    score: Literal["sum", "mean"] = "sum"
    order: Literal["score_first", "update_first"] = "score_first"
    epochs: Count = 1
    minibatches: Count = 1
    reference: Literal["behaviour", "recomputed", "initial"] = "recomputed"
    lr: Positive = 1e-6
    warmup_updates: Natural = 0
    grad_clip: Positive = 10.0
    lora: LoraConfig | None = None


class WatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [learner.watch]: the limits at which the numerics watch warns. 0 switches a warning
    off.

    engine_gap: 99th percentile of |learner - engine log-probability| on turns that the version
    being trained sampled completely. engine_gap_bfloat16: replaces engine_gap if the learner
    computes in bfloat16, whose rounding alone gives .17 to .20 with SmolLM2-135M. sample_share:
    effective sample size / tokens. clip_share, mask_share: shares of the tokens. entropy: nats. kl:
    KL to the initial policy. grad_norm: a factor of the running median. turns: the factor by which
    the correct or the wrong trajectories may become longer or shorter than in the first updates
    (scheme ppr).
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

    count: the number of ranks. outside: somebody else starts them, as torchrun does on several
    machines. sharding: whether each rank holds the whole model ("replicate"), all ranks together
    hold one copy ("fsdp"), or some neighbours do ("hybrid"). shard_ranks: how many neighbours hold
    a copy of a hybrid learner (0: the ranks of one machine). scheme: a module of learner/schemes;
    correction: a function of learner/update/corrections.py; scheme_options, correction_options: their
    keyword arguments. aggregation: how token terms are weighted (learner/update/objective.py); "auto" is
    the aggregation with which the correction is defined ("trajectory" for gspo, none for the
    others), else that of the scheme's source (docs/learner.md). constant_tokens: the divisor of
    aggregation "constant". mean_over_steps: divide the weight of each token by the number of its
    question's groups, such as SLATE's steps. epochs, minibatches: an update makes epochs x
    minibatches optimizer steps, each on its share of the questions. target_kl: the update's
    remaining steps of the policy are left out when its KL to the proximal policy exceeds this (0:
    never). kl_coef, kl_estimator: weight and estimator of the KL to the initial policy in the loss
    (learner/update/kl.py). kl_reward_coef: weight of the k1 KL that is subtracted from the reward.
    adaptive_kl: adapts all weights of the KL. reward_scale, reward_clip, soft_overlong: change the
    reward before the scheme reads it (learner/update/rewards.py). advantage_scale, advantage_clip: change
    the advantages after the scheme. A clip of 0 clips nothing. overlong_filter: a trajectory with
    an action that the token limit cut carries no loss. entropy_coef: weight of the entropy bonus.
    attention: the backend that computes attention over a forest ("auto": cascade on a CPU, flex on
    CUDA). micro_tokens: the largest number of packed tokens in one forward. lr, betas,
    weight_decay: the settings of AdamW. grad_clip: the largest norm of a gradient; a larger
    gradient is scaled down to it. warmup_updates, lr_schedule, decay_updates, lr_min_ratio: the
    learning rate rises linearly, then stays constant, or falls linearly or by a cosine to
    lr_min_ratio x lr at decay_updates (0: at scheduler.updates). checkpoint_every: updates between
    checkpoints. keep: how many checkpoints and published weights are kept. collective_timeout_s:
    the run ends if a rank is silent for longer. publish: where a version's complete weights are: a
    "file" in the run folder, only the learner's "memory" (from which engines on GPUs take them), or
    "both". publish_host: the address on which the memory's rendezvous listens. publish_url: storage
    to which each version's folder is copied too, in a folder named like the run, for actors on
    nodes that do not see the run folder (any URL of fsspec). critic, prm: settings of the models
    that the scheme needs; refused if it needs none. train_vision: train the vision tower of a model
    that reads pictures too; otherwise it stays as it is. gradient_checkpointing: compute
    activations again in the backward instead of keeping them. dtype: "auto" is model.dtype, or what
    the machine is faster in. threads: compute threads of one rank.
    """

    count: Count = 4
    outside: bool = False
    sharding: Literal["replicate", "fsdp", "hybrid"] = "replicate"
    shard_ranks: Natural = 0
    scheme: str = "slate"
    scheme_options: dict[str, Any] = {}
    correction: str = "ppo_clip"
    correction_options: dict[str, Any] = {}
    aggregation: Literal["auto", "turn", "trajectory", "token", "constant"] = "auto"
    constant_tokens: Natural = 0
    mean_over_steps: bool = False
    epochs: Count = 1
    minibatches: Count = 1
    target_kl: NotNegative = 0.0
    kl_coef: NotNegative = 0.001
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_reward_coef: NotNegative = 0.0
    adaptive_kl: AdaptiveKl | None = None
    reward_scale: Positive = 1.0
    reward_clip: NotNegative = 0.0
    soft_overlong: SoftOverlong | None = None
    overlong_filter: bool = False
    advantage_scale: Positive = 1.0
    advantage_clip: NotNegative = 0.0
    entropy_coef: float = 0.0
    lr: Positive = 1e-6
    warmup_updates: Natural = 0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    decay_updates: Natural = 0
    lr_min_ratio: Share = 0.0
    betas: tuple[Discount, Discount] = (0.9, 0.999)
    weight_decay: NotNegative = 0.0
    grad_clip: Positive = 1.0
    lora: LoraConfig = LoraConfig()
    critic: CriticConfig | None = None
    prm: PrmConfig | None = None
    watch: WatchConfig = WatchConfig()
    attention: Literal["auto", "dense", "cascade", "flex"] = "auto"
    micro_tokens: Count = 1536
    train_vision: bool = False
    gradient_checkpointing: bool = False
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    checkpoint_every: Count = 1
    keep: Count = 3
    publish: Literal["file", "memory", "both"] = "file"
    publish_host: str = "127.0.0.1"
    publish_url: str = ""
    threads: Count = 1
    collective_timeout_s: Positive = 1800.0

    @property
    def here(self) -> int:
        """The ranks that the launcher starts."""
        return 0 if self.outside else self.count

    @property
    def shards(self) -> int:
        """The ranks that hold one copy of the model together. "hybrid" without ``shard_ranks``
        counts those of one machine, here all."""
        return {"replicate": 1, "fsdp": self.count, "hybrid": self.shard_ranks or self.count}[
            self.sharding
        ]

    @property
    def steps(self) -> int:
        """The optimizer steps of one update."""
        return self.epochs * self.minibatches

    @property
    def optimizer(self) -> OptimizerConfig:
        """The settings of the policy's optimizer."""
        frozen = self.critic.policy_frozen_updates if self.critic is not None else 0
        return OptimizerConfig(
            self.lr, self.warmup_updates, self.decay_updates, self.betas, self.weight_decay, self.grad_clip,
            self.lr_schedule, self.lr_min_ratio, frozen,
        )  # fmt: skip


class LearnerProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A learner process file, which is the same for all ranks. model: a Hugging Face folder (policy
    version 0).

    questions_per_update: the number of closed trees per update. shards: the number of schedulers
    that they come from, in equal parts. temperature: the sampling temperature, which the learner
    also applies to its log-probabilities. max_staleness: the scheduler's, beyond which
    ``learner/over_stale`` counts a tree.
    """

    name: str
    run: str
    seed: int
    model: str
    questions_per_update: int
    temperature: float
    learner: LearnerConfig
    shards: int = 1
    max_staleness: int = 0
