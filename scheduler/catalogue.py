"""Every metric of a run with its unit and meaning. ``python -m scheduler.catalogue`` writes the table of docs/metrics.md.

One table and not one per room: the names meet in one record, the scheduler may not import the learner, and tests hold the table against the
records of whole runs. A star stands for a name that a plug-in, a judge or a group number fills in.
"""

import fnmatch
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
START, END = "<!-- the table is generated: python -m scheduler.catalogue -->", "<!-- end of the table -->"
PREFIX = "coppice_"
UPDATE = "learner/groups"
"""The metric that every update's record has, and no evaluation's."""

METRICS: dict[str, tuple[str, str]] = {
    "version": ("updates", "version of the weights that the record is about: an update's record has the version it made"),
    "busy/engine": ("share", "time in which an actor decoded, mean over actors"),
    "busy/engines": ("actors", "those of busy/engine"),
    "busy/learner": ("share", "time in which a learner rank trained, mean over ranks"),
    "cache/hit_rate": ("share", "prompt tokens that the actors' prefix caches served"),
    "cache/ideal_tokens": ("tokens", "prompt tokens that one unlimited cache would compute"),
    "cache/predicted_hit_rate": ("share", "prompt tokens that the scheduler expected in the caches"),
    "cache/prediction_error": ("share", "expected minus served"),
    "cache/prefilled_over_ideal": ("ratio", "prompt tokens computed over those that one unlimited cache would compute"),
    "cache/prompt_tokens": ("tokens", "prompt tokens of the calls of cache/hit_rate, since the record before"),
    "cache/tokens_saved": ("tokens", "prompt tokens that the caches served since the record before"),
    "count/actions": ("actions", "sampled actions"),
    "count/calls": ("calls", "calls to services"),
    "count/continuation_steps": ("steps", "environment steps of Monte Carlo continuations"),
    "count/compared_step_*": ("groups", "emitted groups of two scored trajectories or more, by the step of their first turn (8: or later)"),
    "count/crashed_episodes": ("episodes", "training episodes that an agent's death or a limit ended"),
    "count/dead_workers": ("workers", "workers given up because they fell silent"),
    "count/environment_steps": ("steps", "environment steps of training trajectories"),
    "count/equal_step_*": ("groups", "those of count/compared_step_* whose rewards are all equal"),
    "count/failed": ("calls", "calls that failed for good"),
    "count/failed_loads": ("loads", "deliveries of weights to an actor that failed"),
    "count/generated_tokens": ("tokens", "sampled tokens of training trajectories"),
    "count/invalid_actions": ("actions", "actions that did not parse"),
    "count/invalid_judgements": ("scores", "scores of the judge that were invalid"),
    "count/invalid_outcomes": ("outcomes", "outcomes that were invalid"),
    "count/judged_scores": ("scores", "scores that the judge gave"),
    "count/late_answers": ("answers", "answers that came after their call was given up"),
    "count/lost_calls": ("calls", "calls that were open when their worker was lost"),
    "count/malformed_peers": ("peers", "connections dropped for malformed messages"),
    "count/opponent_moves": ("moves", "moves of opponents in games"),
    "count/outgrown_trajectories": ("trajectories", "trajectories that outgrew actors.max_context"),
    "count/quarantined": ("tasks", "tasks that could not work"),
    "count/refused_episodes": ("episodes", "episodes without an outcome, because the agent ended when its request was refused"),
    "count/refused_peers": ("peers", "registrations refused"),
    "count/replaced": ("trees", "trees that dynamic sampling replaced"),
    "count/retries": ("calls", "attempts of calls that were repeated"),
    "count/dropped_branches": ("branches", "episodes that a replay could not reach again"),
    "count/retrievals": ("calls", "questions to the retriever"),
    "count/spoken_replies": ("replies", "texts that environments asked a model for"),
    "count/timeouts": ("calls", "attempts of calls that passed their deadline"),
    "count/tree_retries": ("trees", "trees grown again after a fault"),
    "critic/explained_variance": ("share", "variance of the returns that the critic explains; negative is worse than their mean"),
    "critic/grad_norm": ("norm", "gradient norm of the critic before clipping"),
    "critic/loss": ("loss", "value loss of the critic"),
    "critic/value_mean": ("reward", "mean value of the trained tokens"),
    "health/done": ("trees", "training trees that ended (Prometheus only, as all of health)"),
    "health/evaluations": ("evaluations", "held-out evaluations in the journal"),
    "health/growing": ("trees", "trees that grow now"),
    "health/idle": ("seconds", "time since the last node, group or update"),
    "health/loop_lag": ("seconds", "longest delay of a timer of the scheduler's event loop since the last heartbeat"),
    "health/running": ("calls", "calls that a worker has, by service"),
    "health/updates": ("updates", "updates that the run is to make"),
    "health/version": ("updates", "version of the actors' weights"),
    "health/waiting": ("calls", "calls that wait for a worker, by service"),
    "health/workers": ("workers", "connected workers, by service"),
    "heldout/*_half": ("as its measure", "half the width of the measure's 95% interval"),
    "heldout/*": ("as its measure", "mean of a measure of the environment over the held-out tasks"),
    "learner/clip_share": ("share", "trained tokens whose ratio was clipped"),
    "learner/entropy": ("nats", "mean entropy of the policy per trained token"),
    "learner/forwarded_tokens": ("tokens", "tokens forwarded by an optimizer step, shared ones once"),
    "learner/grad_norm": ("norm", "gradient norm of the policy before clipping"),
    "learner/groups": ("groups", "groups of the update; evaluations' records lack it"),
    "learner/incomplete_trajectories": ("trajectories", "trajectories that lack a score which the scheme reads"),
    "learner/kl": ("nats", "mean KL to the initial policy per token (0 if it is not measured)"),
    "learner/kl_factor": ("factor", "factor of the adaptive KL"),
    "learner/left_out_trajectories": ("trajectories", "trajectories that the scheme leaves out"),
    "learner/logprob_gap_max": ("nats", "largest difference of log-probabilities, current and sampled"),
    "learner/logprob_gap_mean": ("nats", "mean absolute difference of log-probabilities, current and sampled"),
    "learner/lr": ("rate", "learning rate of the policy"),
    "learner/mask_share": ("share", "trained tokens that the correction masked"),
    "learner/over_stale": (
        "trees",
        "trees of the update with a token older than scheduler.max_staleness, because younger trees closed before them",
    ),
    "learner/path_tokens": ("tokens", "tokens of all trajectories' paths, shared ones each time"),
    "learner/proximal_kl": ("nats", "KL from the proximal to the current policy, with learner.target_kl"),
    "learner/questions": ("trees", "closed trees of the update"),
    "learner/ratio_max": ("ratio", "largest probability ratio of current and sampling policy"),
    "learner/ratio_mean": ("ratio", "mean probability ratio of current and sampling policy"),
    "learner/seconds": ("seconds", "time of the update"),
    "learner/skipped": ("flag", "1 if the update made no optimizer step"),
    "learner/staleness_max": ("updates", "most updates between sampling and training a token"),
    "learner/staleness_mean": ("updates", "mean updates between sampling and training a token"),
    "learner/stopped_steps": ("steps", "optimizer steps that learner.target_kl left out"),
    "learner/surrogate": ("loss", "surrogate objective of the optimizer step"),
    "learner/trained_tokens": ("tokens", "tokens with a loss weight"),
    "learner/trunk_repeat": ("ratio", "tokens forwarded over the tokens of the trees"),
    "learner/turns": ("turns", "turns of the update"),
    "learner/zero_advantage_share": ("share", "trained tokens with advantage 0"),
    "ppr/process_reward": ("reward", "mean of what a judged turn earns"),
    "ppr/turn_pay_*": ("reward", "what a judged turn of correct or of wrong trajectories earns"),
    "ppr/turns_*": ("turns", "mean length of correct or of wrong trajectories"),
    "prm/accuracy": ("share", "comparisons that the implicit reward model orders rightly"),
    "prm/comparisons": ("comparisons", "comparisons in the batch"),
    "prm/grad_norm": ("norm", "gradient norm of the reward model before clipping"),
    "prm/loss": ("loss", "loss of the reward model before its step"),
    "prm/skipped": ("flag", "1 if the reward model made no step"),
    "prm/step_score_std": ("reward", "standard deviation of the turns' rewards"),
    "rate/decoded_tokens": ("tokens/s", "tokens that all actors decode"),
    "rate/learner_tokens": ("tokens/s", "tokens that the learner forwards"),
    "rollout/judged_scores": ("scores", "those of score/judge_valid where no column has it"),
    "rollout/outcome": ("reward", "mean outcome of the trajectories that ended since the record before"),
    "rollout/outcomes": ("trajectories", "those of rollout/outcome"),
    "score/*": ("as its column", "mean of a score column over the turns that have it; judge_valid: valid share of the judge's scores"),
    "time/checkpoint": ("seconds", "time of the checkpoint, if this update wrote one"),
    "time/publish": ("seconds", "time in which the learner wrote the new weights"),
    "time/run": ("seconds", "time since this start of the scheduler"),
    "time/spread": ("seconds", "time in which the new weights reached the actors"),
    "time/training": ("seconds", "time since the first tree of this start"),
    "time/update_*": (
        "seconds",
        "part of the update on rank 0: pack (the table of turns and the trees' forests), check (of the packed forward, in the first update of a start),"
        " score (passes before the steps: proximal and reference policy, critic, reward model with its steps), forward and backward (of the policy's"
        " steps), step (optimizer, with the sum of the gradients over the ranks), critic (its steps)",
    ),
    "watch/coefficient_mean": ("factor", "mean coefficient of the correction"),
    "watch/engine_gap_max": ("nats", "largest log-probability difference of engine and learner on fresh turns"),
    "watch/engine_gap_mean": ("nats", "mean log-probability difference of engine and learner on fresh turns"),
    "watch/engine_gap_p99": ("nats", "99th percentile of the difference"),
    "watch/explained_*": ("share", "variance of the outcome that a score column explains"),
    "watch/gradient_noise": ("norm squared", "noise in the squared gradient norm"),
    "watch/gradient_signal": ("norm squared", "squared norm of the mean gradient"),
    "watch/noise_scale": ("trees", "batch at which gradient noise and signal are equal"),
    "watch/ratio_p*": ("ratio", "percentile of the probability ratio"),
    "watch/sample_share": ("share", "effective sample size over the tokens"),
    **{
        f"watch/{group}_*/{name}": (unit, f"{meaning}, of the tokens {which}")
        for group, which in (("staleness", "so many updates old (8: or more)"), ("turn", "of this turn (8: or later)"))
        for name, unit, meaning in (
            ("clip_share", "share", "clipped tokens"),
            ("entropy", "nats", "mean entropy"),
            ("gap_mean", "nats", "mean log-probability difference"),
            ("sample_share", "share", "effective sample size"),
            ("tokens", "tokens", "number"),
        )
    },
}  # fmt: skip
"""Name -> unit and meaning. Counts are since the run began (those of calls and workers: since this start of the scheduler)."""

