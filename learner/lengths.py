"""The watch on PPR's length side effect (methods.md 5): trajectories grow while turns pay, or shrink while turns cost.

With the outcome in it, a turn's reward pays after success and costs after failure; without the outcome it pays whatever comes of it.
Either way the number of turns can become what is learnt. Held against the mean of the run's first updates, smoothed over the last ones.
"""

from collections import deque

FIRST, LAST = 2, 3
"""Updates that make the first length, and over which the present one is averaged."""
GROUPS = ("correct", "wrong")
_GROW = {
    True: "the process reward pays whatever the outcome: scheme_options.normalisation = 'constant' ties it to the outcome",
    False: "length itself may be what is learnt: try scheme_options.normalisation = 'sample', or a smaller scheduler.budget",
}
"""The remedy, by whether turns of wrong trajectories pay."""
_SHRINK = (
    "the cheapest policy acts less: let more starts be right (a lower scheduler.temperature, a longer warm start, a stronger model), or lower"
    " learner.lr against learner.critic.lr"
)


class Lengths:
    """first: the lengths of the first updates by group, part of a checkpoint."""

    def __init__(self) -> None:
        self.first: dict[str, list[float]] = {group: [] for group in GROUPS}
        self._last: dict[str, deque[float]] = {group: deque(maxlen=LAST) for group in GROUPS}

    def warnings(self, values: dict[str, float], limit: float) -> list[str]:
        """At most a sentence a group. values: the scheme's "ppr/turns_*" and "ppr/turn_pay_*". limit: the factor, 0 for no warning."""
        made = [self._of(group, values, limit) for group in GROUPS]
        return [sentence for sentence in made if sentence]

    def _of(self, group: str, values: dict[str, float], limit: float) -> str:
        turns, pay = values.get(f"ppr/turns_{group}"), values.get(f"ppr/turn_pay_{group}", 0.0)
        if turns is None:  # another scheme, or a batch without any of the group
            return ""
        first, last = self.first[group], self._last[group]
        if len(first) < FIRST:
            first.append(turns)
            return ""
        last.append(turns)
        usual, now = sum(first) / FIRST, sum(last) / len(last)
        if not limit or len(last) < LAST:
            return ""
        if now > limit * usual and pay > 0:
            remedy = _GROW[values.get("ppr/turn_pay_wrong", 0.0) > 0]
        elif now * limit < usual and pay < 0:
            remedy = _SHRINK
        else:
            return ""
        return (
            f"{group} trajectories have {now:.1f} turns, {now / usual:.2f} times as many as at first (watch.turns = {limit:g}), and a"
            f" judged turn pays {pay:+.2f} in them: {remedy}"
        )
