"""What a learner's settings amount to: which models train and how, which passes an update makes,
and how its tokens are weighed. The trainer builds and runs what ``plan_of`` says; the estimate of
the memory, the plan of a run and the rules of the launcher read the same, without torch.
"""

import msgspec

from coppice.learner import schemes
from coppice.learner.config import CriticConfig, LearnerConfig, LoraConfig, PrmConfig
from coppice.learner.schemes import Scheme
from coppice.learner.update import corrections
from coppice.learner.update.corrections import Corrected
from coppice.learner.update.objective import Aggregation


class ModelPlan(msgspec.Struct, frozen=True):
    """A model that trains. lora: its adapters; with rank 0 every weight trains. forwards,
    backwards: how often an update forwards all its tokens alone, and with a backward. vocabulary:
    whether it gives log-probabilities; a critic gives one value instead. copy: whether a frozen
    copy of the initial weights is held; with adapters the model without them is the initial one."""

    lora: LoraConfig
    forwards: float
    backwards: float
    vocabulary: bool = True
    copy: bool = False


class LearnerPlan(msgspec.Struct, frozen=True):
    """What ``plan_of`` reads from a config. models: those that train, by their names in a
    checkpoint. critic, prm: their settings, None for one that is not built. kl: something reads the
    KL to the initial policy. reference, proximal: the log-probabilities under the initial policy,
    and under that when the update begins, are computed."""

    scheme: Scheme
    correct: Corrected
    models: dict[str, ModelPlan]
    critic: CriticConfig | None
    prm: PrmConfig | None
    kl: bool
    reference: bool
    proximal: bool
    aggregation: Aggregation


def plan_of(config: LearnerConfig) -> LearnerPlan:
    """Return what the settings amount to. Raises ValueError for a scheme, a correction or an option
    that is not known."""
    scheme = schemes.load(config.scheme, config.scheme_options)
    correct = corrections.load(config.correction, config.correction_options)
    needs = scheme.needs.models
    critic = (config.critic or CriticConfig()) if "value" in needs else None
    prm = (config.prm or PrmConfig()) if "prm" in needs else None
    kl = "kl" in needs or config.kl_coef > 0 or config.kl_reward_coef > 0
    reference = kl or (prm is not None and prm.reference == "initial")
    proximal = "log_ratio" in needs or correct.needs_proximal(config.steps) or config.target_kl > 0
    proximal |= prm is not None and prm.reference == "recomputed"
    again = config.steps - 1 if correct.follows else 0
    lora = config.lora
    copy, forwards = reference and not lora.rank, proximal + reference + again
    models = {"policy": ModelPlan(lora, forwards, config.epochs, copy=copy)}
    if critic is not None:
        backwards = config.epochs * critic.steps
        models["critic"] = ModelPlan(critic.lora or lora, 1, backwards, vocabulary=False)
    if prm is not None:
        # it scores all tokens, once more after learning if the scheme gets those scores, and each
        # part of an update but the first before its step
        forwards = 1 + (prm.order == "update_first") + prm.epochs - 1 / prm.minibatches
        models["prm"] = ModelPlan(prm.lora or lora, forwards, prm.epochs)
    # A correction's surrogate is defined by its aggregation, a scheme's advantages are without it.
    aggregation = correct.declared.aggregation or scheme.needs.aggregation
    if config.aggregation != "auto":
        aggregation = config.aggregation
    return LearnerPlan(scheme, correct, models, critic, prm, kl, reference, proximal, aggregation)
