"""Why a process of a run ended, what to do about it, and how soon it may be started again. Pure: logs and clocks are given."""

import re
import signal

import msgspec

RESTARTS, WITHIN_S = 3, 600.0
"""A process is started again, and a run resumed, at most so often in so many seconds. A start takes a minute or less on small machines
and a few on large ones: what dies a fourth time in ten minutes works less than it starts, and what dies less often is worth starting."""
FIRST_PAUSE_S = 1.0
"""Before the first restart; doubled for each more within ``WITHIN_S``."""
_LONGEST = 300
"""Characters of a cause that are shown; all of it is in the log."""
_TRACEBACK = "Traceback (most recent call last):\n"
_ENDS = " scheduler.main the run ends: "
"""What the scheduler logs last, where it knows what is wrong."""
_RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [\w.]+ ", re.MULTILINE)
"""How a line of a process's log begins."""
_RANK = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""How torch.distributed begins the lines of a rank's last traceback."""
_PEER_GONE = re.compile(
    r"gloo|nccl|DistBackendError|DistNetworkError|DistStoreError|Connection closed by peer", re.IGNORECASE
)
_NO_MEMORY = re.compile(
    r"MemoryError|out ?of ?memory|can't allocate memory|Cannot allocate memory|SIGKILL", re.IGNORECASE
)
_NO_SPACE = re.compile("No space left on device|disk is full")
"""How Python and SQLite say so, whatever is free afterwards: what did not fit was removed again."""


class Cause(msgspec.Struct, frozen=True):
    """Why a process ended. text: one line. passing: it came from outside (a signal, a lost peer), so it need not happen again."""

    text: str
    passing: bool

    @property
    def second_hand(self) -> bool:
        """Another process was lost: that one's cause is the run's."""
        return self.passing and bool(_PEER_GONE.search(self.text))

    @property
    def full_disk(self) -> bool:
        return bool(_NO_SPACE.search(self.text))


def cause_of(status: int, log: str) -> Cause:
    """Why a process ended with ``status``, negative for a signal. log: what it wrote since it was started."""
    if status < 0:
        known = -status in set(signal.Signals)
        name = f" ({signal.Signals(-status).name})" if known else ""
        guess = ", most likely by the system for want of memory" if -status == signal.SIGKILL else ""
        return Cause(f"killed by signal {-status}{name}{guess}", True)
    if status == 0:
        return Cause("it left, though the run goes on: somebody asked it to (SIGTERM)", True)
    text = _last_error(log)
    return Cause(text or f"it ended with status {status} and wrote nothing", bool(_PEER_GONE.search(text)))


def _last_error(log: str) -> str:
    """The message of the exception that ended a process, else the last line of its log, in one line."""
    log = _RANK.sub("", log)
    _, found, last = log.rpartition(_ENDS)
    if found:
        return shortened(last)
    _, found, last = log.rpartition(_TRACEBACK)
    lines = [line for line in last.splitlines() if line.strip()] or [""]
    if found and not _RECORD.search(last):  # nothing was logged after it, so it was not handled
        ends = next((i for i, line in enumerate(lines) if not line[0].isspace()), len(lines) - 1)
        more = 2 if lines[ends].endswith(":") else 1
        text = re.sub(
            r"^(\w+\.)+(?=\w+(:|$))", "", " ".join(lines[ends : ends + more])
        )  # the module of the exception's class
    else:
        text = _RECORD.sub("", lines[-1])
    return shortened(text)


def shortened(text: str) -> str:
    """One line, of a length that can be read."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def remedy(cause: Cause, again: str) -> str:
    """What to do. again: the command that goes on with the run."""
    if _NO_MEMORY.search(cause.text):
        return (
            f"if memory was short: fewer --actors or --learner, or a smaller actors.kv_cache_gib; go on with: {again}"
        )
    if cause.passing:
        return f"go on with: {again}"
    if "ImportError" in cause.text or "ModuleNotFoundError" in cause.text:
        return f"make that module importable from here, or take out what names it; then {again}"
    return f"mend what the cause names, or it will happen again; then {again} (--set KEY=VALUE changes a setting)"


class Rate:
    """Deaths of one thing, and how long to wait before it is started again."""

    def __init__(self) -> None:
        self._deaths: list[float] = []

    def pause(self, now: float) -> float | None:
        """After a death at ``now``: seconds until the next start; None when it dies too often."""
        self._deaths = [*(before for before in self._deaths if before > now - WITHIN_S), now]
        return None if len(self._deaths) > RESTARTS else FIRST_PAUSE_S * 2 ** (len(self._deaths) - 1)


class Resumes:
    """Whether a run whose scheduler or learner died is resumed.

    An error repeats, unless the run has a newer checkpoint than when it was started or last resumed; what came from outside may pass
    ``RESTARTS`` times in a row without one. Both at most so often as ``Rate`` allows.
    """

    def __init__(self, checkpoint: str) -> None:
        self._rate, self._checkpoint, self._fruitless = Rate(), checkpoint, 0

    def pause(self, now: float, cause: Cause, checkpoint: str) -> float | None:
        """Seconds until the run is resumed; None when it ends. checkpoint: the newest one now, "" for none."""
        self._fruitless = self._fruitless + 1 if checkpoint == self._checkpoint else 0
        self._checkpoint = checkpoint
        pause = self._rate.pause(now)
        return None if self._fruitless > (RESTARTS if cause.passing else 0) or cause.full_disk else pause
