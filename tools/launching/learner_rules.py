"""The rules of the learner: its objective, its ranks, and what it does over the updates of the run."""

from collections.abc import Iterator

from coppice.learner.config import LearnerConfig
from coppice.learner.update.plan import plan_of
from coppice.tools.launching.settings import Config


def faults(config: Config) -> Iterator[str]:
    """Yield the settings of the learner that contradict each other or the run's length, or would do
    nothing."""
    yield from _objective(config.learner)
    yield from _ranks(config.learner)
    yield from _schedule(config)


def _objective(w: LearnerConfig) -> Iterator[str]:
    """The settings of the aggregation, the correction, the KL, the learning rate and of lengths
    have an effect, and none counts twice."""
    plan, kl, long = plan_of(w), w.kl_coef > 0, w.soft_overlong
    idle = plan.correct.idle(w.steps)
    if (w.aggregation == "constant") != (w.constant_tokens > 0):
        yield (
            f"learner.constant_tokens = {w.constant_tokens} with learner.aggregation = {w.aggregation!r}: 'constant' needs a number of"
            " tokens, the others take none"
        )
    if idle:
        yield (
            f"learner.correction_options {idle} have no effect with one optimizer step per update, where current and proximal policy are"
            " equal: raise learner.epochs or learner.minibatches, or remove them"
        )
    if w.target_kl and w.epochs * w.minibatches == 1:
        yield f"learner.target_kl = {w.target_kl} has no effect with one optimizer step per update: remove it"
    if w.adaptive_kl and not plan.kl:
        yield "learner.adaptive_kl has no effect without a KL: set learner.kl_coef or kl_reward_coef"
    if w.kl_estimator != "k3" and not kl:
        yield f"learner.kl_estimator = {w.kl_estimator!r} has no effect with learner.kl_coef = 0: remove it"
    if kl and w.kl_reward_coef:
        yield f"learner.kl_coef = {w.kl_coef} and learner.kl_reward_coef = {w.kl_reward_coef}: expected 0 for one of them"
    if w.lr_schedule == "constant" and (w.decay_updates or w.lr_min_ratio):
        yield "learner.decay_updates and lr_min_ratio have no effect with learner.lr_schedule = 'constant': remove them"
    if long and long.cache_tokens > long.max_tokens:
        yield f"learner.soft_overlong = {long}: expected cache_tokens of at most max_tokens"


def _ranks(w: LearnerConfig) -> Iterator[str]:
    """The way in which the ranks share the weights fits their number."""
    if w.sharding != "replicate" and w.count == 1:
        yield f"learner.sharding = {w.sharding!r} has no effect with learner.count = 1: remove it"
    if w.shard_ranks and w.sharding != "hybrid":
        yield f"learner.shard_ranks = {w.shard_ranks} has no effect with learner.sharding = {w.sharding!r}: remove it, or set 'hybrid'"
    if (
        w.sharding == "hybrid"
        and (w.shards in (1, w.count) or w.count % w.shards)
        and (w.shard_ranks or not w.outside)
    ):
        yield (
            f"learner.sharding = 'hybrid' with learner.count = {w.count} and learner.shard_ranks = {w.shard_ranks}: expected a divisor of the"
            " ranks between 1 and all of them; 'fsdp' shards over all ranks, 'replicate' over none"
        )


def _schedule(config: Config) -> Iterator[str]:
    """What happens in the course of the updates can happen, and the warm start knows its data."""
    w, s, steps = config.learner, config.scheduler, config.warm_start.steps
    if 0 < w.decay_updates < s.updates:
        yield (
            f"learner.decay_updates = {w.decay_updates} leaves the smallest learning rate for the rest of scheduler.updates = {s.updates}:"
            " expected 0 (just as many) or more"
        )
    if w.critic is not None and w.critic.policy_frozen_updates >= s.updates:
        yield (
            f"learner.critic.policy_frozen_updates = {w.critic.policy_frozen_updates}: expected less than scheduler.updates = {s.updates}, or"
            " the policy never trains"
        )
    if w.soft_overlong is not None and w.soft_overlong.max_tokens > s.max_action_tokens:
        yield (
            f"learner.soft_overlong.max_tokens = {w.soft_overlong.max_tokens} is never reached: expected at most scheduler.max_action_tokens ="
            f" {s.max_action_tokens}"
        )
    if config.data.train != "default" and steps and config.data.corpus != "default":
        yield (
            f"warm_start.steps = {steps}: the built-in warm start knows the default data only; set warm_start.steps = 0 (and use coppice sft if"
            " your model needs one)"
        )
