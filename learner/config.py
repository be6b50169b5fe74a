"""Settings of the learner."""

from typing import Any, Literal

import msgspec

from coppice.common.numbers import Count, Discount, Natural, NotNegative, Positive, Share

BUCKET_BYTES = 2**29
"""The most bytes of whole weights that are gathered, sent or written at once."""


class LoraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [learner.lora], and lora of a critic or reward model: low-rank adapters on all linear
    layers."""

    rank: Natural = 16
    """The adapters' rank; with 0, every weight trains instead."""
    alpha: Positive = 64.0
    """Their products are scaled by alpha / rank."""


class OptimizerConfig(msgspec.Struct, frozen=True):
    """AdamW and its learning rate (``Stepper.rate``). frozen_updates: updates at the run's
    beginning that make no step and are not counted. offload: ``learner.offload_optimizer``."""

    lr: float
    warmup_updates: int
    decay_updates: int
    betas: tuple[float, float]
    weight_decay: float
    grad_clip: float
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_ratio: float = 0.0
    frozen_updates: int = 0
    offload: bool = False


class AdaptiveKl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [learner.adaptive_kl]: PPO's adaptive KL coefficient (Ziegler et al. 2019)."""

    target: Positive
    """The KL to the initial policy that is aimed at, in nats per token."""
    horizon: Positive = 10_000.0
    """The trajectories over which an error of the KL changes the coefficient by about as much."""


