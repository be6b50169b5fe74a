"""The two kinds of fault and their fates.

infrastructure: the same request may work on another worker or later (retried, counted);
data: this task cannot work anywhere (quarantined with its reason).

A malformed action of the policy is no fault: it is ordinary data and is scored as the method says.
"""

from wire.messages import FaultKind


class Fault(Exception):
    """A classified failure of one call; ``kind`` decides its fate."""

    kind: FaultKind = "infrastructure"


class InfrastructureFault(Fault):
    """A worker, a connection or a deadline failed: retry elsewhere."""


class DataFault(Fault):
    """The request itself cannot be served by any worker: quarantine its task."""

    kind: FaultKind = "data"


FAULTS: dict[FaultKind, type[Fault]] = {"infrastructure": InfrastructureFault, "data": DataFault}


class WireError(ValueError):
    """A frame list that is not a message: too many frames, too large, or not what its header says."""
