"""Bounded staleness by admission. Invariant: trees admitted and not yet trained never exceed
(max_staleness + 1) * questions.

A rollout starts only if the trees admitted so far, this one included, stay within ``(max_staleness
+ version + 1) * questions``, where ``version`` updates have each taken the ``questions`` oldest
closed trees (learner/update/batches.py). The staleness of a tree is the version that its update
started from minus the version at its admission, and no token of it is older. Hence:
- max_staleness = 0 is synchronous: every token of update v -> v + 1 was sampled by version v;
- after every update the mean staleness of all trees trained so far is at most max_staleness;
- a single tree is older than that only if it still grew when an update took a tree of a later
  version. Nothing bounds its age: it is trained with its true versions and counted in
  ``learner/over_stale``, as otherwise the learner would wait for it or its work would be lost.
"""


class Pacing:
    """Counts trees; none is admitted that no update would consume. It owns no task or client."""

    def __init__(self, questions: int, max_staleness: int, updates: int, version: int = 0):
        self.questions, self.max_staleness, self.updates = questions, max_staleness, updates
        self.version = version
        self.admitted = version * questions

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
        """Take back the admission of a tree that counts in no update."""
        self.admitted -= 1

    def trained(self, version: int) -> None:
        """An update is done, and its weights ``version`` are in force."""
        self.version = max(self.version, version)

    @property
    def finished(self) -> bool:
        """Whether all updates are done."""
        return self.version >= self.updates
