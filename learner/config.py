"""Settings of the learner."""

from typing import Any, Literal

import msgspec


class LoraConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Low-rank adapters on all linear layers. rank 0 trains every weight instead."""

    rank: int = 16
    alpha: float = 64.0


class LearnerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [learner].

    count: ranks. scheme: a module of learner/schemes; scheme_options: its keyword arguments. correction: "ppo_clip" or
    "none" (learner/corrections.py). aggregation: how token terms are weighted (learner/objective.py).
    kl_coef: weight of the k3 KL to the initial policy, in the loss. micro_tokens: most packed tokens in one forward.
    warmup_updates: the learning rate rises linearly over so many updates. checkpoint_every: updates between checkpoints.
    keep: checkpoints and published weights kept. collective_timeout_s: a rank that is silent longer ends the run.
    """

    count: int = 4
    scheme: str = "slate"
    scheme_options: dict[str, Any] = {}
    correction: Literal["ppo_clip", "none"] = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Literal["turn", "trajectory", "token"] = "turn"
    mean_over_steps: bool = False
    kl_coef: float = 0.001
    lr: float = 1e-6
    warmup_updates: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    lora: LoraConfig = LoraConfig()
    micro_tokens: int = 1536
    gradient_checkpointing: bool = False
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    checkpoint_every: int = 1
    keep: int = 3
    threads: int = 1
    collective_timeout_s: float = 1800.0


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
