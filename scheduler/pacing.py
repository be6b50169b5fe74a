"""Bounded staleness by admission. Invariant: trees admitted and not yet trained never exceed (max_staleness + 1) * questions.

A rollout starts only if the trees admitted so far, this one included, stay within ``(max_staleness + version + 1) * questions``,
where ``version`` updates have each consumed ``questions`` trees. Hence:
- max_staleness = 0 is synchronous: every token of update v -> v + 1 was sampled by version v;
- a tree consumed in the order of admission is trained at most max_staleness versions after its admission;
- batches are cut in the order in which trees close, so a tree that faster trees overtake may exceed the bound; it is trained with its
  true versions and counted in ``over_stale``. Nothing is thrown away for being slow.
The module is pure: it owns no task and no client.
"""


class Pacing:
    """Counts trees: ``start`` admits one if ``may_start``, ``close`` or ``withdraw`` ends it, ``trained`` reports an update.

    ``updates`` bounds the run: no tree is admitted that no update would consume.
    """

    def __init__(self, questions: int, max_staleness: int, updates: int, version: int = 0, untrained: int = 0):
        if questions < 1 or max_staleness < 0:
            raise ValueError(
                f"questions={questions}, max_staleness={max_staleness}: expected at least 1 and at least 0"
            )
        self.questions, self.max_staleness, self.updates = questions, max_staleness, updates
        self.version = version
        self.admitted = version * questions + untrained
        self.over_stale = 0

    def may_start(self) -> bool:
        """Whether one more tree may be admitted now."""
        within = (self.max_staleness + self.version + 1) * self.questions
        return self.admitted < min(within, self.updates * self.questions)

    def start(self) -> None:
        """Admit a tree. Raises RuntimeError if ``may_start`` is False."""
        if not self.may_start():
            raise RuntimeError("a tree was started beyond the staleness bound")
        self.admitted += 1

    def withdraw(self) -> None:
        """Take back the admission of a tree that counts in no update (quarantined before it gave a group, or replaced), so that another tree
        takes its place."""
        self.admitted -= 1

    def trained(self, version: int) -> None:
        """An update is done, and its weights ``version`` are in force."""
        self.version = max(self.version, version)

    def close(self, admitted_at: int) -> None:
        """A tree has closed that was admitted at version ``admitted_at``."""
        self.over_stale += self.version - admitted_at > self.max_staleness

    @property
    def finished(self) -> bool:
        """Whether all updates are done."""
        return self.version >= self.updates
