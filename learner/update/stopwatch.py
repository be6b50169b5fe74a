"""Where the seconds of an update go."""

from collections import defaultdict

from coppice.common.phases import Phases

PREFIX = "time/update_"


class Stopwatch(Phases):
    """Seconds of the phases of updates, which sum to no more than their time. On a GPU a phase ends
    when its kernels are launched, and the wait for them falls to the phase that reads a result."""

    def __init__(self) -> None:
        super().__init__("", 0.0)  # the time outside all phases is not told

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call as metrics, ``time/update_PHASE``."""
        taken, self._spent = self._spent, defaultdict(float)
        return {f"{PREFIX}{phase}": seconds for phase, seconds in taken.items() if phase}