class SoftOverlong(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [learner.soft_overlong]: the soft overlong punishment (DAPO, Yu et al. 2025, eq. 13),
    one per action."""

    max_tokens: Count
    """The length from which an action's reward is lowered by 1."""
    cache_tokens: Count
    """The punishment rises linearly over this many tokens below max_tokens."""


class SecondModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model that trains beside the policy and starts from its weights."""

    lr: Positive
    grad_clip: Positive
    warmup_updates: Natural = 0
    """Updates over which the learning rate rises linearly."""
    lora: LoraConfig | None = None
    """The model's adapters; without this setting, those of [learner.lora]."""

    def optimizer(self, learner: "LearnerConfig") -> OptimizerConfig:
        return OptimizerConfig(
            self.lr, self.warmup_updates, 0, learner.betas, 0.0, self.grad_clip,
            offload=learner.offload_optimizer,
        )  # fmt: skip


class CriticConfig(SecondModel, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section [learner.critic]: the value model of schemes with targets (gae, ppr, sao, oprl on
    ppo)."""

    lr: Positive = 1e-5
    """The critic's learning rate."""
    grad_clip: Positive = 1.0
    """The largest norm of a gradient."""
    policy_frozen_updates: Natural = 0
    """First updates in which the critic trains alone: the version advances without policy steps."""
    steps: Count = 1
    """Optimizer steps of the critic for each of the policy."""
    value_clip: Positive = 0.5
    """PPO's value-clip range around the value before the update (methods.md 2.4)."""
    loss_factor: Positive = 0.5
    """A factor of the critic's loss."""


class PrmConfig(SecondModel, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Section [learner.prm]: the implicit reward model of oprl and prime (methods.md 4.1, 4.5)."""

    lr: Positive = 1e-6
    """The reward model's learning rate."""
    grad_clip: Positive = 10.0
    """The largest norm of a gradient."""
    beta: Positive = 0.05
    """The factor of the log-ratio that is a token's reward."""
    loss: Literal["dpo", "cross_entropy"] = "dpo"
    """Over all positive x negative pairs of a question, or against each outcome."""
    outcome: str = "outcome"
    """The score column that is compared with threshold."""
    threshold: float = 0.0
    """A trajectory above it is positive."""
    score: Literal["sum", "mean"] = "sum"
    """How the scores of a trajectory's steps make its score."""
    order: Literal["score_first", "update_first"] = "score_first"
    """Whether the batch is scored before the update of the model, or after it."""
    epochs: Count = 1
    """An update makes epochs x minibatches optimizer steps."""
    minibatches: Count = 1
    """Into how many parts the questions are split; each step reads one."""
    reference: Literal["behaviour", "recomputed", "initial"] = "recomputed"
    """Whose log-probabilities are subtracted: the engine's, or the policy's now or at version 0."""
    only_better: bool = False
    """Of loss "dpo": scores are 0 in updates whose pairs the policy's own log-probabilities order
    better. Not in the papers."""

    def __post_init__(self) -> None:
        if self.only_better and self.loss != "dpo":
            raise ValueError(f"only_better compares the pairs of loss 'dpo', not of {self.loss!r}")


class WatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [learner.watch]: the limits at which the numerics watch warns. 0 switches a warning
    off."""

    engine_gap: NotNegative = 0.05
    """99th percentile of |learner - engine log-probability| on turns of the version in training."""
    engine_gap_bfloat16: NotNegative = 0.4
    """The same in bfloat16, whose rounding alone gives .17 to .20 with SmolLM2-135M."""
    sample_share: NotNegative = 0.5
    """Least effective sample size / tokens."""
    clip_share: NotNegative = 0.3
    """Largest share of clipped tokens."""
    mask_share: NotNegative = 0.3
    """Largest share of masked tokens."""
    entropy: NotNegative = 0.01
    """Least entropy of the policy, in nats."""
    kl: NotNegative = 1.0
    """Largest KL to the initial policy, in nats per token."""
    grad_norm: NotNegative = 10.0
    """Largest gradient norm, as a factor of its running median."""
    turns: NotNegative = 1.3
    """Factor by which correct or wrong trajectories may become longer or shorter (scheme ppr)."""


class LearnerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [learner]: what is maximised, how it is optimised, and on how many ranks."""

    count: Count = 4
    """The number of ranks."""
    outside: bool = False
    """True if somebody else starts the ranks, as torchrun does on several machines."""
    sharding: Literal["replicate", "fsdp", "hybrid"] = "replicate"
    """Who holds a copy of the model: each rank, all ranks together, or some neighbours."""
    shard_ranks: Natural = 0
    """How many neighbours hold a copy of a hybrid learner (0: the ranks of one machine)."""
    scheme: str = "slate"
    """How scores become advantages: a module of learner/schemes, or module:function."""
    scheme_options: dict[str, Any] = {}
    """The scheme's keyword arguments."""
    correction: str = "ppo_clip"
    """How stale data counts: a function of learner/update/corrections.py, or module:function."""
    correction_options: dict[str, Any] = {}
    """The correction's keyword arguments."""
    aggregation: Literal["auto", "turn", "trajectory", "token", "constant"] = "auto"
    """How tokens are weighted (learner/update/objective.py). "auto": as the correction is defined
    ("trajectory" for gspo), else as the scheme's source weights them (docs/learner.md)."""
    constant_tokens: Natural = 0
    """The divisor of aggregation "constant"."""
    epochs: Count = 1
    """An update makes epochs x minibatches optimizer steps."""
    minibatches: Count = 1
    """Into how many parts the questions are split; each step reads one."""
    target_kl: NotNegative = 0.0
    """The KL to the proximal policy that ends an update's steps of the policy (0: none does)."""
    kl_coef: NotNegative = 0.001
    """Weight of the KL to the initial policy in the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of this KL (``kl`` of learner/update/corrections.py)."""
    kl_reward_coef: NotNegative = 0.0
    """Weight of the k1 KL to the initial policy that is subtracted from the reward."""
    adaptive_kl: AdaptiveKl | None = None
    """Adapts all weights of the KL."""
    reward_scale: Positive = 1.0
    """Factor of the reward that the scheme reads (``shaped`` of learner/update/objective.py)."""
    reward_clip: NotNegative = 0.0
    """The scaled reward is clipped to +-reward_clip (0: never)."""
    soft_overlong: SoftOverlong | None = None
    """Subtracts a punishment of long actions from the reward."""
    overlong_filter: bool = False
    """A trajectory with an action that the token limit cut carries no loss."""
    advantage_scale: Positive = 1.0
    """Factor of the advantages, after the scheme."""
    advantage_clip: NotNegative = 0.0
    """The scaled advantages are clipped to +-advantage_clip (0: never)."""
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus."""
    lr: Positive = 1e-6
    """The policy's learning rate, of AdamW."""
    warmup_updates: Natural = 0
    """Updates over which the learning rate rises linearly."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warm-up."""
    decay_updates: Natural = 0
    """The update at which a falling rate reaches lr_min_ratio x lr (0: scheduler.updates)."""
    lr_min_ratio: Share = 0.0
    """The smallest learning rate of a falling schedule, as a share of lr."""
    betas: tuple[Discount, Discount] = (0.9, 0.999)
    """AdamW's decay rates of its moments."""
    weight_decay: NotNegative = 0.0
    """AdamW's weight decay."""
    grad_clip: Positive = 1.0
    """The largest norm of a gradient; a larger gradient is scaled down to it."""
    lora: LoraConfig = LoraConfig()
    """The policy's adapters."""
    critic: CriticConfig | None = None
    """The critic's settings; refused if the scheme needs none."""
    prm: PrmConfig | None = None
    """The implicit reward model's settings; refused if the scheme needs none."""
    watch: WatchConfig = WatchConfig()
    """When the numerics watch warns."""
    attention: Literal["auto", "dense", "cascade", "flex"] = "auto"
    """What computes attention over a forest ("auto": cascade on a CPU, flex on CUDA)."""
    micro_tokens: Count = 1536
    """The largest number of packed tokens in one forward."""
    train_vision: bool = False
    """Train the vision tower too, of a model that reads pictures."""
    routing_replay: bool = False
    """Route each token to the experts that the engine chose (mixtures of experts)."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward instead of keeping them."""
    offload_optimizer: bool = False
    """Keep AdamW's moments in main memory between steps."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The number type of products; "auto": model.dtype, or what the machine is faster in."""
    checkpoint_every: Count = 1
    """Updates between checkpoints."""
    keep: Count = 3
    """How many checkpoints are kept, and published weights (max_staleness + 2 at least)."""
    publish: Literal["file", "memory", "both"] = "file"
    """Where a version's weights are: in the run folder, or in the learner's memory, from which
    engines on GPUs take them. Adapters are always files."""
    whole_every: Count = 10
    """Of how many published files of a bfloat16 policy one holds all weights; the others hold what
    changed since the one before."""
    publish_host: str = "127.0.0.1"
    """The address on which the memory's rendezvous listens."""
    threads: Count = 1
    """Compute threads of one rank."""
    collective_timeout_s: Positive = 1800.0
    """The run ends if a rank is silent for longer, in seconds."""

    @property
    def here(self) -> int:
        """The ranks that the launcher starts."""
        return 0 if self.outside else self.count

    @property
    def shards(self) -> int:
        """The ranks that hold one copy of the model together. "hybrid" without ``shard_ranks``
        counts those of one machine, here all."""
        hybrid = self.shard_ranks or self.count
        return {"replicate": 1, "fsdp": self.count, "hybrid": hybrid}[self.sharding]

    @property
    def steps(self) -> int:
        """The optimizer steps of one update."""
        return self.epochs * self.minibatches

    @property
    def optimizer(self) -> OptimizerConfig:
        """The settings of the policy's optimizer."""
        frozen = self.critic.policy_frozen_updates if self.critic is not None else 0
        return OptimizerConfig(
            self.lr, self.warmup_updates, self.decay_updates, self.betas, self.weight_decay,
            self.grad_clip, self.lr_schedule, self.lr_min_ratio, frozen, self.offload_optimizer,
        )  # fmt: skip


class LearnerProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A learner process file, which is the same for all ranks. model: a Hugging Face folder (policy
    version 0).

    questions_per_update: the number of closed trees per update. shards: the number of schedulers
    that they come from, in equal parts. temperature: the sampling temperature, which the learner
    also applies to its log-probabilities. max_staleness: the scheduler's, beyond which
    ``learner/over_stale`` counts a tree. turns: the folder of ``common.turns``, "" if the GPUs are
    not shared with engines. computing: how many ranks share out the forwards, 0 for all.
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
    turns: str = ""
    computing: int = 0
