"""The watch on PPR's length side effect (methods.md 5): trajectories grow while a turn earns
reward, and shrink while a turn costs reward. It compares the mean length of the last updates with
that of the first ones.
"""

from collections import deque

FIRST, LAST = 2, 3
"""The number of updates over which the first length and the present length are averaged."""
GROUPS = ("correct", "wrong")
_GROW = {
    True: "a turn earns its process reward even if the outcome is bad: scheme_options.normalisation = 'constant' ties it to the outcome",
    False: "the policy may be learning length itself: try scheme_options.normalisation = 'sample', or a smaller scheduler.budget",
}
"""Cause and remedy, by whether a turn of a wrong trajectory earns reward."""
_SHRINK = (
    "the cheapest policy acts less: make more initial trajectories succeed (lower scheduler.temperature, longer warm start, stronger model), or lower"
    " learner.lr relative to learner.critic.lr"
)


class Lengths:
    """Fills ``first`` during the first updates; later calls of ``warnings`` compare with it. A
    checkpoint stores ``first`` and ``last`` (lengths by group)."""

    def __init__(self) -> None:
        self.first: dict[str, list[float]] = {group: [] for group in GROUPS}
        self.last: dict[str, deque[float]] = {group: deque(maxlen=LAST) for group in GROUPS}

    def warnings(self, values: dict[str, float], limit: float) -> list[str]:
        """Return at most one sentence per group. values: the scheme's "ppr/turns_*" and
        "ppr/turn_pay_*". limit: a factor; 0 never warns."""
        sentences = [self._of(group, values, limit) for group in GROUPS]
        return [sentence for sentence in sentences if sentence]

    def _of(self, group: str, values: dict[str, float], limit: float) -> str:
        turns, pay = values.get(f"ppr/turns_{group}"), values.get(f"ppr/turn_pay_{group}", 0.0)
        if turns is None:  # the scheme is another one, or the batch has no trajectory of the group
            return ""
        first, last = self.first[group], self.last[group]
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
