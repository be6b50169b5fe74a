"""Why a process of a run ended, what to do about it, and how soon it may be started again. Pure:
callers pass the logs and the time."""

import re
import signal

import msgspec

RESTARTS, WITHIN_S = 3, 600.0
"""A process is restarted at most RESTARTS times within WITHIN_S seconds if it gets nowhere
meanwhile, and a run resumed as often. A start takes from half a minute to a few, so what dies a
fourth time without progress would most likely never work."""
FIRST_PAUSE_S = 1.0
"""Seconds to wait before the first restart. The wait doubles with each further restart within
``WITHIN_S``."""
_LONGEST = 300
"""Characters of a cause that are shown; the log holds the whole text."""
_TRACEBACK = "Traceback (most recent call last):\n"
_ENDS = " scheduler.main the run ends: "
"""The scheduler's last log line begins so when the scheduler knows what went wrong."""
_RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [\w.]+ ", re.MULTILINE)
"""How each record in the log of a process begins."""
_RANK = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""The prefix that torch.distributed puts before each line of a rank's last traceback."""
_PEER_GONE = re.compile(
    r"gloo|nccl|DistBackendError|DistNetworkError|DistStoreError|Connection closed by peer",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(
    r"MemoryError|out ?of ?memory|can't allocate memory|Cannot allocate memory|SIGKILL",
    re.IGNORECASE,
)
_NO_SPACE = re.compile("No space left on device|disk is full")
"""The messages of Python and SQLite. The free space says nothing afterwards, because the files that
did not fit were removed."""


class Cause(msgspec.Struct, frozen=True):
    """Why a process ended. text: one line. passing: the cause came from outside (a signal, a lost
    peer) and need not happen again. stall: the launcher ended the process because the run stood
    still."""

    text: str
    passing: bool
    stall: bool = False

    @property
    def second_hand(self) -> bool:
        """True if this process ended because it lost another process, whose cause is then the cause
        of the run's end."""
        return self.passing and bool(_PEER_GONE.search(self.text))

    @property
    def full_disk(self) -> bool:
        return bool(_NO_SPACE.search(self.text))


def cause_of(status: int, log: str) -> Cause:
    """Return why a process ended. status: its exit status, negative for a signal. log: what it
    wrote since its last start."""
    if status < 0:
        name = f" ({signal.Signals(-status).name})" if -status in set(signal.Signals) else ""
        guess = ", most likely by the system for want of memory"
        killed = f"killed by signal {-status}{name}"
        return Cause(killed + guess * (-status == signal.SIGKILL), True)
    if status == 0:
        return Cause("it left, though the run goes on: somebody asked it to (SIGTERM)", True)
    text = _last_error(log)
    nothing = f"it ended with status {status} and wrote nothing"
    return Cause(text or nothing, bool(_PEER_GONE.search(text)))


def _last_error(log: str) -> str:
    """Return, as one line, the message of the exception that ended a process, or the last line of
    its log if there is none."""
    log = _RANK.sub("", log)
    _, marker, last = log.rpartition(_ENDS)
    if marker:
        return shortened(last)
    _, marker, last = log.rpartition(_TRACEBACK)
    lines = [line for line in last.splitlines() if line.strip()] or [""]
    # nothing was logged after the traceback, so nobody handled the exception
    if marker and not _RECORD.search(last):
        ends = next((i for i, line in enumerate(lines) if not line[0].isspace()), len(lines) - 1)
        more = 2 if lines[ends].endswith(":") else 1
        module = r"^(\w+\.)+(?=\w+(:|$))"  # the module of the exception's class, which is left out
        text = re.sub(module, "", " ".join(lines[ends : ends + more]))
    else:
        text = _RECORD.sub("", lines[-1])
    return shortened(text)


def shortened(text: str) -> str:
    """Return ``text`` as one line of at most ``_LONGEST`` characters."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def remedy(cause: Cause, again: str) -> str:
    """Return what the user should do about ``cause``. again: the command that resumes the run."""
    if _NO_MEMORY.search(cause.text):
        fewer = "if memory was short: fewer --actors or --learner, or a smaller actors.kv_cache_gib"
        return f"{fewer}; go on with: {again}"
    if cause.stall:
        return f"look at the stacks at the end of the logs for what hangs, mend it; then {again}"
    if cause.passing:
        return f"go on with: {again}"
    if "ImportError" in cause.text or "ModuleNotFoundError" in cause.text:
        return f"make that module importable from here, or take out what names it; then {again}"
    return (
        f"mend what the cause names, or it will happen again; then {again}"
        " (--set KEY=VALUE changes a setting)"
    )


class Rate:
    """Deaths of one process. For deaths within ten minutes and without progress, ``pause`` returns
    1 s, 2 s and 4 s, and None for the fourth."""

    def __init__(self) -> None:
        self._deaths: list[float] = []

    def pause(self, now: float, progress: bool = False) -> float | None:
        """Record a death at ``now`` (seconds). Return the seconds until the next start, or None
        after too many deaths. progress: whether the process got anywhere since its last start."""
        recent = [] if progress else [before for before in self._deaths if before > now - WITHIN_S]
        self._deaths = [*recent, now]
        return FIRST_PAUSE_S * 2 ** len(recent) if len(recent) < RESTARTS else None


class Resumes:
    """Decides whether a run whose scheduler or learner died is resumed. Made once per launch;
    ``pause`` is called after each death.

    Progress is a new checkpoint, or more trees and evaluations in the journal. An error would
    repeat, so the run is resumed only if it wrote a checkpoint since its last start. A cause from
    outside may come ``RESTARTS`` times in a row without progress, a stall once.
    """

    def __init__(self, checkpoint: str, done: int = 0) -> None:
        self._checkpoint, self._done, self._fruitless = checkpoint, done, 0

    def pause(self, cause: Cause, checkpoint: str, done: int = 0) -> float | None:
        """Return the seconds until the run is resumed, or None if the run ends. checkpoint: the
        newest one now, "" for none. done: the trees and evaluations in the journal."""
        durable = checkpoint != self._checkpoint
        self._fruitless = 0 if durable or done > self._done else self._fruitless + 1
        self._checkpoint, self._done = checkpoint, max(done, self._done)
        repeats = not cause.passing and not durable
        if repeats or cause.full_disk or self._fruitless > (1 if cause.stall else RESTARTS):
            return None
        return FIRST_PAUSE_S * 2 ** max(0, self._fruitless - 1)