SUM, LARGEST = "sum", "largest"
JOINED = {
    "busy/engine": "busy/engines",
    "cache/prefilled_over_ideal": "cache/ideal_tokens",
    "rollout/outcome": "rollout/outcomes",
    "score/judge_valid": "rollout/judged_scores",
    "time/spread": LARGEST,
    **dict.fromkeys(("cache/hit_rate", "cache/predicted_hit_rate", "cache/prediction_error"), "cache/prompt_tokens"),
    **dict.fromkeys(
        ("busy/engines", "cache/ideal_tokens", "cache/prompt_tokens", "cache/tokens_saved", "count/*"), SUM
    ),
    **dict.fromkeys(("rate/decoded_tokens", "rollout/judged_scores", "rollout/outcomes"), SUM),
}
"""How the records that several schedulers have of one update become the run's: a sum, the largest, or the mean weighted by
another metric. Of the others the first scheduler's is the run's: the learner tells all schedulers the same, and the clock is the first one's."""


def joined(records: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the run's record of an update. records: those of its schedulers, in order."""
    names = dict.fromkeys(name for record in records for name in record)
    return {name: _joined(name, [record for record in records if name in record]) for name in names}


def _joined(name: str, records: Sequence[dict[str, float]]) -> float:
    values = [record[name] for record in records]
    rule = JOINED.get("count/*" if name.startswith("count/") else name)
    if len(values) == 1 or not rule:
        return values[0]
    if rule in (SUM, LARGEST):
        return sum(values) if rule == SUM else max(values)
    weights = [record.get(rule, 1.0) for record in records]
    whole = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / whole if whole else sum(values) / len(values)


def declaration(name: str) -> tuple[str, str] | None:
    """Return unit and meaning of a metric, or None if it is in no row of the table (a plug-in's own)."""
    return METRICS.get(name) or next((METRICS[row] for row in METRICS if fnmatch.fnmatchcase(name, row)), None)


def exported(name: str) -> str:
    """Return a metric's name in Prometheus."""
    return PREFIX + "".join(letter if letter.isalnum() else "_" for letter in name)


def table() -> str:
    """Return the table in Markdown, with a heading for each room."""
    lines: list[str] = []
    for room, names in groupby(METRICS, lambda name: name.partition("/")[0]):
        lines += [f"\n### {room}\n", "| name | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {METRICS[name][0]} | {METRICS[name][1]} |" for name in names]
    return "\n".join(lines).strip()


def with_table(page: str) -> str:
    """Return the page with the table between its marks."""
    before, after = page.partition(START)[0], page.partition(END)[2]
    return f"{before}{START}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
