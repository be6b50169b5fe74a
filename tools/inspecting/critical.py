"""Where the wall time of a run went: every moment of its newest start has exactly one cause, so the
causes' seconds sum to the wall time. docs/report.md ("Who waited for whom") has the rule.

Intervals of the learner are counted back from the moment at which it answered the update's groups.
An update's last tree is the one whose last call ended last. Of several open calls of it, the one
that ends last counts, because a tree goes on only when it has all candidates of a turn. After the
last update there is no last tree. A call's time includes its way to the worker and its wait there;
a call that waits for a free worker is not open yet.
"""

import bisect
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from coppice.tools.inspecting.trace import TracedCall, TracedUpdate, recorded

STARTING, SCHEDULER = "starting processes", "scheduler"
WEIGHTS, HELDOUT, OTHERS = "new weights", "held-out evaluation", "other trees"


def budget(run: Path, records: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the seconds of each cause in the newest start of a run, the largest first. Raises as
    ``trace.recorded`` does."""
    start = recorded(run, records)
    return shares(start.calls, start.updates, start.heldout, start.began, start.until)


def shares(
    calls: Sequence[TracedCall],
    updates: Sequence[TracedUpdate],
    heldout: set[int],
    since: float,
    until: float,
) -> dict[str, float]:
    """Return the seconds of each cause between ``since`` and ``until``, which sum to their
    distance. updates: in order. heldout: their trees."""
    newest: dict[int | None, TracedCall] = {}  # of each tree the call that ends last
    for call in calls:
        newest[call.tree] = max(newest.get(call.tree, call), call, key=lambda one: one.end)
    lasts = [
        max((newest[t] for t in u.trees if t in newest), key=lambda c: c.end, default=None)
        for u in updates
    ]
    ends = [update.work[-1][2] for update in updates]
    changes = [(call.start, False, call) for call in calls] + [(c.end, True, c) for c in calls]
    changes.sort(key=lambda change: change[:2])
    spans = [span for update in updates for span in update.work]
    spans += [span for call in calls for span in call.phases]
    edges = sorted({since, until, *(t for t, *_ in changes), *(t for s in spans for t in s[1:])})
    first = min((call.start for call in calls), default=until)
    opened: defaultdict[int | None, list[TracedCall]] = defaultdict(list)
    kinds: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    coming = iter([*changes, (math.inf, True, None)])
    moment, ends_now, call = next(coming)
    for start, end in pairwise(edges):
        while call is not None and moment <= start:
            kind = HELDOUT if call.tree in heldout else OTHERS
            kind = WEIGHTS if call.service == "load" else kind
            kinds[kind] += -1 if ends_now else 1
            (opened[call.tree].remove if ends_now else opened[call.tree].append)(call)
            moment, ends_now, call = next(coming)
        if start < since or end > until:
            continue
        place = bisect.bisect_right(ends, start)
        work = updates[place].work if place < len(updates) else []
        last = lasts[place] if place < len(lasts) else None
        if start < first:
            cause = STARTING
        elif busy := [name for name, a, b in work if a <= start < b]:
            cause = busy[0]
        elif last is not None and opened[last.tree]:
            own = max(opened[last.tree], key=lambda c: c.end)
            phases = [f" ({name})" for name, a, b in own.phases if a <= start < b]
            cause = "".join(["rollouts: ", own.service.partition(".")[0], *phases[:1]])
        else:
            cause = next((kind for kind in (WEIGHTS, HELDOUT, OTHERS) if kinds[kind]), SCHEDULER)
        seconds[cause] += end - start
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
