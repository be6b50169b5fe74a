"""What ``ledger.pacing`` says of a trained tree's staleness, under any order of events."""

from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.learner.update.batches import Inbox
from coppice.scheduler.ledger.pacing import Pacing
from coppice.wire.messages import TreeClosed


class Simulation:
    """Trees that close in any order, the learner's inbox, and a scheduler that hears of an update
    after the learner's next ones began. admitted: the version at each tree's admission. grew: the
    trees that grew when an update took one of a later version. ages: the staleness of trained ones.
    """

    def __init__(self, questions: int, staleness: int, updates: int):
        self.pacing, self.inbox = Pacing(questions, staleness, updates), Inbox(questions, {})
        self.admitted: list[int] = []
        self.growing: list[int] = []
        self.ages: dict[int, int] = {}
        self.grew: set[int] = set()
        self.begun = self.done = 0

    def admit(self) -> None:
        while self.pacing.may_start():
            self.pacing.start()
            self.growing.append(len(self.admitted))
            self.admitted.append(self.pacing.version)

    def close(self, index: int) -> None:
        if self.growing:
            self.inbox.close(TreeClosed(self.growing.pop(index % len(self.growing)), []))

    def begin(self) -> None:
        """The learner takes a batch, if its update before is done and enough trees are closed."""
        if self.begun == self.done and (trees := self.inbox.ready()) is not None:
            self.inbox.take(trees, self.begun)
            self.ages |= {tree: self.begun - self.admitted[tree] for tree in trees}
            latest = max(self.admitted[tree] for tree in trees)
            self.grew |= {tree for tree in self.growing if self.admitted[tree] < latest}
            self.begun += 1

    def play(self, event: int) -> None:
        """One event: what happens (0, 1: a tree closes; 2: an update begins; 3: it ends; 4: it is
        told), and to which tree."""
        index, what = divmod(event, 5)
        match what:
            case 2:
                self.begin()
            case 3:
                self.done = self.begun
            case 4:
                self.pacing.trained(self.done)
            case _:
                self.close(index)


EVENTS = st.lists(st.integers(0, 5 * 16 - 1), max_size=150)


@given(st.integers(1, 4), st.integers(0, 3), EVENTS)
@settings(deadline=None)
def test_trees_are_trained_as_old_as_the_bound_says_in_the_end(
    questions: int, staleness: int, order: list[int]
) -> None:
    sim = Simulation(questions, staleness, updates=5)
    for event in [*order, *[0, 2, 3, 4] * 5 * questions]:
        sim.admit()
        sim.play(event)
        assert sim.pacing.admitted - len(sim.ages) <= (staleness + 1) * questions
        assert sum(sim.ages.values()) <= staleness * len(sim.ages)
    over = {tree for tree, age in sim.ages.items() if age > staleness}
    assert over <= sim.grew
    assert staleness or not over
    assert sim.pacing.finished
    assert len(sim.ages) == len(sim.admitted) == 5 * questions
